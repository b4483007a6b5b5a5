"""Weighted: a fixed number of clients; those with more examples are drawn more often."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcams.registry import register
from fedcams.sampler.base import FixedSize, check_size


@register("weighted")
@dataclass(frozen=True)
class Weighted(FixedSize):
    """Draws n clients without replacement, one by one, each in proportion to the weights of those left.

    With example counts as weights, large clients are drawn more often, so do not weight the mean by examples too.
    Unless n = 1, a client is not included in proportion to its weight: with n = 2, clients of weights 0.2, 0.8 and 1
    take part with probabilities 0.27, 0.84 and 0.89. `systematic` includes them with 0.2, 0.8 and 1.
    """

    reference = "Efraimidis, Spirakis: Weighted Random Sampling with a Reservoir, Information Processing Letters 2006"
    needs_weights = True
    examples = ("weighted", "weighted(n=20)")
    refused = (("weighted(n=0)", r"allowed: an integer in \[1, inf\)"), ("weighted(p=0.5)", "has no key 'p'"))

    def draw(self, population: int, rng: Generator, weights: NDArray[np.float64] | None) -> NDArray[np.int64]:
        check_size(self.name, self.n, population)
        assert weights is not None
        # the n largest values of log w + Gumbel noise have this distribution, and need no normalised probabilities
        return np.argsort(np.log(weights) + rng.gumbel(size=population))[-self.n :]
