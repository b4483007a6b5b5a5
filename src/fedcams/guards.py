"""Guards: the largest norm that a client's rows may have, learned from all clients; longer rows are refused.

FedAMS needs this most: its v̂ is a running maximum, which a single huge update would raise permanently.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedcams.registry import Number, Spec, number, register

Norms = Mapping[int, Mapping[str, float]]
"""Client -> stream -> the norm of its decoded row in this round."""
Past = Mapping[str, Mapping[int, float]]
"""Stream -> round -> the usual norm of that round: the state of a guard."""
ROUNDS = 10
"""How many past rounds count: those with the largest norms. The bound is wrong only if half of them are."""
ENOUGH = 3
"""With at least this many clients whose rows are not zero, a single one cannot set what is usual for the cohort."""


class Guard(Spec, ABC):
    """The base class of all guards. State is data: `observe` returns the next state, and `bounds` reads it.

    Examples:
        >>> import fedcams
        >>> norms = {client: {"update": length} for client, length in enumerate((1.0, 2.0, 2.0, 500.0))}
        >>> fedcams.Method(guard="adaptive(factor=5)").guard.bounds({}, norms)
        {'update': 10.0}
    """

    kind = "guard"
    reference: ClassVar[str] = ""
    """The publication that describes it."""
    active: ClassVar[bool] = True
    """Whether rows are measured, and buffers checked for what they mean."""

    @abstractmethod
    def bounds(self, past: Past, norms: Norms) -> dict[str, float]:
        """Return stream -> the largest norm to accept, from past rounds and the `norms` of this round's cohort.

        A stream without a bound is not limited. While a round's rows arrive one by one, `norms` is still empty.
        """

    @abstractmethod
    def observe(self, past: Past, round: int, norms: Norms) -> Past:
        """Return the state after a round in which rows of these norms arrived, accepted or not."""


@register("none")
@dataclass(frozen=True)
class NoGuard(Guard):
    """No guard: rows of any norm are accepted."""

    active = False
    examples = ("none",)
    refused = (("none(1)", "at most 0 values"),)

    def bounds(self, past: Past, norms: Norms) -> dict[str, float]:
        """Return nothing: no stream is limited."""
        return {}

    def observe(self, past: Past, round: int, norms: Norms) -> Past:
        """Return nothing: there is no state."""
        return {}


@register("adaptive")
@dataclass(frozen=True)
class Adaptive(Guard):
    """Refuses rows longer than `factor` times the usual norm of their stream: update, buffers or control variates.

    A cohort's usual norm is its upper quartile: a quarter of its clients exceed it. The usual norm of a round is the
    median over the 10 rounds in which this was largest. If the current cohort has 3 clients or more whose rows are not
    zero, and its own usual norm is larger, that one counts; the first round has only its own. The guard uses the
    largest rounds rather than the last ones: late in training most clients have little left to learn, and those that
    still learn are not attackers. Norms above the bound count as the bound, so that it grows if the norms of most
    clients grow. The bound is 4 times as wide for buffers and control variates, which change most for new clients, for
    cohorts of one or two clients, and for codecs that draw coordinates at random. A refused client keeps its residual.
    """

    factor: Number = number(5, low=1, doc="how many times the usual norm a row may have")

    examples = ("adaptive", "adaptive(factor=10)")
    refused = (("adaptive(factor=0.5)", r"allowed: a number in \[1, inf\)"),)

    def bounds(self, past: Past, norms: Norms) -> dict[str, float]:
        """Return `factor` times the usual norm of each stream that has one."""
        streams = _by_stream(norms)
        usual = {name: _usual(past.get(name, {}).values(), streams.get(name, [])) for name in {**past, **streams}}
        return {name: float(self.factor) * norm for name, norm in usual.items() if norm > 0}

    def observe(self, past: Past, round: int, norms: Norms) -> Past:
        """Return the past with what was usual in this round, if it is among the largest."""
        bounds = self.bounds(past, norms)
        usual = {name: upper(found) for name, found in _by_stream(norms).items()}
        now = {name: {round: min(norm, bounds[name])} for name, norm in usual.items() if norm > 0}
        known = {name: {**past.get(name, {}), **now.get(name, {})} for name in {**past, **now}}
        return {name: dict(sorted(found.items(), key=lambda item: item[1])[-ROUNDS:]) for name, found in known.items()}


def _usual(past: Iterable[float], cohort: list[float]) -> float:
    """Return the usual norm, given those of past rounds and the norms of this cohort; 0 if nothing is known."""
    before, now = statistics.median_low(known) if (known := list(past)) else 0.0, upper(cohort)
    return max(before, now) if len(cohort) >= ENOUGH or not before else before


def _by_stream(norms: Norms) -> dict[str, list[float]]:
    """Return stream -> the norms that count, of all clients."""
    names = dict.fromkeys(name for known in norms.values() for name in known)
    return {name: _counting(known[name] for known in norms.values() if name in known) for name in names}


def _counting(values: Iterable[float]) -> list[float]:
    """Return the values that count, which are finite and above 0, in ascending order."""
    return sorted(value for value in values if value > 0 and math.isfinite(value))


def upper(values: Iterable[float]) -> float:
    """Return the value that a quarter of these exceed, and at least one if there are several; 0 if there are none.

    It is what is usual for a cohort. Only finite values above 0 count.

    Arguments:
        values: one number per client, such as the norm of its update.

    Returns:
        One of the values.

    Examples:
        >>> from fedcams.guards import upper
        >>> upper([1.0, 2.0, 2.0, 500.0])
        2.0
    """
    known = _counting(values)
    above = math.ceil(len(known) / 4) if len(known) > 1 else 0
    return known[-1 - above] if known else 0.0
