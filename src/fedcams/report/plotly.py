"""Charts as figures for plotly.js; the page sets the colours of text and grid by its theme."""

from __future__ import annotations

import html
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcams.report.charts import Chart, Series
from fedcams.report.series import Axis

Trace = dict[str, Any]
"""One line, bar or map of a chart, as plotly.js takes it."""
SYMBOLS = {"solid": "circle", "dash": "square", "dot": "diamond", "dashdot": "cross"}
FEW = 10
"""Up to this many clients, each one gets a tick; otherwise Plotly would put ticks between clients."""


class Lists:
    """Lists of numbers as JSON, each stored once however many curves share it: all charts share their rounds."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._indices: dict[bytes, int] = {}

    def index(self, values: NDArray[np.number[Any]]) -> int:
        """Return which of the lists holds these values; they are added if none does."""
        index = self._indices.setdefault(values.tobytes(), len(self.texts))
        if index == len(self.texts):
            self.texts.append(short(values))
        return index

    def __str__(self) -> str:
        return f"[{','.join(self.texts)}]"


def figure(chart: Chart, lists: Lists) -> dict[str, Any]:
    """Return the chart as `key`, `data`, `layout` and `x`.

    For curves, `x` names the axes to choose from and, for each, the index in `lists` of every series; `y` in `data` is
    such an index too. The page puts the numbers into `data`. For other charts `x` is empty and `data` is complete.
    """
    if chart.kind != "lines":
        data = [trace for series in chart.series for trace in TRACES[chart.kind](chart, series)]
        return {"key": chart.key, "data": data, "layout": _layout(chart), "x": {}}
    data = [trace for series in chart.series for trace in _line(chart, series, lists)]
    x = {axis.key: [lists.index(series.x[axis.key]) for series in chart.series] for axis in chart.x}
    return {"key": chart.key, "data": data, "layout": _layout(chart), "x": x}


def _layout(chart: Chart) -> dict[str, Any]:
    """Return axes and behaviour; a chart's heading says what it measures, so only a heat map has a y-axis title."""
    x, y = _axis(chart.x[0], chart.x[0].title), _axis(chart.y, chart.y.title if chart.kind == "map" else "")
    if chart.kind == "lines":
        return {"xaxis": x, "yaxis": y, "hovermode": "x unified"}
    if chart.kind == "stacks":
        y |= {"automargin": True, "autorange": "reversed", "showgrid": False}
        return {"barmode": "stack", "xaxis": x, "yaxis": y}
    if chart.kind == "bars":
        return {"barmode": "group", "bargap": 0.25, "xaxis": x, "yaxis": y}
    if chart.kind == "map":
        labels, clients = chart.series[0].y.shape
        x |= {"showgrid": False} | ({"dtick": 1} if clients <= FEW else {})
        y |= {"showgrid": False, "dtick": max(1, labels // FEW)}
    return {"xaxis": x, "yaxis": y}


def _axis(axis: Axis, title: str) -> dict[str, Any]:
    found: dict[str, Any] = {"zeroline": False}
    if title:  # an empty one would take up space
        found |= {"title": {"text": title}}
    if axis.log:
        found |= {"type": "log"}
    if axis.percent:
        found |= {"tickformat": ".0%" if axis.range == (0.0, 1.0) else "~%"}
    if axis.range:
        found |= {"range": list(axis.range)}
    elif axis.nonnegative:
        found |= {"rangemode": "nonnegative"}
    return found


def _line(chart: Chart, series: Series, lists: Lists) -> list[Trace]:
    """Return the mean, and behind it a band if there are several seeds; the legend shows and hides them together."""
    shared = {"type": "scatter", "legendgroup": series.name, "mode": "lines"}
    form = _form(chart)
    mean = {
        **shared,
        **({"mode": "markers"} if len(series.y) == 1 else {}),  # a line needs two points
        "y": lists.index(series.y),
        "name": text(series.name),
        "line": {"color": series.look.colour, "dash": series.look.dash, "width": 2.2},
        "hovertemplate": form,
        "meta": form,  # the page extends it for each axis
    }
    if series.low is None or series.high is None:
        return [mean]
    unseen = {**shared, "showlegend": False, "hoverinfo": "skip", "line": {"width": 0}}
    low = {**unseen, "y": lists.index(series.low)}
    high = {**unseen, "y": lists.index(series.high), "fill": "tonexty", "fillcolor": series.look.faint(0.16)}
    return [low, high, mean]


def _point(chart: Chart, series: Series) -> list[Trace]:
    assert series.low is not None
    assert series.high is not None
    above, below = (series.high - series.y).tolist(), (series.y - series.low).tolist()
    marker = {"color": series.look.colour, "size": 11, "symbol": SYMBOLS[series.look.dash]}
    bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1}
    shown = {"mode": "markers", "marker": marker, "error_y": bars}
    told = {"customdata": list(series.notes), "hovertemplate": f"{_form(chart)}, %{{customdata}}"}
    return [
        {
            "type": "scatter",
            "x": series.x[chart.x[0].key].tolist(),
            "y": series.y.tolist(),
            **_named(series),
            **shown,
            **told,
            "dash": series.look.dash,  # for the legend
        }
    ]


def _stack(chart: Chart, series: Series) -> list[Trace]:
    names = [text(" · ".join((label, total.replace(" ", "\N{NO-BREAK SPACE}")))) for label, total in chart.y.names]
    values = {"x": series.x[chart.x[0].key].tolist(), "y": names, "orientation": "h"}
    told = {"customdata": list(series.notes), "hovertemplate": "%{customdata}, %{x:.1%}"}
    return [{"type": "bar", **values, **_named(series), "marker": {"color": series.look.colour}, **told}]


def _bar(chart: Chart, series: Series) -> list[Trace]:
    """Return bars labelled with network names only, because readers can edit the rates that are shown below them."""
    values = {"x": [lines[0] for lines in chart.x[0].names], "y": json.loads(short(series.y))}
    marker = {"color": series.look.colour, "pattern": {"shape": series.look.pattern}}
    named = {"name": text(series.name), "dash": series.look.dash}  # the dash is for the legend
    return [{"type": "bar", **values, **named, "marker": marker, "hoverinfo": "text+name"}]


def _map(chart: Chart, series: Series) -> list[Trace]:
    title = {"text": series.name, "side": "right", "font": {"size": 12.5}}
    told = f"client %{{x}}, label %{{y}}: %{{z}} {series.name}<extra></extra>"
    bar = {"thickness": 12, "outlinewidth": 0, "title": title}
    return [
        {"type": "heatmap", "z": series.y.tolist(), "colorscale": "Cividis", "colorbar": bar, "hovertemplate": told}
    ]


TRACES = {"points": _point, "stacks": _stack, "bars": _bar, "map": _map}


def _form(chart: Chart) -> str:
    """Return the format of values shown on hover."""
    return f"%{{y:{'.2%' if chart.y.percent else '.4~g'}}}"


def _named(series: Series) -> dict[str, str]:
    return {"name": text(series.name), "legendgroup": series.name}


def text(label: str) -> str:
    """Return a label that Plotly shows unchanged: it reads names as HTML."""
    return html.escape(label, quote=False)


def short(values: NDArray[np.number[Any]]) -> str:
    """Return numbers as JSON with five digits, one more than is shown on hover; null for NaN, which JSON lacks."""
    text = ",".join(["%.5g"] * len(values)) % tuple(values.tolist())  # all at once takes a third of the time
    return f"[{text.replace('nan', 'null')}]"
