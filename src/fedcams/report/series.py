"""What runs recorded: metrics and axes, curves over rounds as arrays, and partitions as histograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcams.report.collection import Collection, Method
from fedcams.runs import Run

Array = NDArray[np.float64]

START = 0.1
"""The y range of a chart ignores this first part of the rounds, which would take up most of the height."""


@dataclass(frozen=True)
class Metric:
    """Something that is recorded every round, or every round with an evaluation or a measurement."""

    key: str
    """The name of a field of `RoundRecord` or of what a probe measures, and the name in files."""
    title: str
    measured: str = ""
    """For what `theory_every` measures, the name of a field or property of `Measured`."""


@dataclass(frozen=True)
class Axis:
    """One axis of a chart."""

    key: str
    title: str = ""
    short: str = ""
    """The text of its button, if readers can choose between axes."""
    unit: str = ""
    """Shown with prefixes such as k and M; empty for plain numbers."""
    log: bool = False
    percent: bool = False
    range: tuple[float, float] | None = None
    """The lowest and highest value shown; None fits the data."""
    nonnegative: bool = False
    names: tuple[tuple[str, ...], ...] = ()
    """The lines of each tick's text, if the axis shows categories instead of numbers."""


ACCURACY = Metric("test_accuracy", "Test accuracy")
AVERAGED = Metric("averaged_accuracy", "Test accuracy of averaged models")
HELD = Metric("held_accuracy", "Test accuracy of the clients’ model")
TEST_LOSS = Metric("test_loss", "Test loss")
TRAIN_LOSS = Metric("train_loss", "Training loss")
Q = Metric("q", "Compression error q")
Q_MAX = Metric("q_max", "Largest compression error of the cohort")
GAMMA = Metric("gamma", "Dissimilarity γ")
OFF_FLOOR = Metric("off_floor", "Share of coordinates off the floor")
RATE = Metric("rate", "Rate of the server’s steps")
GRADIENT = Metric("gradient_sq", "Estimate of ‖∇f‖²")
UPDATES = Metric("update_norm", "Norm of updates")
MEAN_UPDATES = Metric("mean_update_norm", "Norm of the mean update")
RESIDUALS = Metric("residual_norm", "Norm of residuals")
MEASURED_GRADIENT = Metric("measured_gradient_sq", "Measured ‖∇f‖²", "gradient_sq_of_all")
SMOOTHNESS = Metric("measured_L", "Smoothness L, lower bound", "smoothness")
LONGEST = Metric("measured_G", "Longest gradient G, lower bound", "G")
LOCAL_NOISE = Metric("measured_s_l", "Noise of batches σ_l, estimate", "s_l")
GLOBAL_NOISE = Metric("measured_s_g", "Difference of clients σ_g, estimate", "s_g")

SCORES, LOSSES = (ACCURACY, AVERAGED), (TEST_LOSS, TRAIN_LOSS)
CURVES = (*SCORES, *LOSSES)
"""Drawn against every axis."""
COMPRESSION = (Q, Q_MAX, GAMMA, RESIDUALS)
"""Drawn against rounds, for the methods that lose something."""
ADAPTIVITY = (OFF_FLOOR, RATE, UPDATES, MEAN_UPDATES, GRADIENT)
"""Drawn against rounds."""
CONSTANTS = (MEASURED_GRADIENT, SMOOTHNESS, LONGEST, LOCAL_NOISE, GLOBAL_NOISE)
"""Drawn against rounds, for runs with `theory_every`."""
NONNEGATIVE = (*COMPRESSION, OFF_FLOOR, RATE, UPDATES, MEAN_UPDATES, *CONSTANTS[1:])
"""Never below zero, so their axes are not either; ‖∇f‖² from some clients can be."""

ROUNDS = Axis("rounds", "Round", "Rounds")
BYTES = Axis("bytes", "Bytes sent, up + down, all clients", "Bytes up + down", "B", log=True)
BYTES_UP = Axis("bytes_up", "Bytes sent up, all clients", "Bytes up", "B", log=True)
PAPER_BITS = Axis("paper_bits", "Paper bits, up + down, one client’s link", "Paper bits", "bit", log=True)
SPENT = {
    BYTES.key: ("wire_up", "wire_down"),
    BYTES_UP.key: ("wire_up",),
    PAPER_BITS.key: ("paper_bits_up", "paper_bits_down"),
}
"""Key of an axis -> the recorded numbers that it adds up."""
AXES = (BYTES, ROUNDS, BYTES_UP, PAPER_BITS)
"""The first is shown at first. All but rounds are logarithmic: methods differ in bytes by orders of magnitude."""


# -- curves --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A metric of a method over the rounds in which every seed that got that far recorded it; arrays `[T]`."""

    x: dict[str, Array]
    """Key of an axis -> where the seeds are on it, on average."""
    mean: Array
    low: Array
    high: Array
    seeds: int

    def __bool__(self) -> bool:
        return len(self.mean) > 0


def _shared(known: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the rounds, `[T]`, in which every seed that has not ended has a value; `known [seeds, T]` says which do.

    Otherwise a mean would jump between seeds that were tested at different intervals.
    """
    goes_on = np.logical_or.accumulate(known[:, ::-1], axis=1)[:, ::-1]
    shared: NDArray[np.bool_] = np.logical_or.reduce(known) & np.logical_and.reduce(known | ~goes_on)
    return shared


def values(run: Run, metric: Metric) -> Array:
    """Return what a run recorded in each of its rounds, `[T]`; NaN where nothing or nothing finite was recorded."""
    if not metric.measured:
        return run.column(metric.key)
    known = {line.round: getattr(line, metric.measured) for line in run.measured}
    return np.array([known.get(round) for round in run.recorded("round")], np.float64)  # None becomes NaN


def position(run: Run, axis: Axis) -> Array:
    """Return where a run was on an axis after each of its rounds, `[T]`."""
    if axis == ROUNDS:
        return run.column("round")
    return np.cumsum(sum(run.column(name) for name in SPENT[axis.key]))


@dataclass(frozen=True)
class Track:
    """The rounds of a method, to draw any number of curves over them."""

    method: Method
    rounds: Array
    """The rounds that some seed reached, `[T]`."""
    x: dict[str, Array]
    """Key of an axis -> where the seeds were on it after each of these rounds, on average, `[T]`."""

    def curve(self, metric: Metric) -> Curve:
        """Return the mean, lowest and highest over the seeds that reached each round."""
        table = self.table([values(run, metric) for run in self.method.runs])
        kept = _shared(np.isfinite(table))
        x, found = {key: places[kept] for key, places in self.x.items()}, table[:, kept]
        if len(found) == 1:  # of one seed they are all the same
            return Curve(x, found[0], found[0], found[0], 1)
        mean, low, high = (f(found, axis=0) for f in (np.nanmean, np.nanmin, np.nanmax))
        return Curve(x, mean, low, high, len(found))

    def table(self, rows: list[Array]) -> Array:
        """Return one row per seed, `[seeds, T]`, of what each seed has in its own rounds; NaN in the others."""
        table = np.full((len(rows), len(self.rounds)), np.nan)
        for row, run, found in zip(table, self.method.runs, rows, strict=True):
            row[np.searchsorted(self.rounds, position(run, ROUNDS))] = found
        return table


def track(method: Method) -> Track:
    """Return the rounds of a method."""
    found = Track(method, np.unique(np.concatenate([position(run, ROUNDS) for run in method.runs])), {})
    for axis in AXES:
        found.x[axis.key] = np.nanmean(found.table([position(run, axis) for run in method.runs]), axis=0)
    return found


def height(curves: Sequence[Curve], start: float = START) -> tuple[float, float] | None:
    """Return the lowest and highest value after the start, with a margin; None if all values are equal."""
    late = [c.x[ROUNDS.key] > start * c.x[ROUNDS.key][-1] for c in curves]
    lows = [c.low[kept].min() for c, kept in zip(curves, late, strict=True)]
    highs = [c.high[kept].max() for c, kept in zip(curves, late, strict=True)]
    if not curves or min(lows) == max(highs):
        return None
    margin = 0.05 * (max(highs) - min(lows))
    return float(min(lows) - margin), float(max(highs) + margin)


# -- partitions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Histogram:
    """How the labels of one partition are spread over the clients."""

    title: str
    """The task, the partition's spec and the seeds it was drawn with."""
    counts: NDArray[np.int64]
    """`[clients, labels]`, examples."""


def histograms(collection: Collection) -> list[Histogram]:
    """Return the distinct partitions of all runs, in the order of the runs."""
    found: dict[tuple[str, str], list[int]] = {}
    counts: dict[tuple[str, str], NDArray[np.int64]] = {}
    for run in collection.runs:
        if run.histogram and run.histogram[0]:
            key = f"{run.experiment.task}, {run.experiment.partition.spelled_out()}", repr(run.histogram)
            found.setdefault(key, []).append(run.experiment.seed)
            counts[key] = np.array(run.histogram, np.int64)
    return [Histogram(f"{key[0]}, {_seeds(seeds)}", counts[key]) for key, seeds in found.items()]


def _seeds(seeds: list[int]) -> str:
    distinct = sorted(set(seeds))
    return f"seed{'s' if len(distinct) > 1 else ''} {', '.join(map(str, distinct))}"
