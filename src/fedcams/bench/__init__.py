"""Benchmarks: how long rounds take on this machine, where the time goes, and how long they take by hand."""
