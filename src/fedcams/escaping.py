"""Text in the cells of tables: shown unchanged, and never mistaken for a formula or markup."""

from __future__ import annotations

import html
import re

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""What spreadsheets take for the beginning of a formula."""
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Characters with which text commands a terminal."""


def plain(text: str) -> str:
    """Return text escaped so that Markdown shows it unchanged, except for control characters."""
    shown = CONTROLS.sub("\N{REPLACEMENT CHARACTER}", " ".join(text.split()))
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", html.escape(shown, quote=False))


def csv_cell(value: object) -> object:
    """Return a value for a CSV file: text that a spreadsheet would run as a formula gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
