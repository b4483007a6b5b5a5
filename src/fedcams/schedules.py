"""Schedules: numbers that depend on the round, for a learning rate or any other number of a schedulable piece.

`fedams(lr=cosine(start=1, end=0))` lowers the server's rate over the whole run; `piece.at(round, rounds)` returns the
piece with the numbers of one round.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

from fedcams.errors import SpecError
from fedcams.registry import Number, Schedule, exact, integer, number, register
from fedcams.registry.fields import show


@register("constant")
@dataclass(frozen=True)
class Constant(Schedule):
    """The same number in every round."""

    level: Number = number(doc="the number")

    examples = ("constant(level=0.1)",)
    refused = (("constant", "level is missing"), ("constant(level=a)", "not a number"))

    def value(self, round: int, rounds: int) -> float:
        """Return the number."""
        return float(self.level)

    def bounds(self) -> tuple[Fraction, Fraction]:
        """Return the number twice."""
        return exact(self.level), exact(self.level)


@dataclass(frozen=True)
class _Ramp(Schedule):
    """A change from `start` in round 1 to `end`, which it reaches in the round after its last."""

    start: Number = number(doc="the number in round 1")
    end: Number = number(doc="the number after `rounds` rounds, and from then on")
    rounds: int | None = integer(None, low=1, doc="how many rounds the change takes; none: the whole run")

    def part(self, round: int, rounds: int) -> float:
        """Return the elapsed part of its length: 0 in round 1, and 1 from round `rounds + 1` on."""
        return min(1.0, (round - 1) / self.length(rounds))

    def between(self, weight: float) -> float:
        """Return the weighted mean of both ends: exactly `start` for weight 0, exactly `end` for weight 1."""
        return float(self.start) * (1 - weight) + float(self.end) * weight

    def bounds(self) -> tuple[Fraction, Fraction]:
        """Return both ends, the lower one first."""
        return min(exact(self.start), exact(self.end)), max(exact(self.start), exact(self.end))

    def limit(self) -> Fraction | None:
        """Return `end` if the change takes the whole run, whose last round is one step before it; else None."""
        return exact(self.end) if self.rounds is None and self.start != self.end else None

    def length(self, rounds: int) -> int:
        """Return its own number of rounds, or that of the run."""
        return rounds if self.rounds is None else self.rounds

    @property
    def depends_on_rounds(self) -> bool:
        """Whether it takes the whole run."""
        return self.rounds is None


@register("linear")
@dataclass(frozen=True)
class Linear(_Ramp):
    """A straight line: `start + (end - start) p` with `p = min(1, (round - 1)/rounds)`."""

    examples = ("linear(start=1, end=0)", "linear(start=1/16, end=1/4, rounds=100)")
    refused = (("linear(1)", "end is missing"), ("linear(1, 0, rounds=0)", r"allowed: an integer in \[1, inf\)"))

    def value(self, round: int, rounds: int) -> float:
        """Return the number on the line in this round."""
        return self.between(self.part(round, rounds))


@register("cosine")
@dataclass(frozen=True)
class Cosine(_Ramp):
    """Half a cosine: `end + (start - end)(1 + cos πp)/2` with `p = min(1, (round - 1)/rounds)`."""

    examples = ("cosine(start=1, end=0)", "cosine(start=0.1, end=1e-3, rounds=200)")
    refused = (("cosine(1, 0, 2.5)", "not a whole number"), ("cosine(start=1e39, end=0)", "beyond what a float32"))

    def value(self, round: int, rounds: int) -> float:
        """Return the number on the curve in this round."""
        return self.between((1 - math.cos(math.pi * self.part(round, rounds))) / 2)


@register("warmup")
@dataclass(frozen=True)
class Warmup(Schedule):
    """A linear rise to a number or schedule: `round/(rounds + 1)` of its first value for `rounds` rounds, then itself.

    A schedule that follows counts rounds from its own start, and lasts at most for the rest of the run.
    """

    rounds: int = integer(low=1, doc="how many rounds the rise takes")
    then: Number = number(doc="the number or the schedule that follows")

    schedulable = True
    examples = ("warmup(rounds=5, then=0.1)", "warmup(rounds=10, then=cosine(start=1, end=0))")
    refused = (("warmup(5)", "then is missing"), ("warmup(rounds=linear(1, 5), then=1)", "a schedule is not accepted"))

    def value(self, round: int, rounds: int) -> float:
        """Return the number in this round, of the rise or of what follows."""
        left = max(1, rounds - self.rounds)
        if round > self.rounds:
            return self._then.value(round - self.rounds, left)
        return round / (self.rounds + 1) * self._then.value(1, left)

    def bounds(self) -> tuple[Fraction, Fraction]:
        """Return the bounds of what follows, extended to the start of the rise."""
        low, high = self._then.bounds()
        lows, highs = low / (self.rounds + 1), high / (self.rounds + 1)
        return min(low, lows), max(high, highs)

    def limit(self) -> Fraction | None:
        """Return the limit of what follows."""
        return self._then.limit()

    def length(self, rounds: int) -> int:
        """Return the length of the rise plus that of what follows."""
        return self.rounds + self._then.length(max(0, rounds - self.rounds))

    @property
    def depends_on_rounds(self) -> bool:
        """Whether what follows depends on the length of the run."""
        return self._then.depends_on_rounds

    @property
    def _then(self) -> Schedule:
        return self.then if isinstance(self.then, Schedule) else Constant(self.then)


@register("hold")
@dataclass(frozen=True)
class Hold(Schedule):
    """The first value of a schedule for a part of the run, then the schedule itself, over the rest of it.

    It holds for `floor(part · rounds)` rounds of a run of any length: `hold(part=0.8, then=cosine(1, 0))` keeps a rate
    for 400 of 500 rounds and lowers it over the last 100. What follows counts rounds from its own start.
    """

    part: Number = number(low=0, high=1, open="both", doc="the fraction of the run in which nothing changes")
    then: Number = number(doc="the schedule that follows")

    schedulable = True
    examples = ("hold(part=0.8, then=cosine(start=1, end=0))", "hold(part=0.5, then=linear(start=1/32, end=1/8))")
    refused = (
        ("hold(0.8)", "then is missing"),
        ("hold(part=1, then=linear(1, 0))", r"allowed: a number in \(0, 1\)"),
        ("hold(part=linear(0.1, 0.9), then=cosine(1, 0))", "part=linear.*: a schedule is not accepted here"),
        ("hold(part=0.8, then=1)", "then=1 never changes; give a schedule, or write 1 instead of hold(...)"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.part, Schedule):
            raise SpecError(f"hold: part={self.part}: a schedule is not accepted here; allowed: a number in (0, 1)")
        if not isinstance(self.then, Schedule):
            raise SpecError(
                f"hold: then={show(self.then)} never changes; give a schedule, or write {show(self.then)} "
                "instead of hold(...)"
            )

    def value(self, round: int, rounds: int) -> float:
        """Return the number in this round: first the start of what follows, then its value."""
        held = self._held(rounds)
        return self._then.value(max(1, round - held), rounds - held)

    def bounds(self) -> tuple[Fraction, Fraction]:
        """Return the bounds of what follows."""
        return self._then.bounds()

    def limit(self) -> Fraction | None:
        """Return the limit of what follows."""
        return self._then.limit()

    def length(self, rounds: int) -> int:
        """Return the number of rounds that it holds plus the length of what follows."""
        held = self._held(rounds)
        return held + self._then.length(rounds - held)

    @property
    def depends_on_rounds(self) -> bool:
        """Return True: it holds for a part of the run."""
        return True

    def _held(self, rounds: int) -> int:
        return math.floor(exact(self.part) * rounds)

    @property
    def _then(self) -> Schedule:
        assert isinstance(self.then, Schedule)
        return self.then


@register("bias_correction")
@dataclass(frozen=True)
class BiasCorrection(Schedule):
    """Adam's bias correction as a rate: `level √(1-β2^t)/(1-β1^t)` in round t.

    `fedavgm(lr=bias_correction(...))` takes the same steps as FedAMS with bias correction while its v̂ stays at eps.
    """

    level: Number = number(doc="the number that the schedule approaches")
    beta1: Number = number(0.9, low=0, high=1, open="high", doc="the weight of the old m in the new m")
    beta2: Number = number(0.99, low=0, high=1, open="high", doc="the weight of the old v in the new v")

    examples = ("bias_correction(level=0.1)", "bias_correction(level=1, beta2=0.999)")
    refused = (("bias_correction(1, beta1=1)", r"allowed: a number in \[0, 1\)"),)

    def value(self, round: int, rounds: int) -> float:
        """Return the corrected number in this round."""
        return float(self.level) * _correction(round, float(self.beta1), float(self.beta2))

    def bounds(self) -> tuple[Fraction, Fraction]:
        """Return the level times the smallest and the largest factor."""
        low, high = (exact(self.level) * factor for factor in _extremes(float(self.beta1), float(self.beta2)))
        return min(low, high), max(low, high)


LONGEST = 100_000
"""The number of rounds that are searched for the extremes of the correction."""
ALLOWANCE = 1e-5
"""How much wider the bounds are than the extremes, relative, so that numbers rounded to six digits stay within."""


def _correction(t: int, beta1: float, beta2: float) -> float:
    return math.sqrt(1 - beta2**t) / (1 - beta1**t)


@functools.cache
def _extremes(beta1: float, beta2: float) -> tuple[Fraction, Fraction]:
    """Return the smallest and the largest factor of all rounds, including 1, the limit."""
    settled = next((t for t in range(1, LONGEST) if max(beta1, beta2) ** t < 1e-7), LONGEST)
    factors = [_correction(t, beta1, beta2) for t in range(1, settled + 1)]
    low, high = min(factors) * (1 - ALLOWANCE), max(factors) * (1 + ALLOWANCE)
    return min(exact(low), Fraction(1)), exact(high) if max(factors) > 1 + ALLOWANCE else Fraction(1)
