"""FedAdagrad: steps scaled by the sum of all squared updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedcams.optimizers.base import Moments, ServerOptimizer, State, momentum_twin
from fedcams.registry import Number, number, register

if TYPE_CHECKING:
    from torch import Tensor


@register("fedadagrad")
@dataclass(frozen=True)
class FedAdagrad(ServerOptimizer):
    """Adagrad on the server: `m = β1 m + (1-β1) Δ`, `v += Δ²`, `x += lr m/(√v + ε)`."""

    reference = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
    state_type = Moments
    examples = ("fedadagrad", "fedadagrad(lr=1, beta1=0.9)")

    lr: Number = number(0.1, low=0, open="low", doc="server learning rate")
    beta1: Number = number(0, low=0, high=1, open="high", doc="the weight of the old m in the new m")
    eps: Number = number(0.1, low=1e-30, doc="limits the step of coordinates with small updates")

    def update_(self, t: int, x: Tensor, delta: Tensor, m: Tensor, v: Tensor) -> None:
        m.lerp_(delta, float(1 - self.beta1))
        v.addcmul_(delta, delta)
        x.addcdiv_(m, v.sqrt().add_(float(self.eps)), value=float(self.lr))

    def floor(self, t: int) -> float:
        """Return the second moment at which its root and `eps` are equal in step t."""
        return float(self.eps) ** 2

    def off_floor(self, state: State) -> Tensor | None:
        v: Tensor = state._asdict()["v"]
        return v > self.floor(state.t)

    def twin(self, digits: int = 9) -> ServerOptimizer | None:
        return None if self.schedules() else momentum_twin(float(self.lr) / float(self.eps), self.beta1, digits)
