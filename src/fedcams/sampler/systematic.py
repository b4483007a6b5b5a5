"""Systematic: a fixed number of clients, each included in exact proportion to its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcams.registry import register
from fedcams.sampler.base import FixedSize, check_size, check_weights


@register("systematic")
@dataclass(frozen=True)
class Systematic(FixedSize):
    """Draws n clients, client i with probability `n w_i/Σw`; those for which that exceeds 1 take part in every round.

    With example counts as weights and `weighting=sampler`, the mean of a cohort is an unbiased estimate of the
    example-weighted mean over all clients: a client counts `w_i` divided by its probability, which is the same for
    all clients except those that always take part.
    """

    reference = "Madow: On the Theory of Systematic Sampling, II, Annals of Mathematical Statistics 1949"
    needs_weights = True
    examples = ("systematic", "systematic(n=20)")
    refused = (("systematic(n=0)", r"allowed: an integer in \[1, inf\)"), ("systematic(p=0.5)", "has no key 'p'"))

    def draw(self, population: int, rng: Generator, weights: NDArray[np.float64] | None) -> NDArray[np.int64]:
        check_size(self.name, self.n, population)
        assert weights is not None
        p = inclusion(weights, self.n)
        certain, rest = np.flatnonzero(p >= 1), rng.permutation(np.flatnonzero(p < 1))
        count = self.n - len(certain)
        ends = np.cumsum(p[rest])  # client i owns an interval of length p_i < 1 of [0, count)
        drawn = np.searchsorted(ends[:-1], rng.random() + np.arange(count), side="right")
        return np.concatenate([certain, rest[drawn]])

    def mean_weights(
        self, cohort: Sequence[int], round: int, weights: Mapping[int, float] | None = None
    ) -> list[float]:
        known = check_weights(self.name, None if weights is None else np.array(list(weights.values()), np.float64))
        assert weights is not None
        p = dict(zip(weights, inclusion(known, self.n).tolist(), strict=True))
        return [weights[client] / p[client] for client in cohort]


def inclusion(weights: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Return the probability of each client to be among n: in proportion to `weights [m]`, at most 1, with the sum n.

    What a client would have above 1 goes to the others, in proportion to their weights.
    """
    weights = weights / weights.max()
    certain = np.zeros(len(weights), bool)
    while (rest := n - int(certain.sum())) > 0:
        p = np.where(certain, 1.0, rest * weights / weights[~certain].sum())
        if (p[~certain] < 1).all():
            return p
        certain |= p >= 1
    return certain.astype(np.float64)
