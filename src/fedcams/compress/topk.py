"""Top-k: the k coordinates of largest magnitude, exactly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.bits.classes import class_sizes, signed_means, split_at_means
from fedcams.bits.levels import BF16_MAX
from fedcams.bits.positions import add_at_
from fedcams.bits.select import top_values
from fedcams.bits.vectors import row_norms
from fedcams.compress.base import Code, Field
from fedcams.compress.budget import Sparse
from fedcams.compress.magnitudes import check_magnitudes
from fedcams.layout import Layout, segments
from fedcams.registry import register, text

if TYPE_CHECKING:
    from torch import Tensor

BF16_ROUNDING = 2.0**-8
"""The largest relative change of a value by rounding to bfloat16: half a unit in the last place."""


@register("topk")
@dataclass(frozen=True)
class TopK(Sparse):
    """Keeps the k largest |x_i| of the whole vector or of each tensor; the lower index wins a tie.

    At most 1 - k/d of ‖x‖² is dropped. With bfloat16 values, up to u² of what is kept is lost too, u = 2⁻⁸.

    Values of 4 or 2 bits (`b4`, `b2`) are a sign and one of 8 or 2 classes of magnitude, and each class travels as its
    mean: what is kept is split at its mean, the two halves at theirs, and so on. Without a split this is `ternary` with
    one magnitude per `scope`, and a split makes the error no larger, because (a+b)²/(m+n) <= a²/m + b²/n for the sums
    a, b of m and n magnitudes. So the bound is that of `ternary`, 1 - min(k/d, 1/k), which is weak. Measurements are
    much better: for Gaussian coordinates at ratio=1/16, `b2` loses 1% of the ‖x‖² that is kept, and `b4` 0.1%.
    """

    values: str = text(
        "f32", choices=("f32", "bf16", "b4", "b2"), doc="how kept values travel; the rounding stays in the residual"
    )
    scope: str = text("global", choices=("global", "tensor"), doc="what the k largest are taken from")

    reference = "Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018"
    reveals_nonfinite = True  # infinity and NaN have the largest magnitudes
    examples = (
        "topk(ratio=1/64)",
        "topk(ratio=0.1, values=bf16)",
        "topk(k=3)",
        "topk(k=2, values=bf16, scope=tensor)",
        "topk(ratio=1/16, values=b4)",
        "topk(ratio=0.2, values=b2, scope=tensor)",
    )
    refused = (
        ("topk", "give either ratio"),
        ("topk(ratio=1/2, k=3)", "give either ratio"),
        ("topk(ratio=0)", r"allowed: a number in \(0, 1\]"),
        ("topk(k=0)", r"allowed: an integer in \[1, inf\)"),
        ("topk(ratio=1/2, values=f16)", "did you mean 'bf16'"),
    )

    @property
    def per_tensor(self) -> bool:
        return self.scope == "tensor"

    def fields(self, layout: Layout) -> dict[str, Field]:
        counts = self.kept(layout, self.scope)
        k, bits = sum(counts), self._bits
        if not bits:
            return {"position": Field("index", k), "value": Field("bf16" if self.values == "bf16" else "f32", k)}
        means = Field("f32", len(counts) << (bits - 1))
        return {"position": Field("index", k), "level": Field("packed", k, bits), "magnitude": means}

    @property
    def _bits(self) -> int:
        """Return the bits of a value that travels as a sign and a class; 0 if values are reals."""
        return {"b4": 4, "b2": 2}.get(self.values, 0)

    def squared_error_bound(self, layout: Layout) -> float:
        parts = zip(segments(layout, self.scope), self.kept(layout, self.scope), strict=True)
        shares = [(k, k / (stop - start)) for (start, stop), k in parts]
        if self._bits:
            return 1 - min(min(share, 1 / k) for k, share in shares)
        dropped = max(1 - share for _, share in shares)
        lost = BF16_ROUNDING**2 if self.values == "bf16" else 0.0
        return lost + (1 - lost) * dropped

    @property
    def never_lengthens(self) -> bool:
        return self.values != "bf16"  # it rounds up too; all others are projections

    def compress(self, x: Tensor, layout: Layout, keys: Sequence[int]) -> Code:
        positions, values = top_values(x, segments(layout, self.scope), self.kept(layout, self.scope))
        if not self._bits:
            return {"position": positions, "value": _to_bf16(values) if self.values == "bf16" else values}
        levels, means = split_at_means(values, self._bounds(layout, values), self._bits)
        return {"position": positions, "level": levels, "magnitude": means.flatten(1)}

    def _bounds(self, layout: Layout, rows: Tensor) -> Tensor:
        """Return where what is kept of each segment starts and ends, for every one of the rows: int64 `[C, S + 1]`."""
        ends = list(itertools.accumulate(self.kept(layout, self.scope), initial=0))
        return torch.tensor(ends, device=rows.device).repeat(len(rows), 1)

    def _values(self, code: Code, layout: Layout) -> Tensor:
        """Return the kept values as the receiver has them, float32 `[C, k]`."""
        if not self._bits:
            return code["value"].float()
        means = code["magnitude"].unflatten(-1, (-1, 1 << (self._bits - 1)))
        bounds, k = self._bounds(layout, means), code["position"].shape[-1]
        return signed_means(code["level"], self._bits, means, bounds, k)

    def accumulate_(self, out: Tensor, code: Code, layout: Layout, weight: float) -> None:
        add_at_(out, code["position"], self._values(code, layout), weight)

    def norms(self, code: Code, layout: Layout) -> Tensor:
        return row_norms(self._values(code, layout))

    def check_code(self, code: Code, layout: Layout) -> None:
        if self._bits:
            levels = code["level"][None]
            counts = class_sizes(levels, self._bits, self._bounds(layout, levels), code["position"].numel())
            check_magnitudes(code["magnitude"], counts.flatten())


def _to_bf16(values: Tensor) -> Tensor:
    """Return the values rounded to bfloat16; those that would round to infinity become the largest bfloat16."""
    rounded = values.bfloat16()
    limit = torch.full_like(rounded, BF16_MAX).copysign(rounded)
    return torch.where(rounded.isinf() & values.isfinite(), limit, rounded)
