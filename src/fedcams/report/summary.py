"""The numbers of a report: one row per method, and the accuracy at which they are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from fedcams.experiment.sweep import LAST_PART
from fedcams.report.collection import Collection, Method
from fedcams.report.parts import share_of_down
from fedcams.report.profiles import first_at
from fedcams.report.series import (
    ACCURACY,
    AVERAGED,
    BYTES,
    BYTES_UP,
    HELD,
    ROUNDS,
    Array,
    Axis,
    Metric,
    position,
    values,
)
from fedcams.runs import Run

NO_FEEDBACK = ", no feedback"
"""Follows the spec of an uplink without error feedback."""
TARGET_PART = 0.95
"""The default target, as a part of the best method's final accuracy."""


@dataclass(frozen=True)
class Spread:
    """A number over seeds: mean, lowest and highest."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One method; numbers are means over its seeds, None if nothing was recorded."""

    label: str
    server: str
    uplink: str
    downlink: str
    recipe: str | None
    """The recipe that describes how everything travels, if there is one."""
    epsilon: float | None
    """The largest ε that a run spent; None without privacy."""
    seeds: list[int]
    rounds: float
    final: Spread | None
    """Mean accuracy over the last 20% of the rounds."""
    averaged: Spread | None
    """The same of the averaged models; None if the method keeps no average."""
    last: Spread | None
    best: Spread | None
    held_accuracy: float | None
    """Final accuracy of the model that all clients hold, if it differs from the server's."""
    bytes_up: float
    """All rounds and clients, like the two below."""
    bytes_down: float
    bytes_total: float
    """Up plus down."""
    down_catchup: float | None
    """The part of the bytes down for clients that missed deltas; None if it was not recorded."""
    down_dense: float | None
    """The part of the bytes down that is dense models."""
    reached: int
    """The number of seeds that reached the target."""
    rounds_to_target: float | None
    """None unless every seed reached the target: a mean over some seeds would look too good."""
    bytes_up_to_target: float | None
    bytes_to_target: float | None
    averaged_reached: int
    """The number of seeds whose averaged model reached the target; the three below are about it too."""
    averaged_rounds_to_target: float | None
    averaged_bytes_up_to_target: float | None
    averaged_bytes_to_target: float | None
    seconds_per_round: float | None
    """The median without evaluation; the first rounds are slower, since they warm up."""


@dataclass(frozen=True)
class Summary:
    """All rows, and the accuracy at which they are compared."""

    rows: list[Row]
    target: float | None
    """None if nothing was evaluated."""
    given: bool
    """Whether the caller chose the target."""
    percent: bool
    """Whether the metric lies between 0 and 1, as an accuracy does."""

    @property
    def averages(self) -> bool:
        """Whether some method keeps an average of its models."""
        return any(row.averaged is not None for row in self.rows)

    def shows(self, key: str) -> bool:
        """Return whether `server`, `uplink` or `downlink` gets a column: methods differ in it, or there is only one."""
        found = {getattr(row, key) for row in self.rows}
        return len(found) > 1 or (len(self.rows) == 1 and found != {"none"})


def summarize(collection: Collection, target: float | None = None) -> Summary:
    """Return the numbers of all methods.

    Arguments:
        collection: the runs, from `collect`.
        target: the accuracy at which they are compared; by default 95% of the best final accuracy, averaged models
            included. If every score lies from 0 to 1, a target above 1 is a percentage.

    Returns:
        One row per method, and the target.

    Examples:
        >>> from pathlib import Path
        >>> from fedcams.experiment import Experiment
        >>> from fedcams.report import collect, summarize
        >>> from fedcams.runs import run
        >>> tiny = Experiment(task="quadratic", model="point", clients=2, sampler="full", rounds=1)
        >>> finished = run(tiny, Path("summed"))
        >>> summarize(collect([Path("summed")])).rows[0].rounds
        1.0
    """
    given = target is not None
    found = [_spread(method, number) for method in collection.methods for number in (final_score, averaged_score)]
    finals = [spread.mean for spread in found if spread]
    if not finals:
        target = None  # even if one was given, because there is nothing to compare
    elif target is None:
        target = float(f"{max(finals) - (1 - TARGET_PART) * abs(max(finals)):.4g}")  # easy to quote
    scores = np.concatenate([_evaluations(run)[1] for run in collection.runs])
    percent = bool(((scores >= 0) & (scores <= 1)).all())
    if target is not None and percent and target > 1:
        target /= 100
    return Summary([_row(method, target) for method in collection.methods], target, given, percent)


def final_score(run: Run) -> float | None:
    """Return the mean accuracy of a run over the last 20% of its rounds, or its last one; None without evaluations."""
    return late_mean(run, ACCURACY)


def averaged_score(run: Run) -> float | None:
    """Return the mean accuracy of a run's averaged models over the last 20% of its rounds; None without an average."""
    return late_mean(run, AVERAGED)


def late_mean(run: Run, metric: Metric) -> float | None:
    """Return the mean of any metric over the last 20% of a run's rounds, or its last value; None without one."""
    rounds, scores = _evaluations(run, metric)
    late = rounds > (1 - LAST_PART) * run.records[-1].round
    return float((scores[late] if late.any() else scores[-1:]).mean()) if len(scores) else None


def last_score(run: Run) -> float | None:
    """Return the last accuracy of a run, or None without evaluations."""
    scores = _evaluations(run)[1]
    return float(scores[-1]) if len(scores) else None


def best_score(run: Run) -> float | None:
    """Return the best accuracy of a run, or None without evaluations."""
    return max(_evaluations(run)[1].tolist(), default=None)


def _row(method: Method, target: float | None) -> Row:
    runs, experiment = method.runs, method.experiment
    return Row(
        label=method.label,
        server=str(experiment.server),
        uplink=str(experiment.uplink) + ("" if experiment.feedback else NO_FEEDBACK),
        downlink=str(experiment.downlink),
        recipe=method.recipe,
        epsilon=method.epsilon,
        seeds=[run.experiment.seed for run in runs],
        rounds=fmean(run.records[-1].round for run in runs),
        final=_spread(method, final_score),
        averaged=_spread(method, averaged_score),
        last=_spread(method, last_score),
        best=_spread(method, best_score),
        held_accuracy=_mean_of_all([late_mean(run, HELD) for run in runs]),
        bytes_up=fmean(sum(run.recorded("wire_up")) for run in runs),
        bytes_down=fmean(sum(run.recorded("wire_down")) for run in runs),
        bytes_total=fmean(sum(run.recorded("wire_up")) + sum(run.recorded("wire_down")) for run in runs),
        down_catchup=_mean_of_all([share_of_down(run, "catchup") for run in runs]),
        down_dense=_mean_of_all([share_of_down(run, "dense") for run in runs]),
        reached=sum(hit is not None for hit in _hits(method, target)),
        rounds_to_target=_at_target(method, target, ROUNDS),
        bytes_up_to_target=_at_target(method, target, BYTES_UP),
        bytes_to_target=_at_target(method, target, BYTES),
        averaged_reached=sum(hit is not None for hit in _hits(method, target, AVERAGED)),
        averaged_rounds_to_target=_at_target(method, target, ROUNDS, AVERAGED),
        averaged_bytes_up_to_target=_at_target(method, target, BYTES_UP, AVERAGED),
        averaged_bytes_to_target=_at_target(method, target, BYTES, AVERAGED),
        seconds_per_round=_median_seconds(runs),
    )


def _mean_of_all(values: list[float | None]) -> float | None:
    """Return the mean over the runs; None unless all of them have a value."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _evaluations(run: Run, metric: Metric = ACCURACY) -> tuple[Array, Array]:
    """Return the rounds and scores of a run's evaluations."""
    scores = values(run, metric)
    known = np.isfinite(scores)
    return position(run, ROUNDS)[known], scores[known]


def _spread(method: Method, number: Callable[[Run], float | None]) -> Spread | None:
    found = [value for run in method.runs if (value := number(run)) is not None]
    return Spread(fmean(found), min(found), max(found)) if found else None


def _hits(method: Method, target: float | None, metric: Metric = ACCURACY) -> list[int | None]:
    """Return for each seed the index of the first round that reached the target."""
    return [None if target is None else first_at(values(run, metric), target) for run in method.runs]


def _at_target(method: Method, target: float | None, axis: Axis, metric: Metric = ACCURACY) -> float | None:
    """Return where the seeds were on an axis when they reached the target, on average; None unless all did."""
    hits = _hits(method, target, metric)
    places = [position(run, axis)[hit] for run, hit in zip(method.runs, hits, strict=True) if hit is not None]
    return float(np.mean(places)) if len(places) == len(hits) else None


def _median_seconds(runs: list[Run]) -> float | None:
    seconds = np.concatenate([run.seconds for run in runs])
    seconds = seconds[np.isfinite(seconds)]
    return float(np.median(seconds)) if len(seconds) else None
