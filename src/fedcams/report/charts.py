"""The charts of a report, each described once: `plotly` draws them for the page, `figures` for papers.

A chart says what is drawn against what and how every method looks, independent of the library that draws it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcams.report.collection import DASHES, Collection, Look
from fedcams.report.numbers import human_bytes, score
from fedcams.report.parts import PARTS, Parts, parts
from fedcams.report.profiles import PROFILES, time_to
from fedcams.report.series import (
    ACCURACY,
    ADAPTIVITY,
    AVERAGED,
    AXES,
    BYTES,
    COMPRESSION,
    CONSTANTS,
    CURVES,
    GRADIENT,
    LOSSES,
    MEASURED_GRADIENT,
    NONNEGATIVE,
    ROUNDS,
    SCORES,
    Array,
    Axis,
    Histogram,
    Metric,
    Track,
    height,
    histograms,
    track,
)
from fedcams.report.summary import Row, Spread, Summary

Kind = Literal["lines", "points", "stacks", "bars", "map"]
"""Curves with bands, points with error bars, horizontal stacked bars, groups of bars, a heat map."""
PART, CLIENT, LABEL, NETWORK = (
    Axis("part", "Part of all bytes, up + down", percent=True, range=(0.0, 1.0)),
    Axis("client", "Client"),
    Axis("label", "Label"),
    Axis("network", names=tuple((p.name, f"{p.down:g}/{p.up:g} Mbit/s", f"{p.latency:g} ms") for p in PROFILES)),
)


@dataclass(frozen=True)
class Series:
    """One line, row of points, or set of bars with the same look; arrays `[T]`."""

    name: str
    look: Look
    x: dict[str, Array]
    """Key of an axis -> where the values are on it."""
    y: NDArray[np.number[Any]]
    """The values; for a heat map, whole numbers `[rows, columns]`."""
    low: Array | None = None
    """With `high`, the band around a line or the error bar of a point."""
    high: Array | None = None
    notes: tuple[str, ...] = ()
    """The text shown on hover at each value."""


@dataclass(frozen=True)
class Chart:
    """What is drawn, independent of any plotting library."""

    kind: Kind
    key: str
    """Its name in files and in the page."""
    title: str
    x: tuple[Axis, ...]
    """The horizontal axes to choose from."""
    y: Axis
    series: tuple[Series, ...]


class Charts(NamedTuple):
    """All charts of a report, by section."""

    accuracy: list[Chart]
    """Of the last and of the averaged models, against any axis."""
    losses: list[Chart]
    """Test and training, against any axis."""
    communication: list[Chart]
    """What accuracy costs, and where the bytes go; empty unless some method compresses the downlink."""
    compression: list[Chart]
    """What compression loses, for the methods that lose something."""
    adaptivity: list[Chart]
    """What the server does with updates, and how long they are."""
    constants: list[Chart]
    """Constants of the theorems, as `theory_every` measured them; empty if no run did."""
    partitions: list[Chart]
    network: list[Chart]
    """Time to the target; empty if nothing was evaluated."""


def describe(collection: Collection, summary: Summary) -> Charts:
    """Return the charts of a report on these runs; a chart without data is left out."""
    tracks = [track(method) for method in collection.methods]
    accuracy = [_lines(tracks, collection.looks, metric, summary.percent) for metric in SCORES]
    losses, errors, steps, constants = (
        [chart for metric in metrics if (chart := _lines(tracks, collection.looks, metric)).series]
        for metrics in (LOSSES, COMPRESSION, ADAPTIVITY, CONSTANTS)
    )
    estimates = _lines(tracks, collection.looks, GRADIENT)
    found = parts(collection) if summary.target is not None else []
    return Charts(
        [chart for chart in accuracy if chart.series],
        losses,
        [_tradeoff(collection, summary), _stacks(found)] if found else [],
        errors,
        steps,
        [_beside(chart, estimates) if chart.key == MEASURED_GRADIENT.key else chart for chart in constants],
        [_map(histogram, number) for number, histogram in enumerate(histograms(collection), 1)],
        [] if summary.target is None else _times(collection, summary, summary.target),
    )


def _lines(tracks: list[Track], looks: list[Look], metric: Metric, percent: bool = False) -> Chart:
    """Return the chart of one metric for all methods: mean over seeds, and a band from the lowest to the highest."""
    found = [(each.method.label, look, each.curve(metric)) for each, look in zip(tracks, looks, strict=True)]
    shown = [each for each in found if each[2] and (metric not in COMPRESSION or each[2].high.any())]
    series = tuple(
        Series(name, look, c.x, c.mean, *((c.low, c.high) if c.seeds > 1 else ())) for name, look, c in shown
    )
    seen = height([c for _, _, c in shown]) if metric in CURVES else None
    y = Axis(metric.key, metric.title, percent=percent, range=seen, nonnegative=percent or metric in NONNEGATIVE)
    return Chart("lines", metric.key, metric.title, AXES if metric in CURVES else (ROUNDS,), y, series)


def _beside(measured: Chart, estimates: Chart) -> Chart:
    """Add the estimates of the same methods to a chart, in the rounds that were measured."""
    rounds = {series.name: series.x[ROUNDS.key] for series in measured.series}
    found = [_estimate(series, rounds[series.name]) for series in estimates.series if series.name in rounds]
    return replace(measured, series=(*measured.series, *(series for series in found if len(series.y))))


def _estimate(series: Series, rounds: Array) -> Series:
    """Return a series of estimates in these rounds, in its method's colour with another dash."""
    kept = np.isin(series.x[ROUNDS.key], rounds)
    other = replace(series.look, dash=DASHES[(DASHES.index(series.look.dash) + 2) % len(DASHES)])
    x = {key: places[kept] for key, places in series.x.items()}
    band = () if series.low is None or series.high is None else (series.low[kept], series.high[kept])
    return Series(f"{series.name}, estimate from updates", other, x, series.y[kept], *band)


def _tradeoff(collection: Collection, summary: Summary) -> Chart:
    """One point per method: final accuracy, from the lowest to the highest seed, against all bytes.

    It is that of averaged models if all methods have them.
    """
    averaged = all(row.averaged is not None for row in summary.rows)
    finals = [row.averaged if averaged else row.final for row in summary.rows]
    found = zip(summary.rows, finals, collection.looks, strict=True)
    series = tuple(_point(row, final, look) for row, final, look in found if final is not None)
    name = f"Final accuracy{', averaged models' if averaged else ''}"
    y = Axis("final", name, percent=summary.percent)
    return Chart("points", "tradeoff", f"{name}, against all bytes", (BYTES,), y, series)


def _point(row: Row, final: Spread, look: Look) -> Series:
    mean, low, high = (np.array([value]) for value in (final.mean, final.low, final.high))
    x = {BYTES.key: np.array([row.bytes_total])}
    return Series(row.label, look, x, mean, low, high, (human_bytes(row.bytes_total),))


def _stacks(found: list[Parts]) -> Chart:
    """Return the chart of where the bytes of each method go, as fractions of its total."""
    totals = np.array([part.total or 1.0 for part in found])
    places = np.arange(len(found), dtype=np.float64)
    series = []
    for index, (name, colour) in enumerate(PARTS.items()):
        sizes = np.array([part.bytes[index] for part in found])
        notes = tuple(map(human_bytes, sizes.tolist()))
        series.append(Series(name, Look(colour), {PART.key: sizes / totals}, places, notes=notes))
    y = Axis("methods", names=tuple((part.label, human_bytes(part.total)) for part in found))
    return Chart("stacks", "communication", "Where the bytes go", (PART,), y, tuple(series))


def _times(collection: Collection, summary: Summary, target: float) -> list[Chart]:
    """Time to the target: of the last models and, where some are averaged, of averaged ones."""
    title = f"Seconds to {score(target, summary.percent)} accuracy"
    metrics = {"time-to-accuracy": (ACCURACY, title)}
    if summary.averages:
        metrics["time-to-accuracy-averaged"] = (AVERAGED, f"{title}, averaged models")
    return [_bars(collection, target, key, *chosen) for key, chosen in metrics.items()]


def _bars(collection: Collection, target: float, key: str, metric: Metric, title: str) -> Chart:
    """Seconds of each method to the target on each network; NaN where it was not reached."""
    places = {NETWORK.key: np.arange(len(PROFILES), dtype=np.float64)}
    series = []
    for method, look in zip(collection.methods, collection.looks, strict=True):
        times = [time_to(method, profile, target, metric) for profile in PROFILES]
        series.append(Series(method.label, look, places, np.array(times, np.float64)))
    return Chart("bars", key, "Time to the target", (NETWORK,), Axis("seconds", title, log=True), tuple(series))


def _map(histogram: Histogram, number: int) -> Chart:
    """Return the chart of how many examples of each label every client has: clients along x, labels along y."""
    clients = {CLIENT.key: np.arange(len(histogram.counts), dtype=np.float64)}
    series = Series("examples", Look(""), clients, histogram.counts.T)
    return Chart("map", f"partition-{number}", histogram.title, (CLIENT,), LABEL, (series,))
