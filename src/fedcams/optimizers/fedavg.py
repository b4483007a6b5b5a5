"""FedAvg: the mean update, unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fedcams.optimizers.base import ServerOptimizer
from fedcams.registry import Number, number, register

if TYPE_CHECKING:
    from torch import Tensor


class Steps(NamedTuple):
    """The state of FedAvg: the number of steps taken."""

    t: int


@register("fedavg")
@dataclass(frozen=True)
class FedAvg(ServerOptimizer):
    """Adds the mean update: `x += lr Δ`."""

    reference = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"
    state_type = Steps
    examples = ("fedavg", "fedavg(lr=0.5)")
    refused = (("fedavg(lr=0)", r"allowed: a number in \(0, inf\)"), ("fedavg(momentum=0.9)", "no key 'momentum'"))

    lr: Number = number(1, low=0, open="low", doc="server learning rate")

    def update_(self, t: int, x: Tensor, delta: Tensor) -> None:
        x.add_(delta, alpha=float(self.lr))
