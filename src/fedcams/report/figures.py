"""The same charts for papers: PNG and SVG by matplotlib, one chart a file, equal input giving equal files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedcams.extras import load
from fedcams.report.axes import ACCURACY, AXES, BYTES, COMPRESSION, CURVES, ROUNDS, Axis, Metric
from fedcams.report.collect import Collection
from fedcams.report.partitions import Histogram, histograms
from fedcams.report.parts import PARTS, Parts, parts
from fedcams.report.profiles import PROFILES, time_to
from fedcams.report.series import curve, height
from fedcams.report.summary import Summary
from fedcams.report.units import human_bytes, score

SIZE = (4.8, 3.2)
"""Inches; two of them fill the width of a page."""
LINE, LONG = 0.17, 45
"""Inches that a line of the legend takes, and letters with which a name takes the whole of it."""
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so figures are the same everywhere
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.dpi": 200,  # text is as wide when it is placed as when it is drawn
    "savefig.dpi": 200,
    "svg.hashsalt": "fedcams",  # ids in SVG are random otherwise
}
LINES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
MARKERS = {"solid": "o", "dash": "s", "dot": "D", "dashdot": "P"}
HATCHES = {"": "", "/": "///", "x": "xxx", ".": "..."}


def library(module: str = "matplotlib") -> Any:
    """matplotlib, or a module of it."""
    return load(module, what="a report", extra="report")


def write_figures(folder: Path, collection: Collection, summary: Summary) -> list[Path]:
    """Every chart as PNG and SVG; returns the files."""
    matplotlib = library()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(STYLE):
        for name, figure in _figures(collection, summary):
            frame = _laid_out(figure)
            for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
                path = folder / f"{name}.{kind}"
                figure.savefig(path, bbox_inches=frame, metadata=metadata)
                written.append(path)
    return written


def _laid_out(figure: Any) -> Any:
    """Places everything, once for both files, and returns the frame around it."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure.get_tightbbox().padded(0.1)


def _figures(collection: Collection, summary: Summary) -> Iterator[tuple[str, Any]]:
    pairs = [(metric, axis) for metric in CURVES for axis in AXES] + [(metric, ROUNDS) for metric in COMPRESSION]
    for metric, axis in pairs:
        if figure := _lines(collection, metric, axis, summary.percent):
            yield f"{metric.key}-{axis.key}", figure
    if (found := parts(collection)) and summary.target is not None:
        yield "communication", _stacks(found)
        yield "tradeoff", _tradeoff(collection, summary)
    for index, histogram in enumerate(histograms(collection)):
        yield f"partition-{index + 1}", _heat_map(histogram)
    if summary.target is not None:
        yield "time-to-accuracy", _bars(collection, summary, summary.target)


def _figure() -> tuple[Any, Any]:
    """A figure of its own: no pyplot, no global state."""
    figure = library("matplotlib.figure").Figure(SIZE, layout="constrained")
    return figure, figure.subplots()


def _lines(collection: Collection, metric: Metric, axis: Axis, percent: bool) -> Any:
    figure, axes = _figure()
    shown = []
    for method, style in zip(collection.methods, collection.looks, strict=True):
        drawn = curve(method, metric)
        if drawn and (metric not in COMPRESSION or drawn.high.any()):
            shown.append(drawn)
            x = drawn.x[axis.key]
            shape = {"linestyle": LINES[style.dash], "marker": "o" if len(x) == 1 else None}  # one point makes no line
            axes.plot(x, drawn.mean, color=style.colour, label=_text(method.label), **shape)
            if drawn.seeds > 1:
                axes.fill_between(x, drawn.low, drawn.high, color=style.colour, alpha=0.16, linewidth=0)
    if not axes.lines:
        return None
    ticker = library("matplotlib.ticker")
    if axis.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ticker.EngFormatter(unit=axis.unit))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    if percent and metric == ACCURACY:
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    axes.set(xlabel=axis.title, ylabel=metric.title, ylim=height(shown) if metric in CURVES else None)
    _legend(figure)
    return figure


def _heat_map(histogram: Histogram) -> Any:
    figure, axes = _figure()
    image = axes.imshow(histogram.counts.T, aspect="auto", origin="lower", cmap="cividis", interpolation="nearest")
    whole = library("matplotlib.ticker").MaxNLocator
    figure.colorbar(image, label="examples", ticks=whole(integer=True))
    axes.xaxis.set_major_locator(whole(integer=True))
    axes.yaxis.set_major_locator(whole("auto", integer=True))
    axes.grid(False)
    axes.set(xlabel="Client", ylabel="Label")
    axes.set_title(_text(histogram.title), fontsize=9)
    return figure


def _tradeoff(collection: Collection, summary: Summary) -> Any:
    """Final accuracy of each method, from its lowest to its highest seed, against all bytes."""
    figure, axes = _figure()
    for row, look in zip(summary.rows, collection.looks, strict=True):
        if row.final is not None:
            low, high = row.final.mean - row.final.low, row.final.high - row.final.mean
            style = {"color": look.colour, "marker": MARKERS[look.dash], "capsize": 2}
            axes.errorbar([row.bytes_total], [row.final.mean], [[low], [high]], ls="", label=_text(row.label), **style)
    ticker = library("matplotlib.ticker")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ticker.EngFormatter(unit="B"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    if summary.percent:
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
    axes.set(xlabel=BYTES.title, ylabel="Final accuracy")
    _legend(figure)
    return figure


def _stacks(found: list[Parts]) -> Any:
    """Where the bytes of each method went, as parts of all of them."""
    figure, axes = _figure()
    places, left = np.arange(len(found)), np.zeros(len(found))
    for index, (name, colour) in enumerate(PARTS.items()):
        shares = np.array([part.bytes[index] / part.total if part.total else 0.0 for part in found])
        axes.barh(places, shares, 0.7, left=left, color=colour, label=name)
        left += shares
    axes.set_yticks(places, [f"{_text(part.label)}\n{human_bytes(part.total)}" for part in found], fontsize=7.5)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.xaxis.set_major_formatter(library("matplotlib.ticker").PercentFormatter(1.0))
    axes.set(xlabel="Part of all bytes, up + down", xlim=(0, 1))
    _legend(figure)
    return figure


def _bars(collection: Collection, summary: Summary, target: float) -> Any:
    figure, axes = _figure()
    methods = collection.methods
    width, places = 0.8 / len(methods), np.arange(len(PROFILES))
    for index, (method, style) in enumerate(zip(methods, collection.looks, strict=True)):
        times = [time_to(method, profile, target) for profile in PROFILES]
        heights = [np.nan if time is None else time for time in times]
        left = places - 0.4 + (index + 0.5) * width
        label = _text(method.label) + ("" if times[0] is not None else " (not reached)")
        axes.bar(left, heights, width * 0.9, color=style.colour, hatch=HATCHES[style.pattern], label=label)
    axes.set_yscale("log")
    ticker = library("matplotlib.ticker")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.grid(False, axis="x")
    axes.set_xticks(places, [f"{p.name}\n{p.down:g}/{p.up:g} Mbit/s\n{p.latency:g} ms" for p in PROFILES], fontsize=7.5)
    axes.set_ylabel(f"Seconds to {score(target, summary.percent)} accuracy")
    _legend(figure)
    return figure


def _legend(figure: Any) -> None:
    """Under the chart, where it covers nothing; what takes more than four lines makes the figure higher."""
    names = figure.axes[0].get_legend_handles_labels()[1]
    columns = 2 if max(map(len, names), default=0) <= LONG else 1
    figure.set_figheight(SIZE[1] + LINE * max(0, -(-len(names) // columns) - 4))
    figure.legend(loc="outside lower center", ncols=columns)


def _text(label: str) -> str:
    """As it is: matplotlib takes dollars for mathematics, and hides what starts with an underscore."""
    return (f" {label}" if label.startswith("_") else label).replace("$", r"\$")
