"""Averages of the models of a run: evaluated and saved beside the last model, never trained from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcams.registry import Number, Spec, number, register


class Average(Spec, ABC):
    """The root of all averages. A subclass says what the newest model counts; buffers are averaged by it too."""

    kind = "average"
    reference: ClassVar[str] = ""
    """Where it was published."""
    active: ClassVar[bool] = True
    """Whether there is anything to keep beside the model itself."""

    def init(self, x: Tensor) -> Tensor:
        """The average before the first step: a copy of `x [d]`."""
        return x.detach().clone()

    @torch.no_grad()
    def step_(self, a: Tensor, x: Tensor, t: int) -> None:
        """Takes the model `x [d]` after server step t = 1, 2, ... into the average `a [d]`, in place."""
        a.lerp_(x, self.weight(t))  # exact for weight 1, which `a + w (x - a)` is not

    @abstractmethod
    def weight(self, t: int) -> float:
        """What the model after step t = 1, 2, ... counts, in (0, 1]; the average so far counts the rest."""


@register("none")
@dataclass(frozen=True)
class NoAverage(Average):
    """No average: the last model alone."""

    active = False
    examples = ("none",)

    def weight(self, t: int) -> float:
        """1: the average is the model itself."""
        return 1.0


@register("ema")
@dataclass(frozen=True)
class ExponentialAverage(Average):
    """`a += w (x - a)` after step t, `w = max(1 - decay, 1/t)`: the plain mean at first, then an exponential one."""

    decay: Number = number(low=0, high=1, open="high", doc="how much of the average a step keeps")

    reference = "Polyak, Juditsky: Acceleration of Stochastic Approximation by Averaging, 1992"
    examples = ("ema(decay=0.97)",)
    refused = (("ema", "decay is missing"), ("ema(1)", r"allowed: a number in \[0, 1\)"))

    def weight(self, t: int) -> float:
        """`max(1 - decay, 1/t)`."""
        return max(float(1 - self.decay), 1 / t)
