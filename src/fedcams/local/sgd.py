"""Local training by stochastic gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.errors import SpecError
from fedcams.local.base import (
    Local,
    Rate,
    Slots,
    batch_field,
    descend_,
    drop_last_field,
    epochs_field,
    only_active,
    replace_field,
    steps_field,
)
from fedcams.registry import Number, flag, number, register

if TYPE_CHECKING:
    from torch import Tensor


@register("sgd")
@dataclass(frozen=True)
class SGD(Local):
    """SGD on the client's examples, in a new random order every epoch, or drawn with replacement (`replace`).

    A step is `g = ∇f(w) + prox (w - w₀)`, scaled down to norm `clip`, then `g += weight_decay w`,
    `u = momentum u + g`, `w -= lr u`; w₀ is the model received and u starts at zero in every round. With `nesterov`,
    the last step is `w -= lr (g + momentum u)`.
    """

    lr: Number = number(0.01, low=0, open="low", doc="local learning rate")
    momentum: Number = number(0, low=0, high=1, open="high", doc="the weight of the last direction in the new one")
    weight_decay: Number = number(0, low=0, doc="pull towards zero")
    clip: Number | None = number(None, low=0, open="low", doc="largest norm of a gradient; none: no limit")
    prox: Number = number(0, low=0, doc="FedProx: pull towards the model received")
    nesterov: bool = flag(False, doc="Nesterov's look-ahead step; needs momentum")
    epochs: int | None = epochs_field()
    steps: int | None = steps_field()
    batch: int = batch_field()
    drop_last: bool = drop_last_field()
    replace: bool = replace_field()

    reference = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017; prox: Li et al., 2020"
    examples = (
        "sgd",
        "sgd(lr=0.05, epochs=3)",
        "sgd(momentum=0.9, weight_decay=1e-4, steps=5, batch=8)",
        "sgd(momentum=0.9, nesterov=true)",
        "sgd(clip=1, prox=0.1, drop_last=true)",
        "sgd(steps=3, batch=4, replace=true)",
    )
    refused = (
        ("sgd(epochs=1, steps=1)", "give epochs or steps, not both"),
        ("sgd(lr=0)", r"allowed: a number in \(0, inf\)"),
        ("sgd(batch=0)", r"allowed: an integer in \[1, inf\)"),
        ("sgd(epoch=3)", "did you mean 'epochs'"),
        ("sgd(nesterov=true)", "nesterov=true: momentum is 0; give momentum=0.9, or leave nesterov out"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise SpecError("sgd: nesterov=true: momentum is 0; give momentum=0.9, or leave nesterov out")

    @property
    def is_plain(self) -> bool:
        """Whether a step is exactly `x -= rate·gradient`: no momentum, weight decay, clipping or prox."""
        return not (self.momentum or self.weight_decay or self.prox or self.clip is not None)

    def init(self, x: Tensor) -> Slots:
        slots = {}
        if self.momentum:
            slots["direction"] = torch.zeros_like(x)
        if self.prox:
            slots["received"] = x.detach().clone()
        return slots

    def step_(self, x: Tensor, gradient: Tensor, slots: Slots, rate: Rate, active: Tensor | None = None) -> None:
        with only_active(active, x, *(slots[name] for name in ("direction",) if name in slots)):
            if self.prox:
                gradient.add_(x - slots["received"], alpha=float(self.prox))
            if self.clip is not None:  # as torch.nn.utils.clip_grad_norm_ does
                gradient.mul_((float(self.clip) / (self.norms(gradient) + 1e-6)).clamp_(max=1.0))
            if self.weight_decay:
                gradient.add_(x, alpha=float(self.weight_decay))
            if self.momentum:
                direction = slots["direction"].mul_(float(self.momentum)).add_(gradient)
                gradient = gradient.add_(direction, alpha=float(self.momentum)) if self.nesterov else direction
            descend_(x, gradient, rate)
