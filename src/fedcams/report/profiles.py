"""Networks: how long a method would take to reach an accuracy if its messages used a given link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcams.report.collection import Method
from fedcams.report.series import ACCURACY, AVERAGED, Array, Metric, values
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
        return self._waiting(link) + self._transfer(link) + link.compute

    def latency_share(self, link: Link) -> float:
        """Return which part of the time on the network, computation left out, is latency; 0 if nothing was sent."""
        waiting, transfer = float(self._waiting(link).sum()), float(self._transfer(link).sum())
        return waiting / (waiting + transfer) if waiting + transfer else 0.0

    def _waiting(self, link: Link) -> Array:
        return np.where(link.down > 0, self.latency / 1e3, 0.0)

    def _transfer(self, link: Link) -> Array:
        return (link.down / self.down + link.up / self.up) * 8e-6


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
    averaged: Array
    """The accuracy of averaged models; NaN without one."""
    down: Array
    up: Array
    compute: Array
    """Measured seconds of the round without evaluation; zero if not measured."""


def link(run: Run) -> Link:
    """Return what one client's link carries: the bytes of the cohort divided by its size, and the measured seconds."""
    size = np.maximum(1, run.cohort_sizes)
    return Link(
        values(run, ACCURACY),
        values(run, AVERAGED),
        run.column("wire_down") / size,
        run.column("wire_up") / size,
        np.nan_to_num(run.seconds),
    )


def first_at(accuracy: Array, target: float) -> int | None:
    """Return the index of the first round that reached the target, or None."""
    reached = np.flatnonzero(accuracy >= target)
    return int(reached[0]) if len(reached) else None


BOUND = 0.5
"""A network is bound by latency where it takes more than this part of the time: there fewer bytes hardly help."""


def latency_share(method: Method, profile: Profile) -> float:
    """Return which part of a method's time on a network is latency, computation left out; mean over seeds."""
    shares = [profile.latency_share(link(run)) for run in method.runs]
    return sum(shares) / len(shares)


def time_to(method: Method, profile: Profile, target: float, metric: Metric = ACCURACY) -> float | None:
    """Return the seconds to the target on a network, mean over seeds; None unless every seed reached it.

    `metric` says whose accuracy counts: that of the last models, or `AVERAGED`.
    """
    taken = []
    for run, carried in zip(method.runs, map(link, method.runs), strict=True):
        if (index := first_at(values(run, metric), target)) is None:
            return None
        taken.append(float(profile.seconds(carried)[: index + 1].sum()))
    return sum(taken) / len(taken)
