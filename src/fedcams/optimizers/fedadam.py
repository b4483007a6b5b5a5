"""FedAdam: steps scaled by a running mean of squared updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedcams.optimizers.base import Adaptive, Moments
from fedcams.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("fedadam")
@dataclass(frozen=True)
class FedAdam(Adaptive):
    """Adam on the server: `m = β1 m + (1-β1) Δ`, `v = β2 v + (1-β2) Δ²`, `x += lr m/(√v + ε)`."""

    reference = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
    state_type = Moments
    examples = ("fedadam", "fedadam(lr=1, bias_correction=true)")

    def update_(self, t: int, x: Tensor, delta: Tensor, m: Tensor, v: Tensor) -> None:
        lr, eps = self.rates(t)
        m.lerp_(delta, float(1 - self.beta1))
        v.lerp_(delta.square(), float(1 - self.beta2))
        x.addcdiv_(m, v.sqrt().add_(eps), value=lr)
