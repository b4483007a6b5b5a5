"""Top-k: the k coordinates of largest magnitude, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcams.bits.positions import add_at_
from fedcams.bits.select import top_values
from fedcams.bits.vectors import row_norms
from fedcams.compress.base import Code, Compressor, Field
from fedcams.compress.budget import check_budget, kept
from fedcams.layout import Layout, segments
from fedcams.registry import Number, integer, number, register, text

BF16_MAX = torch.finfo(torch.bfloat16).max
BF16_ROUNDING = 2.0**-8
"""The largest relative change of a value by rounding to bfloat16: half a unit in the last place."""


@register("topk")
@dataclass(frozen=True)
class TopK(Compressor):
    """Keeps the k largest |x_i| of the whole vector or of each tensor; the lower index wins a tie.

    At most 1 - k/d of ‖x‖² is dropped. With bfloat16 values, up to u² of what is kept is lost too, u = 2⁻⁸.
    """

    ratio: Number | None = number(None, low=0, high=1, open="low", doc="kept fraction: k = max(1, floor(ratio·d))")
    k: int | None = integer(None, low=1, doc="kept coordinates, at most d; instead of ratio")
    values: str = text("f32", choices=("f32", "bf16"), doc="how kept values travel; the rounding stays in the residual")
    scope: str = text("global", choices=("global", "tensor"), doc="what the k largest are taken from")

    reference = "Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018"
    reveals_nonfinite = True  # infinity and NaN have the largest magnitudes
    examples = (
        "topk(ratio=1/64)",
        "topk(ratio=0.1, values=bf16)",
        "topk(k=3)",
        "topk(k=2, values=bf16, scope=tensor)",
    )
    refused = (
        ("topk", "give either ratio"),
        ("topk(ratio=1/2, k=3)", "give either ratio"),
        ("topk(ratio=0)", r"allowed: a number in \(0, 1\]"),
        ("topk(k=0)", r"allowed: an integer in \[1, inf\)"),
        ("topk(ratio=1/2, values=f16)", "did you mean 'bf16'"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.name, self.ratio, self.k)

    @property
    def per_tensor(self) -> bool:
        return self.scope == "tensor"

    def _kept(self, layout: Layout) -> list[int]:
        """Return how many coordinates are kept in each segment."""
        return [kept(self.ratio, self.k, stop - start) for start, stop in segments(layout, self.scope)]

    def fields(self, layout: Layout) -> dict[str, Field]:
        k = sum(self._kept(layout))
        return {"position": Field("index", k), "value": Field("bf16" if self.values == "bf16" else "f32", k)}

    def squared_error_bound(self, layout: Layout) -> float:
        parts = zip(segments(layout, self.scope), self._kept(layout), strict=True)
        dropped = max(1 - k / (stop - start) for (start, stop), k in parts)
        lost = BF16_ROUNDING**2 if self.values == "bf16" else 0.0
        return lost + (1 - lost) * dropped

    def compress(self, x: Tensor, layout: Layout, keys: Sequence[int]) -> Code:
        positions, values = top_values(x, segments(layout, self.scope), self._kept(layout))
        return {"position": positions, "value": _to_bf16(values) if self.values == "bf16" else values}

    def accumulate_(self, out: Tensor, code: Code, layout: Layout, weight: float) -> None:
        add_at_(out, code["position"], code["value"].float(), weight)

    def norms(self, code: Code, layout: Layout) -> Tensor:
        return row_norms(code["value"].float())


def _to_bf16(values: Tensor) -> Tensor:
    """Return the values rounded to bfloat16; those that would round to infinity become the largest bfloat16."""
    rounded = values.bfloat16()
    limit = torch.full_like(rounded, BF16_MAX).copysign(rounded)
    return torch.where(rounded.isinf() & values.isfinite(), limit, rounded)
