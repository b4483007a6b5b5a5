"""Limits on the norm of a client's update: `clip` scales it down at the client, `max_norm` refuses it at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedcams.bits.vectors import row_norms
from fedcams.layout import Layout
from fedcams.registry import Number, number, register
from fedcams.transforms.base import Facts, Transform

if TYPE_CHECKING:
    from torch import Tensor


@register("clip")
@dataclass(frozen=True)
class Clip(Transform):
    """Scales a client's update down to the L2 norm `norm` if it is longer: Δ min(1, norm/‖Δ‖).

    Shorter updates stay the same, bit for bit. Updates that are not finite are left alone, and the server refuses them.
    """

    norm: Number = number(low=0, open="low", doc="largest L2 norm of an update")

    reference = "McMahan et al.: Learning Differentially Private Recurrent Language Models, ICLR 2018"
    examples = ("clip(norm=1)", "clip(norm=linear(start=10, end=1))")
    refused = (("clip(norm=0)", r"allowed: a number in \(0, inf\)"), ("clip(1, 2)", "at most 1 values"))

    def update_(self, rows: Tensor, facts: Facts, layout: Layout) -> None:
        clip_rows_(rows, float(self.norm))


@register("max_norm")
@dataclass(frozen=True)
class MaxNorm(Transform):
    """Refuses an update whose decoded norm is above `bound`; the client keeps its residual."""

    bound: Number = number(low=0, open="low", doc="largest L2 norm of an accepted update")

    reads_norm = True
    examples = ("max_norm(bound=10)",)
    refused = (("max_norm(bound=0)", r"allowed: a number in \(0, inf\)"), ("max_norm", "bound is missing"))

    def refuses(self, norm: float, facts: Facts) -> str:
        bound = float(self.bound)
        return "" if norm <= bound else f"an update of norm {norm:.6g}; at most max_norm={bound:g} is accepted"


def clip_rows_(rows: Tensor, bound: float) -> None:
    """Shorten the rows `[C, d]` that are longer than `bound` to it, in place; leave those that are not finite alone."""
    norms = row_norms(rows).nan_to_num(nan=0.0, posinf=0.0)
    rows.mul_((bound / norms.clamp(min=bound)).to(rows.dtype)[:, None])
