"""How often clients take part, and how long they are absent in between."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcams.sampler.base import Sampler

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Contacts:
    """Contacts of all clients in all rounds: first ones by round, later ones by the number of rounds since the last."""

    first: Array
    """`[T + 1]`, the number of first contacts in round t."""
    gaps: Array
    """`[T]`, the number of contacts of clients whose last contact was g rounds earlier."""

    @property
    def seen(self) -> float:
        """The number of clients that took part at all."""
        return float(self.first.sum())

    @property
    def total(self) -> float:
        """The number of all contacts."""
        return float(self.first.sum() + self.gaps.sum())


def expected_contacts(population: int, cohort: float, rounds: int) -> Contacts:
    """Return the mean contacts if every client takes part in each round with probability p = cohort/population.

    First contacts in round t: N p (1-p)^(t-1). Contacts g rounds after the last one: N (T-g) p² (1-p)^(g-1).

    Arguments:
        population: the number of clients N.
        cohort: the mean number of clients per round.
        rounds: the number of rounds T.

    Returns:
        First contacts by round, and later ones by the number of rounds since the last.

    Examples:
        >>> from fedcams.sampler import expected_contacts
        >>> round(expected_contacts(population=100, cohort=10, rounds=20).total)
        200
    """
    p = cohort / population
    t, g = np.arange(rounds + 1), np.arange(rounds)
    first = np.where(t > 0, population * p * (1 - p) ** np.maximum(t - 1, 0), 0.0)
    gaps = np.where(g > 0, population * (rounds - g) * p**2 * (1 - p) ** np.maximum(g - 1, 0), 0.0)
    return Contacts(first, gaps)


def simulated_contacts(sampler: Sampler, population: int, rounds: int, seed: int) -> Contacts:
    """Return the contacts of one run, with the cohorts that a simulation with this seed would draw.

    Arguments:
        sampler: what draws the cohorts.
        population: the number of clients.
        rounds: the number of rounds.
        seed: that of the run.

    Returns:
        First contacts by round, and later ones by the number of rounds since the last.

    Examples:
        >>> from fedcams.sampler import sampler, simulated_contacts
        >>> simulated_contacts(sampler("uniform(n=10)"), population=100, rounds=20, seed=1).total
        200.0
    """
    first, gaps = np.zeros(rounds + 1), np.zeros(rounds)
    last = np.zeros(population, np.int64)
    weights = np.ones(population) if sampler.needs_weights else None
    for round in range(1, rounds + 1):
        cohort = sampler.places(population, round, seed, weights)
        before = last[cohort]
        first[round] += np.count_nonzero(before == 0)
        np.add.at(gaps, round - before[before > 0], 1)
        last[cohort] = round
    return Contacts(first, gaps)
