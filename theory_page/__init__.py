"""The experiments and pictures of docs/theory.md."""
