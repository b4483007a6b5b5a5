"""The page: one HTML file that holds its style, its script, Plotly and the data, and fetches nothing.

Plotly and the data are compressed and written as base64; the browser inflates them.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from fedcams.report import charts
from fedcams.report.axes import AXES
from fedcams.report.charts import Chart
from fedcams.report.collect import Collection
from fedcams.report.palette import Look
from fedcams.report.partitions import histograms
from fedcams.report.profiles import PROFILES, link
from fedcams.report.sections import facts, network, notes, segments, summary_table, tiles, versions
from fedcams.report.summary import Summary
from fedcams.report.tables import explained
from fedcams.runs import Run


def page(collection: Collection, summary: Summary, alone: bool = False) -> str:
    """The whole file; it speaks of the files beside it unless it stands alone."""
    curves = charts.curves(collection, summary.percent)
    compression = charts.compression(collection)
    communication = charts.communication(collection, summary)
    partitions = [charts.partition(histogram, index) for index, histogram in enumerate(histograms(collection))]
    return Template(_part("page.html")).substitute(
        title=_title(collection),
        css=_part("page.css"),
        facts=facts(collection, summary),
        notes=notes(collection),
        tiles=tiles(summary),
        table=summary_table(collection, summary),
        explained=escape(explained(summary)),
        axes=segments(),
        curves=_cards(curves, wide=1),
        compression=_section("Compression", compression, COMPRESSION_NOTE),
        communication=_section("Communication", communication, COMMUNICATION_NOTE),
        network=network(collection, summary),
        partitions=_section("Partitions", partitions, PARTITION_NOTE),
        environment=versions(collection),
        plotly=base64.b64encode(_file("vendored/plotly-cartesian.min.js.gz")).decode(),
        data=_packed(_data(collection, summary, [*curves, *communication, *compression, *partitions])),
        script=_part("page.js"),
        exact="" if alone else EXACT,
        **_asides(collection),
        beside="" if alone else BESIDE,
    )


COMPRESSION_NOTE = (
    "q is the relative error ‖C(h) − h‖/‖h‖, mean over the cohort; γ is ‖C(mean h) − mean C(h)‖/‖mean Δ‖, where it was "
    "measured. Methods that lose nothing are left out."
)
COMMUNICATION_NOTE = (
    "All clients and rounds, mean over seeds. Updates go up, the rest down: deltas to clients that are in step, or "
    "whole models, compressed; what brings back clients that missed several, and dense models, as at a first contact."
)
EXACT = " Exact numbers are in <code>summary.csv</code>."
BESIDE = (
    "<footer>Beside this page: the charts for papers in <code>figures/</code> (PNG, SVG), every round in "
    "<code>rounds.csv</code>, the table in <code>summary.csv</code> and <code>summary.md</code>.</footer>"
)
PARTITION_NOTE = "How many examples of each label every client trains on."


def _asides(collection: Collection) -> dict[str, str]:
    """What is said only where there are several seeds or several methods."""
    seeds, methods = any(len(method.runs) > 1 for method in collection.methods), len(collection.methods) > 1
    return {
        "range": " Small print is the lowest to the highest seed." if seeds else "",
        "band": "Line: mean over seeds; band: lowest to highest seed." if seeds else "",
        "legend": " Click a method in a legend to hide it, double-click to see it alone." if methods else "",
    }


def _title(collection: Collection) -> str:
    experiments = [method.experiment for method in collection.methods]
    parts = [sorted({str(getattr(e, key)) for e in experiments}) for key in ("task", "model")]
    return escape(" · ".join(", ".join(part) for part in parts))


def _section(title: str, shown: list[Chart], note: str) -> str:
    if not shown:
        return ""
    cards = _cards(shown, wide=len(shown) % 2)
    return f'<section class="live"><h2>{title}</h2><div class="grid">{cards}</div><p class="small">{note}</p></section>'


def _cards(shown: list[Chart], wide: int) -> str:
    """One card a chart; the first `wide` of them take the whole width."""
    return "".join(
        f'<div class="card{" wide" if i < wide else ""}"><h3 id="title-{c.key}">{escape(c.title)}</h3>'
        f'<div class="chart" id="chart-{c.key}" role="figure" aria-labelledby="title-{c.key}"></div></div>'
        for i, c in enumerate(shown)
    )


def _data(collection: Collection, summary: Summary, shown: Iterable[Chart]) -> str:
    """What the script works with."""
    data = {
        "charts": [{"key": chart.key, **chart.figure, "x": chart.x} for chart in shown],
        "axes": [{"key": axis.key, "title": axis.title, "unit": axis.unit} for axis in AXES],
        "methods": [_method(m.label, style) for m, style in zip(collection.methods, collection.looks, strict=True)],
        "profiles": [vars(profile) for profile in PROFILES],
        "percent": summary.percent,
        "runs": [_run(index, run) for index, method in enumerate(collection.methods) for run in method.runs],
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def _packed(text: str) -> str:
    """Without a clock in it, so that equal data give equal pages."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _method(label: str, style: Look) -> dict[str, str]:
    return {"name": escape(label, quote=False), "colour": style.colour, "pattern": style.pattern}


def _run(method: int, run: Run) -> dict[str, Any]:
    """One client's link, round by round."""
    carried = link(run)
    return {"method": method, **{key: charts.compact(values) for key, values in vars(carried).items()}}


def _file(name: str) -> bytes:
    return files("fedcams.report").joinpath(name).read_bytes()


def _part(name: str) -> str:
    return _file(name).decode()
