"""Averages of the models of a run: evaluated and saved in addition to the last model, never trained from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedcams.registry import Number, Spec, number, register

if TYPE_CHECKING:
    from torch import Tensor


class Average(Spec, ABC):
    """The base class of all averages. A subclass writes `weight`; buffers are averaged in the same way.

    Examples:
        >>> import fedcams
        >>> average = fedcams.Method(average="ema(0.97)").average
        >>> [round(average.weight(t), 2) for t in (1, 2, 100)]
        [1.0, 0.5, 0.03]
    """

    kind = "average"
    reference: ClassVar[str] = ""
    """The publication that describes it."""
    active: ClassVar[bool] = True
    """Whether an average is kept in addition to the model."""

    def init(self, x: Tensor) -> Tensor:
        """Return the average before the first step: a copy of `x [d]`."""
        return x.detach().clone()

    def step_(self, a: Tensor, x: Tensor, t: int) -> None:
        """Move the average `a [d]` towards the model `x [d]` after server step t = 1, 2, …, in place."""
        with torch.no_grad():
            a.lerp_(x, self.weight(t))  # exact for weight 1, which `a + w (x - a)` is not

    @abstractmethod
    def weight(self, t: int) -> float:
        """Return the weight, in (0, 1], of the model after step t = 1, 2, …; the average so far has the rest."""


@register("none")
@dataclass(frozen=True)
class NoAverage(Average):
    """No average: only the last model is kept."""

    active = False
    examples = ("none",)

    def weight(self, t: int) -> float:
        """Return 1: the average is the model itself."""
        return 1.0


@register("ema")
@dataclass(frozen=True)
class ExponentialAverage(Average):
    """An exponential average that starts as the mean: `a += w (x - a)` after step t, with `w = max(1 - decay, 1/t)`."""

    decay: Number = number(low=0, high=1, open="high", doc="the weight of the old average in the new one")

    reference = "Polyak, Juditsky: Acceleration of Stochastic Approximation by Averaging, 1992"
    examples = ("ema(decay=0.97)",)
    refused = (("ema", "decay is missing"), ("ema(1)", r"allowed: a number in \[0, 1\)"))

    def weight(self, t: int) -> float:
        """Return `max(1 - decay, 1/t)`."""
        return max(float(1 - self.decay), 1 / t)
