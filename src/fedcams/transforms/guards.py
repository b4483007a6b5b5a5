"""Guards: what the server refuses from clients."""

from __future__ import annotations

from dataclasses import dataclass

from fedcams.registry import Number, number, register
from fedcams.transforms.base import Facts, Transform


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
