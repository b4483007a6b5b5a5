"""Scaled sign: one bit per coordinate, and one magnitude."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.bits.signs import abs_sums, add_signs_, pack_signs
from fedcams.bits.vectors import row_norms
from fedcams.compress.base import Code, Compressor, Field
from fedcams.layout import Layout, segments
from fedcams.registry import register, text

if TYPE_CHECKING:
    from torch import Tensor


@register("sign")
@dataclass(frozen=True)
class Sign(Compressor):
    """Sends C(x) = ‖x‖₁/d · sign(x), with one scale for the whole vector or one per tensor; zero counts as positive.

    ‖C(x)-x‖² is exactly ‖x‖² - ‖x‖₁²/d, and ‖x‖₁ >= ‖x‖₂, so the bound is 1 - 1/d.
    """

    scope: str = text("global", choices=("global", "tensor"), doc="what shares one scale")

    reference = "Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD, ICML 2019"
    reveals_nonfinite = True  # in the scale
    examples = ("sign", "sign(scope=tensor)")
    refused = (("sign(scope=layer)", "allowed: global or tensor"), ("sign(scale=1)", "no key 'scale'"))

    @property
    def per_tensor(self) -> bool:
        return self.scope == "tensor"

    def fields(self, layout: Layout) -> dict[str, Field]:
        return {"scale": Field("f32", len(segments(layout, self.scope))), "sign": Field("sign", layout.d)}

    def squared_error_bound(self, layout: Layout) -> float:
        return 1 - 1 / max(stop - start for start, stop in segments(layout, self.scope))

    @property
    def never_lengthens(self) -> bool:
        return True  # ‖x‖₁/√d <= ‖x‖, in every segment

    def compress(self, x: Tensor, layout: Layout, keys: Sequence[int]) -> Code:
        parts = segments(layout, self.scope)
        sizes = torch.tensor([stop - start for start, stop in parts], dtype=torch.float64, device=x.device)
        bits, total = pack_signs(x)
        sums = total[:, None] if self.scope == "global" else abs_sums(x, parts)
        return {"scale": (sums / sizes).float(), "sign": bits}

    def accumulate_rows_(self, out: Tensor, code: Code, layout: Layout, weights: Sequence[float]) -> None:
        factors = torch.tensor(weights, dtype=torch.float32, device=out.device)[:, None]
        add_signs_(out, code["sign"], segments(layout, self.scope), code["scale"] * factors)

    def accumulate_(self, out: Tensor, code: Code, layout: Layout, weight: float) -> None:
        add_signs_(out, code["sign"], segments(layout, self.scope), code["scale"] * weight)

    def norms(self, code: Code, layout: Layout) -> Tensor:
        roots = [math.sqrt(stop - start) for start, stop in segments(layout, self.scope)]
        return row_norms(code["scale"].double() * torch.tensor(roots, dtype=torch.float64, device=code["scale"].device))
