"""Local training by Adam, and by AdamW, whose weight decay is separate from the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.local.base import (
    Local,
    Rate,
    Slots,
    batch_field,
    column,
    drop_last_field,
    epochs_field,
    only_active,
    steps_field,
)
from fedcams.registry import Number, number, register

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ByMoments(Local):
    """The base class of adam and adamw: their hyperparameters, their moments, and the step along these.

    An `eps` below 1e-30 is refused: it could become zero in float32, and a coordinate without gradients would give 0/0.
    """

    lr: Number = number(0.001, low=0, open="low", doc="local learning rate")
    beta1: Number = number(0.9, low=0, high=1, open="high", doc="the weight of the old mean gradient in the new one")
    beta2: Number = number(0.999, low=0, high=1, open="high", doc="the weight of the old mean square in the new one")
    eps: Number = number(1e-8, low=1e-30, doc="added to the root of the mean squared gradient")
    weight_decay: Number = number(0, low=0, doc="pull towards zero")
    epochs: int | None = epochs_field()
    steps: int | None = steps_field()
    batch: int = batch_field()
    drop_last: bool = drop_last_field()

    def init(self, x: Tensor) -> Slots:
        """Return zeros for the moments `[C, d]` and the step count `[C]`."""
        count = torch.zeros(len(x), dtype=torch.float64, device=x.device)  # 1 - 0.999ᵗ would lose digits in float32
        return {"mean": torch.zeros_like(x), "square": torch.zeros_like(x), "count": count}

    def descend_by_moments_(self, x: Tensor, gradient: Tensor, slots: Slots, rate: Rate) -> None:
        """Update the moments in place, and take the step `rate · m / (√v + eps)` with both of them corrected."""
        beta1, beta2 = float(self.beta1), float(self.beta2)
        mean, square, count = slots["mean"], slots["square"], slots["count"]
        count.add_(1)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (1 - beta2 ** count[:, None]).sqrt().to(x.dtype)
        size = (column(rate) / (1 - beta1 ** count[:, None])).to(x.dtype)
        x.sub_(mean.div(square.sqrt().div_(root).add_(float(self.eps))).mul_(size))


@register("adamw")
@dataclass(frozen=True)
class AdamW(ByMoments):
    """AdamW on the client's examples, like `torch.optim.AdamW`; moments and step count restart in every round.

    Step t is `w -= lr weight_decay w`, `m = beta1 m + (1 - beta1) g`, `v = beta2 v + (1 - beta2) g²`,
    `w -= lr (m / (1 - beta1ᵗ)) / (√(v / (1 - beta2ᵗ)) + eps)`.
    """

    weight_decay: Number = number(0.01, low=0, doc="pull towards zero, separate from the gradient")

    reference = "Loshchilov, Hutter: Decoupled Weight Decay Regularization, ICLR 2019"
    examples = ("adamw", "adamw(lr=3e-3, epochs=3)", "adamw(beta2=0.99, weight_decay=0, steps=5, batch=8)")
    refused = (
        ("adamw(epochs=1, steps=1)", "give epochs or steps, not both"),
        ("adamw(beta2=1)", r"allowed: a number in \[0, 1\)"),
        ("adamw(eps=0)", r"allowed: a number in \[1e-30, inf\)"),
        ("adamw(momentum=0.9)", "adamw has no key 'momentum'"),
    )

    def step_(self, x: Tensor, gradient: Tensor, slots: Slots, rate: Rate, active: Tensor | None = None) -> None:
        with only_active(active, x, *slots.values()):
            if self.weight_decay:
                x.mul_(1 - column(rate) * float(self.weight_decay))
            self.descend_by_moments_(x, gradient, slots, rate)


@register("adam")
@dataclass(frozen=True)
class Adam(ByMoments):
    """Adam on the client's examples, like `torch.optim.Adam`; moments and step count restart in every round.

    Step t is `g += weight_decay w`, `m = beta1 m + (1 - beta1) g`, `v = beta2 v + (1 - beta2) g²`,
    `w -= lr (m / (1 - beta1ᵗ)) / (√(v / (1 - beta2ᵗ)) + eps)`.
    """

    weight_decay: Number = number(0, low=0, doc="pull towards zero, added to the gradient")

    reference = "Kingma, Ba: Adam: A Method for Stochastic Optimization, ICLR 2015"
    examples = ("adam", "adam(lr=3e-3, epochs=3)", "adam(beta1=0, weight_decay=1e-4, steps=5, batch=8)")
    refused = (
        ("adam(epochs=1, steps=1)", "give epochs or steps, not both"),
        ("adam(beta1=-0.1)", r"allowed: a number in \[0, 1\)"),
        ("adam(lr=0)", r"allowed: a number in \(0, inf\)"),
        ("adam(decay=0.1)", "adam has no key 'decay'"),
    )

    def step_(self, x: Tensor, gradient: Tensor, slots: Slots, rate: Rate, active: Tensor | None = None) -> None:
        with only_active(active, x, *slots.values()):
            if self.weight_decay:
                gradient.add_(x, alpha=float(self.weight_decay))
            self.descend_by_moments_(x, gradient, slots, rate)
