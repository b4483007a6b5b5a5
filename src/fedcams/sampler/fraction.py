"""Fraction: a part of the population, as with Flower's `fraction_train`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcams.registry import Number, exact, integer, number, register
from fedcams.sampler.base import Sampler, check_size


@register("fraction")
@dataclass(frozen=True)
class Fraction(Sampler):
    """Draws `floor(part · population)` clients without replacement, but at least `least`; all are equally likely."""

    part: Number = number(0.1, low=0, high=1, open="low", doc="the fraction of clients in a cohort")
    least: int = integer(1, low=1, doc="the smallest cohort, at most the population")

    reference = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"
    examples = ("fraction", "fraction(part=0.5, least=2)")
    refused = (("fraction(part=0)", r"allowed: a number in \(0, 1\]"), ("fraction(least=0)", r"\[1, inf\)"))

    @property
    def min_population(self) -> int:
        return self.least

    def draw(self, population: int, rng: Generator, weights: NDArray[np.float64] | None) -> NDArray[np.int64]:
        return rng.choice(population, self._size(population), replace=False, shuffle=False)

    def expected(self, population: int) -> float:
        return float(self._size(population))

    def _size(self, population: int) -> int:
        size = max(math.floor(exact(self.part) * population), self.least)
        check_size(self.name, size, population)
        return size
