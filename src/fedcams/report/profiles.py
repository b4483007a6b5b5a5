"""Networks: how long a method would take to reach an accuracy if its messages used a given link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcams.report.collection import Method
from fedcams.report.series import ACCURACY, Array, values
from fedcams.runs import Run


@dataclass(frozen=True)
class Profile:
    """One client's link. The clients of a cohort work in parallel, so a round takes as long as for one of them."""

    name: str
    down: float
    """Mbit/s from the server to the client."""
    up: float
    """Mbit/s from the client to the server."""
    latency: float
    """Milliseconds for a round trip; a round fetches one model and sends one reply, and pays it once."""

    def seconds(self, link: Link) -> Array:
        """Return the seconds of each round, `[T]`: latency, model down, computation, update up."""
        transfer = link.down / self.down + link.up / self.up
        return np.where(link.down > 0, self.latency / 1e3, 0.0) + transfer * 8e-6 + link.compute


PROFILES = (
    Profile("Fibre", down=300, up=300, latency=10),
    Profile("4G", down=30, up=10, latency=50),
    Profile("3G", down=3, up=1, latency=100),
    Profile("Satellite", down=100, up=10, latency=600),
)
"""Round numbers for a good connection of each kind (satellite: geostationary); readers of the page can edit them."""


@dataclass(frozen=True)
class Link:
    """What one client's link carries in each round, averaged over the cohort; arrays `[T]`."""

    accuracy: Array
    down: Array
    up: Array
    compute: Array
    """Measured seconds of the round without evaluation; zero if not measured."""


def link(run: Run) -> Link:
    """Return what one client's link carries: the bytes of the cohort divided by its size, and the measured seconds."""
    size = np.array([max(1, len(record.cohort)) for record in run.records])
    return Link(
        values(run, ACCURACY),
        np.array([record.wire_down for record in run.records]) / size,
        np.array([record.wire_up for record in run.records]) / size,
        np.nan_to_num(compute(run)),
    )


def compute(run: Run) -> Array:
    """Return the seconds of each round without its evaluation, `[T]`; NaN if no time was recorded."""
    known = {line.get("round"): _seconds(line) for line in run.timings}
    return np.array([known.get(record.round, np.nan) for record in run.records], np.float64)


def _seconds(line: dict[str, object]) -> float:
    total, phases = line.get("seconds"), line.get("phases")
    if not isinstance(total, int | float):
        return np.nan
    apart = phases.get("evaluate", 0.0) if isinstance(phases, dict) else 0.0
    return max(0.0, float(total) - float(apart))


def first_at(accuracy: Array, target: float) -> int | None:
    """Return the index of the first round that reached the target, or None."""
    reached = np.flatnonzero(accuracy >= target)
    return int(reached[0]) if len(reached) else None


def time_to(method: Method, profile: Profile, target: float) -> float | None:
    """Return the seconds to the target on a network, mean over seeds; None unless every seed reached it."""
    taken = []
    for carried in map(link, method.runs):
        if (index := first_at(carried.accuracy, target)) is None:
            return None
        taken.append(float(profile.seconds(carried)[: index + 1].sum()))
    return sum(taken) / len(taken)
