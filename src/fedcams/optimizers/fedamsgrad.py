"""FedAMSGrad: FedAdam with a second moment that never decreases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.optimizers.base import Adaptive, MaxMoments
from fedcams.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("fedamsgrad")
@dataclass(frozen=True)
class FedAMSGrad(Adaptive):
    """AMSGrad on the server, the paper's Option 2.

    `m = β1 m + (1-β1) Δ`, `v = β2 v + (1-β2) Δ²`, `v̂ = max(v̂, v)`, `x += lr m/(√v̂ + ε)`.
    """

    reference = "Wang, Lin, Chen, Communication-Efficient Adaptive Federated Learning, ICML 2022, Algorithm 1, Option 2"
    state_type = MaxMoments
    examples = ("fedamsgrad", "fedamsgrad(lr=1, bias_correction=true)")

    def update_(self, t: int, x: Tensor, delta: Tensor, m: Tensor, v: Tensor, vhat: Tensor) -> None:
        lr, eps = self.rates(t)
        m.lerp_(delta, float(1 - self.beta1))
        v.lerp_(delta.square(), float(1 - self.beta2))
        torch.maximum(vhat, v, out=vhat)
        x.addcdiv_(m, vhat.sqrt().add_(eps), value=lr)
