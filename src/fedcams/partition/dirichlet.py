"""Dirichlet: each class is divided over the clients in random proportions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcams.errors import SpecError
from fedcams.partition.base import Ints, Partition, shuffled_by
from fedcams.registry import Number, exact, format_number, integer, number, register

TRIES = 1000


@register("dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Draws p ~ Dirichlet(alpha, ..., alpha) over the clients for each class; client j gets the share p_j of it.

    All classes are redrawn until every client has at least `minimum` examples. Hsu et al. (Measuring the Effects
    of Non-Identical Data Distribution, 2019) draw classes for each client instead, which fixes the clients' sizes.
    """

    alpha: Number = number(0.3, low=1e-9, doc="small: few clients share a class; large: nearly iid")
    minimum: int = integer(2, low=1, doc="examples that every client must have")

    reference = "Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019"
    examples = ("dirichlet", "dirichlet(alpha=0.1)", "dirichlet(alpha=100, minimum=10)")
    refused = (
        ("dirichlet(alpha=0)", r"allowed: a number in \[1e-9, inf\)"),
        ("dirichlet(minimum=0)", r"allowed: an integer in \[1, inf\)"),
    )

    def owners(self, labels: Ints, clients: int, rng: Generator, keys: Ints | None) -> Ints:
        if clients * self.minimum > len(labels):
            raise SpecError(
                f"dirichlet: minimum={self.minimum} for {clients} clients needs {clients * self.minimum} examples, "
                f"there are {len(labels)}; lower minimum or clients"
            )
        _, sizes = np.unique(labels, return_counts=True)
        counts = self._counts(sizes, clients, rng)
        owners = np.empty_like(labels)
        owners[shuffled_by(labels, rng)] = np.repeat(np.tile(np.arange(clients), len(sizes)), counts.ravel())
        return owners

    def _counts(self, sizes: NDArray[np.intp], clients: int, rng: Generator) -> Ints:
        """Return how many examples of each class each client gets, `[classes, clients]`."""
        for _ in range(TRIES):
            shares = rng.dirichlet(np.full(clients, float(self.alpha)), size=len(sizes))
            counts = _rounded(shares, sizes[:, None], rng)
            if counts.sum(0).min() >= self.minimum:
                return counts
        raise SpecError(
            f"dirichlet: with alpha={format_number(exact(self.alpha))} some of {clients} clients stayed below "
            f"minimum={self.minimum} examples in {TRIES} draws; raise alpha, or lower clients or minimum"
        )


def _rounded(shares: NDArray[np.float64], sizes: NDArray[np.intp], rng: Generator) -> Ints:
    """Return integers less than one away from `shares·sizes`, with that expectation, and rows that sum to `sizes`.

    Without the random shift of the cuts, the remainder would always go to the last client.
    """
    cuts = np.floor(shares.cumsum(1) * sizes + rng.random(sizes.shape)).astype(np.int64)
    cuts[:, -1:] = sizes
    return np.diff(np.minimum(cuts, sizes), prepend=0)  # a rounding error can lift the sum of shares above 1
