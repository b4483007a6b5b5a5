"""Block maximum: the coordinate of largest magnitude in every block of neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcams.bits.positions import add_at_
from fedcams.compress import Code, Compressor, Field
from fedcams.layout import Layout
from fedcams.registry import integer, register


@register("blockmax")
@dataclass(frozen=True)
class BlockMax(Compressor):
    """Keeps the largest |x_i| of each block.

    That is at least 1/block of the block's ‖x‖², so the bound is 1 - 1/block.
    """

    block: int = integer(32, low=1, doc="coordinates per block")

    reference = "an example"
    examples = ("blockmax", "blockmax(block=5)")
    refused = (("blockmax(block=0)", r"allowed: an integer in \[1, inf\)"),)

    def _blocks(self, layout: Layout) -> int:
        return -(-layout.d // self.block)

    def fields(self, layout: Layout) -> dict[str, Field]:
        k = self._blocks(layout)
        return {"position": Field("index", k), "value": Field("f32", k)}

    def squared_error_bound(self, layout: Layout) -> float:
        return 1 - 1 / min(self.block, layout.d)

    def compress(self, x: Tensor, layout: Layout, keys: Sequence[int]) -> Code:
        size = min(self.block, layout.d)
        padded = torch.nn.functional.pad(x.abs(), (0, -layout.d % size), value=-1.0)
        best = padded.unflatten(-1, (-1, size)).argmax(-1)
        position = best + size * torch.arange(best.shape[-1], device=x.device)
        return {"position": position, "value": x.gather(-1, position)}

    def accumulate_(self, out: Tensor, code: Code, layout: Layout, weight: float) -> None:
        add_at_(out, code["position"], code["value"], weight)
