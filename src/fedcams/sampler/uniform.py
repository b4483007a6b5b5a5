"""Uniform: a fixed number of clients, all equally likely."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcams.registry import register
from fedcams.sampler.base import FixedSize, check_size


@register("uniform")
@dataclass(frozen=True)
class Uniform(FixedSize):
    """Draws n clients without replacement; every set of n is equally likely."""

    reference = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"
    examples = ("uniform", "uniform(n=20)")
    refused = (("uniform(n=0)", r"allowed: an integer in \[1, inf\)"), ("uniform(n=1.5)", "not a whole number"))

    def draw(self, population: int, rng: Generator, weights: NDArray[np.float64] | None) -> NDArray[np.int64]:
        check_size(self.name, self.n, population)
        return rng.choice(population, self.n, replace=False, shuffle=False)
