"""The base class of samplers, which choose the clients of a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedcams.errors import SpecError
from fedcams.keys import generator
from fedcams.registry import Spec, integer


class Sampler(Spec, ABC):
    """The base class of all samplers. A subclass implements `draw` and `expected`.

    A cohort depends only on (seed, round) and the population, so a run that restarts at round 500 continues as if it
    had never stopped.

    Examples:
        >>> from fedcams.sampler import sampler
        >>> cohort = sampler("uniform(n=3)").sample(range(100), seed=1, round=1)
        >>> len(cohort), cohort == sampler("uniform(n=3)").sample(range(100), seed=1, round=1)
        (3, True)
    """

    kind = "sampler"
    reference: ClassVar[str] = ""
    """The paper that describes the sampler."""
    needs_weights: ClassVar[bool] = False
    """Whether it needs weights."""
    size_varies: ClassVar[bool] = False
    """Whether the size of a cohort varies."""

    def sample(
        self, clients: Sequence[int], round: int, seed: int, weights: Sequence[float] | None = None
    ) -> list[int]:
        """Return the cohort of a round in ascending order; the order of `clients` does not matter.

        `weights`, one per client, such as its number of examples, are for samplers that need them.
        """
        self._check(clients, weights)
        ids, weight = sorted(clients), None
        if weights is not None:  # not by NumPy's argsort: it takes integers of more than 63 bits for floats
            order = sorted(range(len(ids)), key=clients.__getitem__)
            weight = np.asarray(weights, dtype=np.float64)[order]
        return [int(ids[place]) for place in np.sort(self.places(len(ids), round, seed, weight)).tolist()]

    def places(
        self, population: int, round: int, seed: int, weights: NDArray[np.float64] | None = None
    ) -> NDArray[np.int64]:
        """Return the cohort among clients 0, 1, 2, ..., in any order; fast for many clients."""
        if self.needs_weights:
            weights = check_weights(self.name, weights)
        drawn = np.asarray(self.draw(population, generator(seed, "cohort", round), weights))
        if drawn.size == 0:
            return np.empty(0, np.int64)
        distinct = drawn.dtype.kind in "iu" and len(np.unique(drawn)) == drawn.size
        if not distinct or not 0 <= drawn.min() <= drawn.max() < population:
            some = ", ".join(map(str, drawn.ravel()[:10].tolist()))
            raise SpecError(f"{self}: draw returns {some}; return distinct integers from 0 to {population - 1}")
        return drawn

    @property
    def probability(self) -> float | None:
        """The probability that a client takes part in a round; None unless all are drawn independently."""
        return None

    @property
    def min_population(self) -> int:
        """The smallest population that it can draw from."""
        return 1

    @abstractmethod
    def draw(self, population: int, rng: Generator, weights: NDArray[np.float64] | None) -> NDArray[np.int64]:
        """Draw distinct places in [0, population), in any order; place i, of `weights[i]`, is the i-th client by id.

        The weights of a sampler that needs them are there, positive and finite.
        """

    @abstractmethod
    def expected(self, population: int) -> float:
        """Return the expected size of a cohort."""

    def largest(self, population: int) -> float:
        """Return the size of the largest cohort; refuses a cohort larger than the population."""
        expected = self.expected(population)
        return population if self.size_varies else expected

    def mean_weights(
        self, cohort: Sequence[int], round: int, weights: Mapping[int, float] | None = None
    ) -> list[float]:
        """Return the weights of clients of the round's cohort in the mean, for methods with `weighting=sampler`.

        They are 1 unless a sampler overrides this, for example with the inverse of the probability of being drawn.
        `weights`, by client and for the whole population, are those that it draws by, given only if it needs them.
        """
        return [1.0] * len(cohort)

    def _check(self, clients: Sequence[int], weights: Sequence[float] | None) -> None:
        if len(clients) == 0:
            raise SpecError(f"{self.name}: clients is empty; give at least one client")
        if len(set(clients)) < len(clients):
            client, times = Counter(clients).most_common(1)[0]
            raise SpecError(f"{self.name}: clients has {client} {times} times; give each client once")
        if weights is not None and len(weights) != len(clients):
            raise SpecError(f"{self.name}: {len(weights)} weights for {len(clients)} clients; give one for each client")


@dataclass(frozen=True)
class FixedSize(Sampler):
    """The base class of samplers whose cohorts have n clients."""

    n: int = integer(10, low=1, doc="clients in a cohort, at most the population")

    @property
    def min_population(self) -> int:
        return self.n

    def expected(self, population: int) -> float:
        check_size(self.name, self.n, population)
        return float(self.n)


def sampler(spec: str | Sampler) -> Sampler:
    """Return the sampler that a spec string names.

    Arguments:
        spec: such as `uniform(n=20)`; a sampler is returned unchanged.

    Returns:
        The sampler, a frozen dataclass.

    Raises:
        SpecError: for an unknown name or key, or a value out of range.

    Examples:
        >>> from fedcams.sampler import sampler
        >>> sampler("uniform(n=20)").n
        20
    """
    return Sampler.parse(spec)


def check_weights(name: str, weights: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Return the weights; refuse missing ones, and any that is not positive and finite."""
    if weights is None:
        raise SpecError(f"{name}: weights=None; give one for each client, such as its number of examples")
    bad = weights[~(np.isfinite(weights) & (weights > 0))]
    if bad.size:
        raise SpecError(f"{name}: weights has {bad[0]}; give positive finite numbers, and leave such clients out")
    return weights


def check_size(name: str, n: int, population: int) -> None:
    """Refuse a cohort that is larger than the population."""
    if n > population:
        raise SpecError(f"{name}: n={n} of only {population} clients; give n={population} or less, or more clients")
