"""FedAMS: FedAMSGrad with ε inside the maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.optimizers.base import Adaptive, MaxMoments
from fedcams.registry import Number, number, register

if TYPE_CHECKING:
    from torch import Tensor


@register("fedams")
@dataclass(frozen=True)
class FedAMS(Adaptive):
    """AMSGrad with max stabilisation, the paper's Option 1; FedCAMS is this with error feedback on the uplink.

    `m = β1 m + (1-β1) Δ`, `v = β2 v + (1-β2) Δ²`, `v̂ = max(v̂, v, ε)`, `x += lr m/√v̂`.
    """

    reference = "Wang, Lin, Chen, Communication-Efficient Adaptive Federated Learning, ICML 2022, Algorithm 1, Option 1"
    state_type = MaxMoments
    examples = ("fedams", "fedams(lr=0.03, eps=1e-8)", "fedams(bias_correction=true)")
    refused = (("fedams(eps=0)", r"allowed: a number in \[1e-30, inf\)"), ("fedams(beta2=1)", "out of range"))

    lr: Number = number(1, low=0, open="low", doc="server learning rate")
    eps: Number = number(1e-3, low=1e-30, doc="limits the step of coordinates with small updates")

    def floor(self, t: int) -> float:
        """Return `eps`, which bounds v̂ itself."""
        return float(self.eps)

    def update_(self, t: int, x: Tensor, delta: Tensor, m: Tensor, v: Tensor, vhat: Tensor) -> None:
        lr, _ = self.rates(t)  # ε bounds v̂ itself, uncorrected
        m.lerp_(delta, float(1 - self.beta1))
        v.lerp_(delta.square(), float(1 - self.beta2))
        torch.maximum(vhat, v, out=vhat).clamp_(min=float(self.eps))
        x.addcdiv_(m, vhat.sqrt(), value=lr)
