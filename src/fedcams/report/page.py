"""A report: its page and the files next to it.

The page is one HTML file that contains its style, its script, Plotly and the data, and fetches nothing. Plotly and the
data are compressed and written as base64; the browser inflates them.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from fedcams.durable import os_errors, own_folder, write_text
from fedcams.errors import FedcamsError
from fedcams.report.charts import Chart, Charts, describe
from fedcams.report.collection import Collection, collect
from fedcams.report.figures import library, write_figures
from fedcams.report.plotly import Lists, figure
from fedcams.report.profiles import PROFILES, link
from fedcams.report.sections import facts, network, notes, segments, summary_table, tiles, versions
from fedcams.report.series import AXES
from fedcams.report.summary import Summary, summarize
from fedcams.report.tables import explained, markdown, write_rounds_csv, write_summary_csv
from fedcams.runs import Run
from fedcams.theory.measure import CLIENTS


class ReportError(FedcamsError, ValueError):
    """A report that cannot be made as requested, or cannot be written."""


def report(runs: Sequence[Path], out: Path, target: float | None = None, figures: bool = False) -> Path:
    """Write a report on runs and return the path of its page.

    The folder gets `index.html`, one file that needs nothing else and no network, `summary.csv` and `rounds.csv` with
    the exact numbers, and `summary.md` with the table. With `figures`, `figures/` has the same charts as PNG and SVG,
    which takes longer than the rest and needs matplotlib.

    Arguments:
        runs: folders of runs, or folders that hold runs at any depth.
        out: the folder to write to.
        target: the accuracy at which communication and time are compared, 0.9 or 90 for 90%; by default 95% of the
            best final accuracy.
        figures: whether to draw figures for papers.

    Returns:
        The path of `index.html`.

    Raises:
        RunError: for a path without runs, and a damaged run.
        ExtraMissing: for `figures` without matplotlib.

    Examples:
        >>> from pathlib import Path
        >>> from fedcams.experiment import Experiment
        >>> from fedcams.report import report
        >>> from fedcams.runs import run
        >>> tiny = Experiment(task="quadratic", model="point", clients=2, sampler="full", rounds=1)
        >>> finished = run(tiny, Path("reported"))
        >>> report([Path("reported")], Path("report")).name
        'index.html'
    """
    with _without_garbage_collection():
        return _report(runs, Path(out), target, figures)


def _report(runs: Sequence[Path], out: Path, target: float | None, figures: bool) -> Path:
    if target is not None and not math.isfinite(target):
        raise ReportError(f"target={target!r} is not a finite number; give an accuracy such as 0.9, or leave it out")
    collection = collect(runs)
    if figures:
        library()  # refuse before anything is written
    summary = summarize(collection, target)
    if summary.percent and summary.target is not None and not 0 <= summary.target <= 1:
        raise ReportError(f"target={target!r}, but every accuracy is from 0 to 1; give one such as 0.9, or 90 for 90%")
    charts = describe(collection, summary)
    text = page(collection, summary, charts)
    with os_errors(ReportError, "write to", out, "free space, or name a folder that can be written"):
        own_folder(out)
        if figures:
            write_figures(out / "figures", charts)
        write_summary_csv(out / "summary.csv", summary)
        write_rounds_csv(out / "rounds.csv", collection)
        write_text(out / "summary.md", markdown(collection, summary))
        write_text(out / "index.html", text)
    return out / "index.html"


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector: reports read millions of numbers, and it would look through all of them in vain."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def page(collection: Collection, summary: Summary, charts: Charts | None = None, alone: bool = False) -> str:
    """Return the whole page; unless it is `alone`, it mentions the files next to it."""
    charts = charts or describe(collection, summary)
    return Template(_part("page.html")).substitute(
        title=_title(collection),
        css=_part("page.css"),
        facts=facts(collection, summary),
        notes=notes(collection),
        tiles=tiles(summary),
        table=summary_table(collection, summary),
        explained=escape(explained(summary)),
        axes=segments(),
        **_curves(charts),
        compression=_section("Compression", charts.compression, COMPRESSION_NOTE),
        adaptivity=_section("Adaptivity", charts.adaptivity, ADAPTIVITY_NOTE),
        constants=_section("Measured constants", charts.constants, CONSTANTS_NOTE),
        communication=_section("Communication", charts.communication, COMMUNICATION_NOTE),
        network=network(collection, summary),
        partitions=_section("Partitions", charts.partitions, PARTITION_NOTE),
        environment=versions(collection),
        plotly=base64.b64encode(_file("vendored/plotly-cartesian.min.js.gz")).decode(),
        data=_packed(_data(collection, summary, charts)),
        script=_part("page.js"),
        exact="" if alone else EXACT,
        **_asides(collection),
        beside="" if alone else BESIDE,
    )


COMPRESSION_NOTE = (
    "q is the relative error ‖C(h) − h‖/‖h‖, averaged over the cohort, next to the largest; γ is "
    "‖C(mean h) − mean C(h)‖/‖mean Δ‖, if measured; residuals are what clients keep (root mean square). Lossless "
    "methods are left out."
)
ADAPTIVITY_NOTE = (
    "A coordinate is off the floor if v̂ exceeds ε with FedAMS, or if √v or √v̂ does with other adaptive servers. While "
    "none is, FedAMS is FedAvg with momentum, and the others are close to it. The rate is ‖step‖/‖m‖. Norms of updates "
    "are root mean squares over the cohort, before compression. The estimate of ‖∇f‖² comes from the updates; it is "
    "noisy, and too low if clients move far."
)
CONSTANTS_NOTE = (
    f"Measured by <code>theory_every</code> at the models from which rounds start, each time with at most {CLIENTS} "
    "clients. L is the larger of two measurements: how fast clients’ gradients change over the round, and the "
    "curvature of one client. G is the length of the longest gradient of a batch. Both may be larger in other rounds "
    "and for other clients. σ_l is that of the client whose batches vary most, σ_g the root mean square of "
    "‖∇F_i − ∇f‖. ‖∇f‖² is corrected for the clients that were not measured, so it can be negative. The estimate next "
    "to it comes from the updates of the same rounds."
)
COMMUNICATION_NOTE = (
    "All clients and rounds, mean over seeds. Updates go up, everything else down: compressed deltas or models, what "
    "clients that missed several deltas need to catch up, and dense models, as at a first contact."
)
EXACT = " Exact numbers are in <code>summary.csv</code>."
BESIDE = (
    "<footer>Next to this page: every round in <code>rounds.csv</code>, the table in <code>summary.csv</code> and "
    "<code>summary.md</code>. <code>fedcams report RUNS --figures</code> also draws the charts for papers (PNG, SVG)."
    "</footer>"
)
LOSSES_TITLE = "Losses"
LEVEL = 5
"""How hard the data is compressed: 6 takes two thirds more time for two percent less."""
PARTITION_NOTE = "The number of examples of each label that every client trains on."


def _asides(collection: Collection) -> dict[str, str]:
    """Return sentences that are needed only for several seeds or several methods."""
    seeds, methods = any(len(method.runs) > 1 for method in collection.methods), len(collection.methods) > 1
    return {
        "range": " Small print: lowest to highest seed." if seeds else "",
        "band": "Line: mean over seeds; band: lowest to highest seed." if seeds else "",
        "legend": " Click a method in a legend to hide it, double-click it to show it alone." if methods else "",
    }


def _title(collection: Collection) -> str:
    experiments = [method.experiment for method in collection.methods]
    parts = [sorted({str(getattr(e, key)) for e in experiments}) for key in ("task", "model")]
    return escape(" · ".join(", ".join(part) for part in parts))


def _curves(charts: Charts) -> dict[str, str]:
    """Return the curves of the first section, accuracy or else losses, and the section of losses below the table."""
    scored = bool(charts.accuracy)
    first = charts.accuracy if scored else charts.losses
    return {
        "first_title": "Accuracy" if scored else LOSSES_TITLE,
        "first": _cards(first, wide=len(first) % 2),
        "losses": _section(LOSSES_TITLE, charts.losses if scored else [], ""),
    }


def _section(title: str, shown: list[Chart], note: str) -> str:
    if not shown:
        return ""
    cards, small = _cards(shown, wide=len(shown) % 2), f'<p class="small">{note}</p>' if note else ""
    return f'<section class="live"><h2>{title}</h2><div class="grid">{cards}</div>{small}</section>'


def _cards(shown: list[Chart], wide: int) -> str:
    """Return one card per chart; the first `wide` of them take the full width."""
    return "".join(
        f'<div class="card{" wide" if i < wide else ""}"><h3 id="title-{c.key}">{escape(c.title)}</h3>'
        f'<div class="chart" id="chart-{c.key}" role="figure" aria-labelledby="title-{c.key}"></div>'
        '<div class="legend"></div></div>'
        for i, c in enumerate(shown)
    )


def _data(collection: Collection, summary: Summary, charts: Charts) -> str:
    """Return the script's data: charts, axes to choose from, and each client's link, to compute times."""
    *shown, timed = charts
    lists = Lists()
    data = {
        "charts": [figure(chart, lists) for section in shown for chart in section],
        "axes": [{"key": axis.key, "title": axis.title, "unit": axis.unit} for axis in AXES],
        "network": [figure(chart, lists) for chart in timed],
        "profiles": [vars(profile) for profile in PROFILES],
        "percent": summary.percent,
        "runs": [_run(index, run, lists) for index, method in enumerate(collection.methods) for run in method.runs],
    }
    return f'{{"lists":{lists},{json.dumps(data, separators=(",", ":"), allow_nan=False)[1:]}'


def _packed(text: str) -> str:
    """Return text compressed without a time stamp, so that equal data gives equal pages."""
    return base64.b64encode(gzip.compress(text.encode(), LEVEL, mtime=0)).decode()


def _run(method: int, run: Run, lists: Lists) -> dict[str, Any]:
    """Return the accuracy of a run and what one client's link carries, round by round, as indices of lists."""
    return {"method": method, "link": {key: lists.index(values) for key, values in vars(link(run)).items()}}


def _file(name: str) -> bytes:
    return files("fedcams.report").joinpath(name).read_bytes()


def _part(name: str) -> str:
    return _file(name).decode()
