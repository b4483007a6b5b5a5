"""From run folders to a folder with the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fedcams.durable import os_errors
from fedcams.errors import FedcamsError
from fedcams.report.collect import collect
from fedcams.report.figures import library, write_figures
from fedcams.report.page import page
from fedcams.report.summary import summarize
from fedcams.report.tables import markdown, write_rounds_csv, write_summary_csv


class ReportError(FedcamsError, ValueError):
    """A report that was asked for in a way that makes no sense, or that cannot be written."""


def report(runs: Sequence[Path], out: Path, target: float | None = None) -> Path:
    """Writes a report on runs into `out` and returns its page.

    Each of `runs` is the folder of a run or one that holds runs, at any depth. `target` is the accuracy to compare
    communication and time at; without it, 95% of the best method's final accuracy. Written are

    - `index.html`, one file that needs nothing else and no network;
    - `figures/`, the same charts as PNG and SVG;
    - `summary.csv` and `rounds.csv`, the exact numbers, and `summary.md`, the table.
    """
    if target is not None and not math.isfinite(target):
        raise ReportError(f"target={target!r} is not a finite number; give an accuracy such as 0.9, or none")
    collection = collect(runs)
    library()  # or nothing is written
    summary = summarize(collection, target)
    text, out = page(collection, summary), Path(out)
    with os_errors(ReportError, "write to", out, "free space, or name a folder that can be written"):
        out.mkdir(parents=True, exist_ok=True)
        write_figures(out / "figures", collection, summary)
        write_summary_csv(out / "summary.csv", summary)
        write_rounds_csv(out / "rounds.csv", collection)
        (out / "summary.md").write_text(markdown(collection, summary), "utf-8")
        (out / "index.html").write_text(text, "utf-8")
    return out / "index.html"
