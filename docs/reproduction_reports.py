"""The HTML reports of docs/reproduction.md, and whether one on disk is that of the runs."""

from __future__ import annotations

import base64
import gzip
import re
from pathlib import Path

from reproduction_runs import Done, collection

from fedcams.report import summarize
from fedcams.report.page import page


def html(runs: list[Done]) -> str:
    """The report on these runs."""
    shown = collection(runs)
    return page(shown, summarize(shown), alone=True)


def write_report(path: Path, runs: list[Done]) -> None:
    """Writes the report, unless what is there says the same."""
    text = html(runs)
    if not path.exists() or inflated(path.read_text("utf-8")) != inflated(text):
        path.write_text(text, "utf-8")


def inflated(text: str) -> str:
    """The page with what it holds compressed in clear: versions of zlib compress differently."""
    return re.sub(r'(?<=<script type="text/plain" id="data">)[^<]*', _clear, text)


def _clear(packed: re.Match[str]) -> str:
    return gzip.decompress(base64.b64decode(packed[0])).decode()
