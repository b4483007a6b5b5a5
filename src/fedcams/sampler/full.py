"""Full: all clients take part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcams.registry import register
from fedcams.sampler.base import Sampler


@register("full")
@dataclass(frozen=True)
class Full(Sampler):
    """Takes all clients in every round."""

    reference = "Wang, Lin, Chen: Communication-Efficient Adaptive Federated Learning, ICML 2022"
    examples = ("full",)
    refused = (("full(10)", "at most 0 values"), ("full(n=10)", "has no key 'n'"))

    @property
    def probability(self) -> float:
        return 1.0

    def draw(self, population: int, rng: Generator, weights: NDArray[np.float64] | None) -> NDArray[np.int64]:
        return np.arange(population)

    def expected(self, population: int) -> float:
        return float(population)
