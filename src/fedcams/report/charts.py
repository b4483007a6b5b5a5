"""The charts of the page, as figures for plotly.js; colours of text and grid are set in the page, by its theme."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from fedcams.report.axes import ACCURACY, AXES, BYTES, COMPRESSION, CURVES, ROUNDS, Metric
from fedcams.report.collect import Collection, Method
from fedcams.report.palette import Look
from fedcams.report.partitions import Histogram
from fedcams.report.parts import PARTS, Parts, parts
from fedcams.report.series import Array, Curve, curve, height
from fedcams.report.summary import Row, Summary
from fedcams.report.units import human_bytes

Trace = dict[str, Any]
"""One line, bar or map of a chart, as plotly.js takes it."""


@dataclass(frozen=True)
class Chart:
    """A figure with its place in the page."""

    key: str
    title: str
    figure: dict[str, Any]
    """`data` and `layout`, as plotly.js takes them."""
    x: dict[str, list[list[float | None]]]
    """For each axis the x of every method drawn; empty when there is only one axis, and x stands in the figure."""


def curves(collection: Collection, percent: bool) -> list[Chart]:
    """Accuracy and losses, to be put on any axis."""
    charts = [_lines(collection, metric, percent and metric == ACCURACY) for metric in CURVES]
    return [chart for chart in charts if chart.figure["data"]]


def compression(collection: Collection) -> list[Chart]:
    """What compression loses, of the methods that lose something."""
    charts = [_lines(collection, metric, False, axes=False) for metric in COMPRESSION]
    return [chart for chart in charts if chart.figure["data"]]


def communication(collection: Collection, summary: Summary) -> list[Chart]:
    """What accuracy costs, and where the bytes of each method went, where the downlink is compressed somewhere."""
    found = parts(collection)
    return [_tradeoff(collection, summary), _stacks(found)] if found and summary.target is not None else []


def _tradeoff(collection: Collection, summary: Summary) -> Chart:
    """One point a method: final accuracy, from the lowest to the highest seed, against all bytes."""
    pairs = zip(summary.rows, collection.looks, strict=True)
    traces = [_point(row, style, summary.percent) for row, style in pairs if row.final]
    layout = {
        "xaxis": {"title": {"text": BYTES.title}, "type": "log"},
        "yaxis": {"zeroline": False, "tickformat": "~%" if summary.percent else ""},
    }
    return Chart("tradeoff", "Final accuracy against all bytes", {"data": traces, "layout": layout}, {})


def _point(row: Row, style: Look, percent: bool) -> Trace:
    assert row.final is not None
    low, high = row.final.mean - row.final.low, row.final.high - row.final.mean
    return {
        "type": "scatter",
        "x": [row.bytes_total],
        "y": [row.final.mean],
        "error_y": {"type": "data", "symmetric": False, "array": [high], "arrayminus": [low], "thickness": 1},
        "mode": "markers",
        "name": html.escape(row.label, quote=False),
        "legendgroup": row.label,
        "marker": {"color": style.colour, "size": 11, "symbol": SYMBOLS[style.dash]},
        "hovertemplate": f"%{{y:{'.2%' if percent else '.4~g'}}}, {human_bytes(row.bytes_total)}",
    }


SYMBOLS = {"solid": "circle", "dash": "square", "dot": "diamond", "dashdot": "cross"}


def _stacks(found: list[Parts]) -> Chart:
    methods = [f"{html.escape(part.label, quote=False)} · {human_bytes(part.total)}" for part in found]
    traces = [
        _part(name, colour, [p.bytes[i] for p in found], found, methods)
        for i, (name, colour) in enumerate(PARTS.items())
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {
            "title": {"text": "Part of all bytes, up + down"},
            "tickformat": ".0%",
            "zeroline": False,
            "range": [0, 1],
        },
        "yaxis": {"automargin": True, "autorange": "reversed", "showgrid": False},
    }
    return Chart("communication", "Where the bytes go", {"data": traces, "layout": layout}, {})


def _part(name: str, colour: str, sizes: list[float], found: list[Parts], methods: list[str]) -> Trace:
    shares = [size / part.total if part.total else 0.0 for size, part in zip(sizes, found, strict=True)]
    texts = [human_bytes(size) for size in sizes]
    return {
        "type": "bar",
        "x": shares,
        "y": methods,
        "orientation": "h",
        "name": name,
        "legendgroup": name,
        "marker": {"color": colour},
        "customdata": texts,
        "hovertemplate": "%{customdata}, %{x:.1%}",
    }


NUMBER = {"text": "examples", "side": "right", "font": {"size": 12.5}}


def partition(histogram: Histogram, index: int) -> Chart:
    """A heat map, clients to the right and labels upwards."""
    trace = {
        "type": "heatmap",
        "z": histogram.counts.T.tolist(),
        "colorscale": "Cividis",
        "colorbar": {"thickness": 12, "outlinewidth": 0, "title": NUMBER},
        "hovertemplate": "client %{x}, label %{y}: %{z} examples<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": "Client"}, "showgrid": False, "zeroline": False, **_whole(len(histogram.counts))},
        "yaxis": {"title": {"text": "Label"}, "showgrid": False, "zeroline": False, "dtick": _step(histogram)},
    }
    return Chart(f"partition-{index + 1}", histogram.title, {"data": [trace], "layout": layout}, {})


def _whole(clients: int) -> dict[str, int]:
    """Ticks at clients: Plotly would put some between them where there are few."""
    return {"dtick": 1} if clients <= 10 else {}


def _step(histogram: Histogram) -> int:
    labels: int = histogram.counts.shape[1]
    return max(1, labels // 10)


def _lines(collection: Collection, metric: Metric, percent: bool, axes: bool = True) -> Chart:
    traces: list[Trace] = []
    shown: list[Curve] = []
    for method, style in zip(collection.methods, collection.looks, strict=True):
        drawn = curve(method, metric)
        if drawn and (metric not in COMPRESSION or drawn.high.any()):
            still = {} if axes else {"x": compact(drawn.x[ROUNDS.key])}  # x that moves is put in by the page
            traces += [trace | still for trace in _method(method, drawn, style, ".2%" if percent else ".4~g")]
            shown.append(drawn)
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": ROUNDS.title}, "zeroline": False},
        "yaxis": {"title": {"text": ""}, "zeroline": False, "tickformat": "~%" if percent else ""},
        "hovermode": "x unified",
    }
    if metric in CURVES and (seen := height(shown)):
        layout["yaxis"] |= {"range": list(seen)}
    elif percent or metric in COMPRESSION:
        layout["yaxis"] |= {"rangemode": "nonnegative"}
    x = {axis.key: [compact(drawn.x[axis.key]) for drawn in shown] for axis in AXES} if axes else {}
    return Chart(metric.key, metric.title, {"data": traces, "layout": layout}, x)


def _method(method: Method, drawn: Curve, style: Look, form: str) -> list[Trace]:
    """The mean, and behind it the band when there are several seeds; the legend shows and hides them together."""
    shared = {"type": "scatter", "legendgroup": method.label, "mode": "lines"}
    alone = {"mode": "markers"} if len(drawn.mean) == 1 else {}  # one point makes no line
    unseen = {**shared, "showlegend": False, "hoverinfo": "skip", "line": {"width": 0}}
    mean = {
        **shared,
        **alone,
        "y": compact(drawn.mean),
        "name": html.escape(method.label, quote=False),  # Plotly reads names as HTML
        "line": {"color": style.colour, "dash": style.dash, "width": 2.2},
        "hovertemplate": f"%{{y:{form}}}",
        "meta": f"%{{y:{form}}}",  # the page adds to it, by axis
    }
    if drawn.seeds == 1:
        return [mean]
    low = {**unseen, "y": compact(drawn.low)}
    high = {**unseen, "y": compact(drawn.high), "fill": "tonexty", "fillcolor": style.faint(0.16)}
    return [low, high, mean]


def compact(values: Array) -> list[float | None]:
    """Five digits, one more than a pointer is told and a third of what there is; None for NaN, which JSON lacks."""
    short = (float(f"{value:.5g}") for value in values.tolist())
    return [None if value != value else int(value) if value.is_integer() else value for value in short]
