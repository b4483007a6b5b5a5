"""Charts for papers: PNG and SVG by matplotlib, one chart per file; equal input gives equal files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from fedcams.durable import EVERYONE, own_folder, write_whole
from fedcams.extras import load
from fedcams.report.charts import Chart, Charts, Series
from fedcams.report.series import Axis

SIZE = (4.8, 3.2)
"""Inches; two figures fill the width of a page."""
LINE, LONG = 0.17, 45
"""Inches per line of the legend, and the number of characters above which a name gets its own line."""
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # part of matplotlib, so figures are the same everywhere
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.dpi": 200,  # text is placed and drawn at the same width
    "savefig.dpi": 200,
    "figure.autolayout": False,  # it would change our layout
    "figure.constrained_layout.use": False,
    "svg.hashsalt": "fedcams",  # otherwise ids in SVG are random
}
LINES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
MARKERS = {"solid": "o", "dash": "s", "dot": "D", "dashdot": "P"}
HATCHES = {"": "", "/": "///", "x": "xxx", ".": "..."}


def library(module: str = "matplotlib") -> Any:
    """Return matplotlib or a module of it; say what to install if it is missing."""
    return load(module, what="a figure", extra="report")


def write_figures(folder: Path, charts: Charts) -> list[Path]:
    """Write every chart as PNG and SVG, a chart with several horizontal axes once for each; return the files."""
    matplotlib = library()
    own_folder(folder)
    written = []
    with matplotlib.rc_context(STYLE):
        for chart in (chart for section in charts for chart in section):
            for axis in chart.x:
                drawn = figure(chart, axis)
                frame = _laid_out(drawn)
                for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
                    path = folder / f"{chart.key}{f'-{axis.key}' if chart.kind == 'lines' else ''}.{kind}"
                    image = io.BytesIO()
                    drawn.savefig(image, format=kind, bbox_inches=frame, metadata=metadata)
                    write_whole(path, image.getbuffer(), mode=EVERYONE)
                    written.append(path)
    return written


def _laid_out(drawn: Any) -> Any:
    """Place everything, once for both files, and return the frame around it.

    A figure that keeps a layout engine, even the empty one, is drawn twice for each file.
    """
    drawn.get_layout_engine().execute(drawn)
    drawn.set_layout_engine(None)
    return drawn.get_tightbbox().padded(0.1)


def figure(chart: Chart, axis: Axis) -> Any:
    """Return a matplotlib figure of a chart on one of its horizontal axes; pyplot and global state are not touched."""
    drawn = library("matplotlib.figure").Figure(SIZE, layout="constrained")
    axes = drawn.subplots()
    DRAW[chart.kind](axes, chart, axis)
    _dress(axes.xaxis, axis, close=chart.kind != "lines")
    _dress(axes.yaxis, chart.y, close=chart.kind != "lines")
    if chart.kind == "map":
        axes.set_title(_text(chart.title), fontsize=9)
    else:
        _legend(drawn)
    return drawn


def _dress(side: Any, axis: Axis, close: bool) -> None:
    """Set scale, ticks, limits and title of one axis; with `close`, a logarithmic one has ticks at 1, 2 and 5."""
    ticker, name = library("matplotlib.ticker"), side.axis_name
    if axis.log and side.get_data_interval()[1] > 0:  # if no method reached the target, there is nothing to scale
        side.axes.set(**{f"{name}scale": "log"})
        if close:
            side.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        plain, prefixed = ticker.StrMethodFormatter("{x:g}"), ticker.EngFormatter(unit=axis.unit)
        side.set_major_formatter(prefixed if axis.unit else plain)
        side.set_minor_formatter(ticker.NullFormatter())
    if axis.percent:
        side.set_major_formatter(ticker.PercentFormatter(1.0))
    if axis.names:
        side.set_ticks(range(len(axis.names)), ["\n".join(map(_text, lines)) for lines in axis.names], fontsize=7.5)
        side.axes.grid(False, axis=name)
    low, high = side.get_view_interval()
    if axis.range or (axis.nonnegative and low < 0):
        side.axes.set(**{f"{name}lim": axis.range or (0, high)})
    side.set_label_text(axis.title)


def _lines(axes: Any, chart: Chart, axis: Axis) -> None:
    for series in chart.series:
        x, look = series.x[axis.key], series.look
        marker = "o" if len(x) == 1 else None  # a line needs two points
        axes.plot(x, series.y, color=look.colour, linestyle=LINES[look.dash], marker=marker, label=_text(series.name))
        if series.low is not None:
            axes.fill_between(x, series.low, series.high, color=look.colour, alpha=0.16, linewidth=0)


def _points(axes: Any, chart: Chart, axis: Axis) -> None:
    for series in chart.series:
        assert series.low is not None
        assert series.high is not None
        reach = np.stack([series.y - series.low, series.high - series.y])
        style = {"color": series.look.colour, "marker": MARKERS[series.look.dash], "capsize": 2, "ls": ""}
        axes.errorbar(series.x[axis.key], series.y, reach, label=_text(series.name), **style)


def _stacks(axes: Any, chart: Chart, axis: Axis) -> None:
    left = np.zeros(len(chart.y.names))
    for series in chart.series:
        axes.barh(series.y, series.x[axis.key], 0.7, left=left, color=series.look.colour, label=_text(series.name))
        left += series.x[axis.key]
    axes.invert_yaxis()


def _bars(axes: Any, chart: Chart, axis: Axis) -> None:
    width = 0.8 / len(chart.series)
    for index, series in enumerate(chart.series):
        places = series.x[axis.key] - 0.4 + (index + 0.5) * width
        look = {"color": series.look.colour, "hatch": HATCHES[series.look.pattern]}
        axes.bar(places, series.y, width * 0.9, label=_reached(series), **look)


def _reached(series: Series) -> str:
    return _text(series.name) + ("" if np.isfinite(series.y).any() else " (not reached)")


def _map(axes: Any, chart: Chart, axis: Axis) -> None:
    (series,) = chart.series
    image = axes.imshow(series.y, aspect="auto", origin="lower", cmap="cividis", interpolation="nearest")
    whole = library("matplotlib.ticker").MaxNLocator
    axes.figure.colorbar(image, label=series.name, ticks=whole(integer=True))
    axes.xaxis.set_major_locator(whole(integer=True))
    axes.yaxis.set_major_locator(whole("auto", integer=True))
    axes.grid(False)


DRAW = {"lines": _lines, "points": _points, "stacks": _stacks, "bars": _bars, "map": _map}


def _legend(drawn: Any) -> None:
    """Put the legend under the chart, where it covers nothing; more than four lines make the figure higher."""
    names = drawn.axes[0].get_legend_handles_labels()[1]
    columns = 2 if max(map(len, names), default=0) <= LONG else 1
    drawn.set_figheight(SIZE[1] + LINE * max(0, -(-len(names) // columns) - 4))
    drawn.legend(loc="outside lower center", ncols=columns)


def _text(label: str) -> str:
    """Return a label that matplotlib shows unchanged: it reads dollars as math and hides a leading underscore."""
    return (f" {label}" if label.startswith("_") else label).replace("$", r"\$")
