"""Pieces of Markdown from which docs/theory.md is put together."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 120


def paragraph(*sentences: str) -> str:
    """Return sentences as one paragraph, in lines as wide as those of the page."""
    return textwrap.fill(" ".join(sentences), WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


def picture(name: str, text: str) -> str:
    """Return a picture of docs/theory, with what it shows for readers who cannot see it."""
    return f"![{text}](theory/{name}.png)\n"


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table whose first column is text, and the others numbers."""
    rows = [heads, ["---", *["--:"] * (len(heads) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
