"""Random-k: k coordinates drawn from a seed; the seed travels instead of the positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedcams.bits.positions import SEED_BITS, add_at_, sample_positions, take_at
from fedcams.bits.vectors import row_norms
from fedcams.compress.base import Code, Field
from fedcams.compress.budget import Sparse
from fedcams.layout import Layout
from fedcams.registry import flag, register

if TYPE_CHECKING:
    from torch import Tensor

F32_MAX = float(np.finfo(np.float32).max)


@register("randk")
@dataclass(frozen=True)
class RandK(Sparse):
    """Keeps k coordinates drawn uniformly without replacement; in expectation 1 - k/d of ‖x‖² is dropped.

    With `scaled=true` the kept values are multiplied by d/k: C is then unbiased, but no longer contractive.
    """

    scaled: bool = flag(False, doc="multiply by d/k: unbiased, without a contraction")

    reference = "Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018"
    in_expectation = True
    examples = ("randk(ratio=1/16)", "randk(k=3)", "randk(ratio=0.5, scaled=true)")
    refused = (
        ("randk", "give either ratio"),
        ("randk(ratio=2)", r"allowed: a number in \(0, 1\]"),
        ("randk(k=1, scaled=1)", "allowed: true or false"),
    )

    def _kept(self, layout: Layout) -> int:
        return sum(self.kept(layout, "global"))

    def fields(self, layout: Layout) -> dict[str, Field]:
        return {"seed": Field("uint", 1, bits=SEED_BITS), "value": Field("f32", self._kept(layout))}

    def squared_error_bound(self, layout: Layout) -> float | None:
        return None if self.scaled else 1 - self._kept(layout) / layout.d

    @property
    def unbiased(self) -> bool:
        return self.scaled

    @property
    def never_lengthens(self) -> bool:
        return not self.scaled

    def compress(self, x: Tensor, layout: Layout, keys: Sequence[int]) -> Code:
        seeds = torch.tensor([key % (1 << SEED_BITS) for key in keys], device=x.device)
        k = self._kept(layout)
        values = take_at(x, sample_positions(seeds, k, layout.d))
        if self.scaled:
            values = (values * (layout.d / k)).clamp(-F32_MAX, F32_MAX)
        return {"seed": seeds[:, None], "value": values}

    def accumulate_(self, out: Tensor, code: Code, layout: Layout, weight: float) -> None:
        positions = sample_positions(code["seed"][:, 0], code["value"].shape[-1], layout.d)
        add_at_(out, positions, code["value"], weight)

    def norms(self, code: Code, layout: Layout) -> Tensor:
        return row_norms(code["value"])
