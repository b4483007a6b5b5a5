"""Bernoulli: every client takes part independently."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcams.registry import Number, number, register
from fedcams.sampler.base import Sampler


@register("bernoulli")
@dataclass(frozen=True)
class Bernoulli(Sampler):
    """Draws each client with probability p, independently; the size of the cohort varies, and it may be empty.

    Also known as Poisson sampling, which privacy accounting assumes.
    """

    p: Number = number(0.1, low=0, high=1, open="low", doc="probability that a client takes part")

    reference = "McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018"
    size_varies = True
    examples = ("bernoulli", "bernoulli(p=0.5)", "bernoulli(p=1)")
    refused = (
        ("bernoulli(p=0)", r"allowed: a number in \(0, 1\]"),
        ("bernoulli(p=2)", r"allowed: a number in \(0, 1\]"),
    )

    @property
    def probability(self) -> float:
        return float(self.p)

    def draw(self, population: int, rng: Generator, weights: NDArray[np.float64] | None) -> NDArray[np.int64]:
        return np.flatnonzero(rng.random(population) < float(self.p))

    def expected(self, population: int) -> float:
        return float(self.p * population)
