"""The charts of the page, as Plotly figures; colours of text and grid are set in the page, by its theme."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcams.report.axes import ACCURACY, AXES, BYTES, COMPRESSION, CURVES, ROUNDS, Metric
from fedcams.report.collect import Collection, Method
from fedcams.report.extra import load
from fedcams.report.palette import Look, look
from fedcams.report.partitions import Histogram
from fedcams.report.parts import PARTS, Parts, parts
from fedcams.report.series import Curve, curve
from fedcams.report.summary import Row, Summary
from fedcams.report.units import human_bytes


@dataclass(frozen=True)
class Chart:
    """A figure with its place in the page."""

    key: str
    title: str
    figure: dict[str, Any]
    """`data` and `layout`, as plotly.js takes them."""
    x: dict[str, list[list[float]]]
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
    return [_tradeoff(summary), _stacks(found)] if found and summary.target is not None else []


def _tradeoff(summary: Summary) -> Chart:
    """One point a method: final accuracy, from the lowest to the highest seed, against all bytes."""
    go = load("plotly.graph_objects")
    traces = [_point(go, row, index, summary.percent) for index, row in enumerate(summary.rows) if row.final]
    layout = {
        "xaxis": {
            "title": {"text": BYTES.title},
            "type": "log",
            "exponentformat": "SI",
            "ticksuffix": "B",
            "dtick": "D2",
        },
        "yaxis": {"zeroline": False, "tickformat": ".1%" if summary.percent else ""},
    }
    return Chart("tradeoff", "Final accuracy against all bytes", _plain(go.Figure(traces, layout)), {})


def _point(go: Any, row: Row, index: int, percent: bool) -> Any:
    assert row.final is not None
    low, high = row.final.mean - row.final.low, row.final.high - row.final.mean
    return go.Scatter(
        x=[row.bytes_total],
        y=[row.final.mean],
        error_y={"type": "data", "symmetric": False, "array": [high], "arrayminus": [low], "thickness": 1},
        mode="markers",
        name=html.escape(row.label, quote=False),
        legendgroup=row.label,
        marker={"color": look(index).colour, "size": 11, "symbol": SYMBOLS[look(index).dash]},
        hovertemplate=f"%{{y:{'.2%' if percent else '.4~g'}}}, {human_bytes(row.bytes_total)}",
    )


SYMBOLS = {"solid": "circle", "dash": "square", "dot": "diamond", "dashdot": "cross"}


def _stacks(found: list[Parts]) -> Chart:
    go = load("plotly.graph_objects")
    methods = [f"{html.escape(part.label, quote=False)} · {human_bytes(part.total)}" for part in found]
    traces = [
        _part(go, name, colour, [p.bytes[i] for p in found], found, methods)
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
    return Chart("communication", "Where the bytes go", _plain(go.Figure(traces, layout)), {})


def _part(go: Any, name: str, colour: str, sizes: list[float], found: list[Parts], methods: list[str]) -> Any:
    shares = [size / part.total if part.total else 0.0 for size, part in zip(sizes, found, strict=True)]
    texts = [human_bytes(size) for size in sizes]
    return go.Bar(
        x=shares,
        y=methods,
        orientation="h",
        name=name,
        legendgroup=name,
        marker={"color": colour},
        customdata=texts,
        hovertemplate="%{customdata}, %{x:.1%}",
    )


def partition(histogram: Histogram, index: int) -> Chart:
    """A heat map, clients to the right and labels upwards."""
    go = load("plotly.graph_objects")
    trace = go.Heatmap(
        z=histogram.counts.T.astype(np.int32),
        colorscale="Cividis",
        colorbar={"thickness": 12, "outlinewidth": 0},
        hovertemplate="client %{x}, label %{y}: %{z} examples<extra></extra>",
    )
    layout = {
        "xaxis": {"title": {"text": "Client"}, "showgrid": False, "zeroline": False},
        "yaxis": {"title": {"text": "Label"}, "showgrid": False, "zeroline": False, "dtick": _step(histogram)},
    }
    return Chart(f"partition-{index + 1}", histogram.title, _plain(go.Figure([trace], layout)), {})


def _step(histogram: Histogram) -> int:
    labels: int = histogram.counts.shape[1]
    return max(1, labels // 10)


def _lines(collection: Collection, metric: Metric, percent: bool, axes: bool = True) -> Chart:
    go = load("plotly.graph_objects")
    traces, places = [], []
    for index, method in enumerate(collection.methods):
        drawn = curve(method, metric)
        if drawn and (metric not in COMPRESSION or drawn.high.any()):
            traces += _method(go, method, drawn, look(index), ".2%" if percent else ".4~g")
            places.append(drawn.x)
    layout = {
        "xaxis": {"title": {"text": ROUNDS.title}, "zeroline": False},
        "yaxis": {"title": {"text": ""}, "zeroline": False, "tickformat": ".0%" if percent else ""},
        "hovermode": "x unified",
    }
    x = {axis.key: [_compact(place[axis.key]) for place in places] for axis in AXES} if axes else {}
    figure = _plain(go.Figure(traces, layout))
    if axes:  # a method's traces have the same x, which the page puts in
        for trace in figure["data"]:
            del trace["x"]
    return Chart(metric.key, metric.title, figure, x)


def _method(go: Any, method: Method, drawn: Curve, style: Look, form: str) -> list[Any]:
    """The mean, and behind it the band when there are several seeds; the legend shows and hides them together."""
    shared = {"x": _compact(drawn.x[ROUNDS.key]), "legendgroup": method.label, "mode": "lines"}
    unseen = {**shared, "showlegend": False, "hoverinfo": "skip", "line": {"width": 0}}
    mean = go.Scatter(
        **shared,
        y=_compact(drawn.mean),
        name=html.escape(method.label, quote=False),  # Plotly reads names as HTML
        line={"color": style.colour, "dash": style.dash, "width": 2.2},
        hovertemplate=f"%{{y:{form}}}",
        meta=f"%{{y:{form}}}",  # the page adds to it, by axis
    )
    if drawn.seeds == 1:
        return [mean]
    low = go.Scatter(**unseen, y=_compact(drawn.low))
    high = go.Scatter(**unseen, y=_compact(drawn.high), fill="tonexty", fillcolor=style.faint(0.16))
    return [low, high, mean]


def _compact(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """Six digits are more than a screen shows, and a third of what a file would hold."""
    short = (float(f"{value:.6g}") for value in values.tolist())
    return [int(value) if value.is_integer() else value for value in short]


def _plain(figure: Any) -> dict[str, Any]:
    """Without Plotly's own template: the page brings its style."""
    figure.update_layout(template="none")
    plain: dict[str, Any] = json.loads(figure.to_json())
    plain["layout"].pop("template", None)
    return plain
