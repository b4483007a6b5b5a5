"""The numbers of a report: one row a method, and the accuracy they are compared at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from fedcams.experiment.sweep import LAST_PART
from fedcams.report.axes import ACCURACY, BYTES, BYTES_UP, HELD, ROUNDS, Axis, Metric
from fedcams.report.collect import Collection, Method
from fedcams.report.parts import share_of_down
from fedcams.report.profiles import compute, first_at
from fedcams.report.series import Array, position, values
from fedcams.runs import Run

NO_FEEDBACK = ", no feedback"
"""Follows an uplink that keeps nothing of what it loses."""
TARGET_PART = 0.95
"""The default target: this part of the best method's final accuracy."""


@dataclass(frozen=True)
class Spread:
    """A number of each seed: mean, lowest and highest."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One method; numbers are means over its seeds, and None where nothing was recorded."""

    label: str
    server: str
    uplink: str
    downlink: str
    seeds: list[int]
    rounds: float
    final: Spread | None
    """Accuracy, mean over the last 20% of the rounds."""
    last: Spread | None
    best: Spread | None
    held_accuracy: float | None
    """Final accuracy of the model that clients hold, where all hold one that is not the server's."""
    bytes_up: float
    """Of all rounds and clients."""
    bytes_down: float
    bytes_total: float
    """Up and down."""
    down_catchup: float | None
    """The part of the bytes down that brings back clients that missed deltas; None where it was not recorded."""
    down_dense: float | None
    """The part that is dense models."""
    reached: int
    """How many seeds reached the target."""
    rounds_to_target: float | None
    """None unless every seed reached it: a mean over the lucky ones would flatter."""
    bytes_up_to_target: float | None
    bytes_to_target: float | None
    seconds_per_round: float | None
    """The median, evaluation apart; the first rounds pay for warming up."""


@dataclass(frozen=True)
class Summary:
    """All rows, and what they are measured against."""

    rows: list[Row]
    target: float | None
    """None when nothing was evaluated."""
    given: bool
    """Whether the caller chose the target."""
    percent: bool
    """Whether the metric is a part of one, as an accuracy is."""

    def shows(self, key: str) -> bool:
        """Whether `server`, `uplink` or `downlink` deserves a column: methods differ in it, or there is only one."""
        found = {getattr(row, key) for row in self.rows}
        return len(found) > 1 or (len(self.rows) == 1 and found != {"none"})


def summarize(collection: Collection, target: float | None = None) -> Summary:
    """The numbers; without a target, 5% below the final accuracy of the best method."""
    given = target is not None
    finals = [spread.mean for method in collection.methods if (spread := _spread(method, final_score))]
    if not finals:
        target = None  # whatever was asked for: there is nothing to compare
    elif target is None:
        target = float(f"{max(finals) - (1 - TARGET_PART) * abs(max(finals)):.4g}")  # a number that can be quoted
    scores = np.concatenate([_evaluations(run)[1] for run in collection.runs])
    percent = bool(((scores >= 0) & (scores <= 1)).all())
    return Summary([_row(method, target) for method in collection.methods], target, given, percent)


def final_score(run: Run) -> float | None:
    """The mean of a run's evaluations in the last 20% of the rounds it has made, at least of the last one."""
    return late_mean(run, ACCURACY)


def late_mean(run: Run, metric: Metric) -> float | None:
    """The same of any metric."""
    rounds, scores = _evaluations(run, metric)
    late = rounds > (1 - LAST_PART) * run.records[-1].round
    return float((scores[late] if late.any() else scores[-1:]).mean()) if len(scores) else None


def last_score(run: Run) -> float | None:
    """A run's last evaluation."""
    scores = _evaluations(run)[1]
    return float(scores[-1]) if len(scores) else None


def best_score(run: Run) -> float | None:
    """A run's best evaluation."""
    return max(_evaluations(run)[1].tolist(), default=None)


def _row(method: Method, target: float | None) -> Row:
    runs, experiment = method.runs, method.experiment
    return Row(
        label=method.label,
        server=str(experiment.server),
        uplink=str(experiment.uplink) + ("" if experiment.feedback else NO_FEEDBACK),
        downlink=str(experiment.downlink),
        seeds=[run.experiment.seed for run in runs],
        rounds=fmean(run.records[-1].round for run in runs),
        final=_spread(method, final_score),
        last=_spread(method, last_score),
        best=_spread(method, best_score),
        held_accuracy=_held(runs),
        bytes_up=fmean(sum(record.wire_up for record in run.records) for run in runs),
        bytes_down=fmean(sum(record.wire_down for record in run.records) for run in runs),
        bytes_total=fmean(sum(record.wire_up + record.wire_down for record in run.records) for run in runs),
        down_catchup=_share(runs, "catchup"),
        down_dense=_share(runs, "dense"),
        reached=sum(hit is not None for hit in _hits(method, target)),
        rounds_to_target=_at_target(method, target, ROUNDS),
        bytes_up_to_target=_at_target(method, target, BYTES_UP),
        bytes_to_target=_at_target(method, target, BYTES),
        seconds_per_round=_median_seconds(runs),
    )


def _held(runs: list[Run]) -> float | None:
    found = [late_mean(run, HELD) for run in runs]
    known = [value for value in found if value is not None]
    return fmean(known) if len(known) == len(runs) else None


def _share(runs: list[Run], key: str) -> float | None:
    shares = [share for run in runs if (share := share_of_down(run, key)) is not None]
    return fmean(shares) if len(shares) == len(runs) else None


def _evaluations(run: Run, metric: Metric = ACCURACY) -> tuple[Array, Array]:
    """Rounds and scores of a run's evaluations."""
    scores = values(run, metric)
    known = np.isfinite(scores)
    return position(run, ROUNDS)[known], scores[known]


def _spread(method: Method, number: Callable[[Run], float | None]) -> Spread | None:
    found = [value for run in method.runs if (value := number(run)) is not None]
    return Spread(fmean(found), min(found), max(found)) if found else None


def _hits(method: Method, target: float | None) -> list[int | None]:
    """For each seed the index of the round that reached the target."""
    return [None if target is None else first_at(values(run, ACCURACY), target) for run in method.runs]


def _at_target(method: Method, target: float | None, axis: Axis) -> float | None:
    """Where the seeds were on an axis when they reached the target."""
    hits = _hits(method, target)
    places = [position(run, axis)[hit] for run, hit in zip(method.runs, hits, strict=True) if hit is not None]
    return float(np.mean(places)) if len(places) == len(hits) else None


def _median_seconds(runs: list[Run]) -> float | None:
    seconds = np.concatenate([compute(run) for run in runs])
    seconds = seconds[np.isfinite(seconds)]
    return float(np.median(seconds)) if len(seconds) else None
