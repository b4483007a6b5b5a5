"""Curves: what runs recorded, as arrays over rounds, and several seeds as a mean with a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcams.report.axes import AXES, BYTES, BYTES_UP, PAPER_BITS, ROUNDS, Axis, Metric
from fedcams.report.collect import Method
from fedcams.runs import Run

Array = NDArray[np.float64]

START = 0.1
"""This part of the rounds, the first, does not count for the height of a chart: it would take most of it."""


@dataclass(frozen=True)
class Curve:
    """A metric over the rounds in which some seed recorded it; arrays `[T]`."""

    x: dict[str, Array]
    """By the key of an axis: where the seeds are on it, on average."""
    mean: Array
    low: Array
    high: Array
    seeds: int

    def __bool__(self) -> bool:
        return len(self.mean) > 0


def values(run: Run, metric: Metric) -> Array:
    """`[T]`, what a run recorded in each of its rounds, NaN where it did not or where it was not finite."""
    known = np.array([np.nan if (v := getattr(r, metric.key)) is None else v for r in run.records], np.float64)
    return np.where(np.isfinite(known), known, np.nan)


def position(run: Run, axis: Axis) -> Array:
    """`[T]`, how far a run had come on an axis after each of its rounds."""
    if axis == ROUNDS:
        return np.array([r.round for r in run.records], np.float64)
    spent = {
        BYTES: [r.wire_up + r.wire_down for r in run.records],
        BYTES_UP: [r.wire_up for r in run.records],
        PAPER_BITS: [r.paper_bits_up + r.paper_bits_down for r in run.records],
    }[axis]
    return np.cumsum(np.array(spent, np.float64))


def curve(method: Method, metric: Metric) -> Curve:
    """Mean, lowest and highest over the seeds that have come as far, round by round."""
    rounds = np.unique(np.concatenate([position(run, ROUNDS) for run in method.runs]))
    table = np.full((len(method.runs), len(rounds)), np.nan)
    places = {axis: np.full_like(table, np.nan) for axis in AXES}
    for row, run in enumerate(method.runs):
        columns = np.searchsorted(rounds, position(run, ROUNDS))
        table[row, columns] = values(run, metric)
        for axis, place in places.items():
            place[row, columns] = position(run, axis)
    kept = np.isfinite(table).any(axis=0)
    table = table[:, kept]
    x = {axis.key: np.nanmean(place[:, kept], axis=0) for axis, place in places.items()}
    mean, low, high = (f(table, axis=0) if kept.any() else np.empty(0) for f in (np.nanmean, np.nanmin, np.nanmax))
    return Curve(x, mean, low, high, len(method.runs))


def height(curves: Sequence[Curve], start: float = START) -> tuple[float, float] | None:
    """From the lowest to the highest value after the start, with a margin; None where there is nothing to see."""
    late = [c.x[ROUNDS.key] > start * c.x[ROUNDS.key][-1] for c in curves]
    lows = [c.low[kept].min() for c, kept in zip(curves, late, strict=True)]
    highs = [c.high[kept].max() for c, kept in zip(curves, late, strict=True)]
    if not curves or min(lows) == max(highs):
        return None
    margin = 0.05 * (max(highs) - min(lows))
    return float(min(lows) - margin), float(max(highs) + margin)
