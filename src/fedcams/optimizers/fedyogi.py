"""FedYogi: FedAdam with a second moment whose changes do not depend on its own size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.optimizers.base import Adaptive, Moments
from fedcams.registry import Number, flag, number, register

if TYPE_CHECKING:
    from torch import Tensor


@register("fedyogi")
@dataclass(frozen=True)
class FedYogi(Adaptive):
    """Yogi on the server: `m = β1 m + (1-β1) Δ`, `v = v - (1-β2) sign(v - Δ²) Δ²`, `x += lr m/(√v + ε)`.

    Its bias correction is that of the published code: `x += lr √(1-β2^t)/(1-β1^t) m/(√v + ε)`, with ε unchanged.
    """

    reference = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
    state_type = Moments
    examples = ("fedyogi", "fedyogi(eps=1e-3)", "fedyogi(bias_correction=true)")

    lr: Number = number(1, low=0, open="low", doc="server learning rate")
    bias_correction: bool = flag(False, doc="multiply lr by √(1-beta2^t)/(1-beta1^t)")

    def rates(self, t: int) -> tuple[float, float]:
        """Return `lr` for step t, adjusted for the bias correction, and `eps`, which is not adjusted."""
        lr, _ = super().rates(t)
        return lr, float(self.eps)

    def update_(self, t: int, x: Tensor, delta: Tensor, m: Tensor, v: Tensor) -> None:
        lr, eps = self.rates(t)
        m.lerp_(delta, float(1 - self.beta1))
        sign = torch.addcmul(v, delta, delta, value=-1).sign_()
        v.addcmul_(sign.mul_(delta), delta, value=-float(1 - self.beta2))
        del sign  # one temporary at a time: see `ServerOptimizer.update_`
        x.addcdiv_(m, v.sqrt().add_(eps), value=lr)
