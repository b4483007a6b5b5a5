"""FedAvgM: FedAvg with momentum on the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fedcams.optimizers.base import ServerOptimizer
from fedcams.registry import Number, number, register

if TYPE_CHECKING:
    from torch import Tensor


class Momentum(NamedTuple):
    """The state of FedAvgM: the number of steps taken, and the momentum `m [d]`."""

    t: int
    m: Tensor


@register("fedavgm")
@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """Heavy-ball momentum: `m = momentum·m + Δ`, `x += lr m`."""

    reference = "Hsu et al., Measuring the Effects of Non-Identical Data Distribution, arXiv:1909.06335, 2019"
    state_type = Momentum
    examples = ("fedavgm", "fedavgm(momentum=0.5)")
    refused = (("fedavgm(momentum=1)", r"allowed: a number in \[0, 1\)"),)

    lr: Number = number(1, low=0, open="low", doc="server learning rate")
    momentum: Number = number(0.9, low=0, high=1, open="high", doc="the weight of the old m in the new m")

    def update_(self, t: int, x: Tensor, delta: Tensor, m: Tensor) -> None:
        m.mul_(float(self.momentum)).add_(delta)
        x.add_(m, alpha=float(self.lr))
