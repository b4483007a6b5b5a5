"""`fedcams report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedcams.cli.options import Target


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, or folders that hold runs.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Where to write; by default RUN/report, of several ./report.", show_default=False),
    ] = None,
    target: Target = None,
) -> None:
    """Lay runs side by side: curves, tables and the numbers behind them."""
    beside = runs[0] if len(runs) == 1 else Path()
    page = write_report(runs, beside / "report" if out is None else out, target)
    Console(highlight=False, soft_wrap=True).print(f"report: {page}", markup=False)


def write_report(runs: Sequence[Path], out: Path, target: float | None = None) -> Path:
    """The path of the page."""
    from fedcams.report import report  # what it draws with takes a while to load

    return report(runs, out, target)
