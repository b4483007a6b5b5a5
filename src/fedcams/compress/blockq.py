"""Block quantiser: a few bits per coordinate, and one step size per block of neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.bits.levels import add_levels_, block_norms, most, quantise
from fedcams.bits.vectors import row_norms
from fedcams.compress.base import Code, Compressor, Field
from fedcams.errors import SpecError
from fedcams.layout import Layout
from fedcams.registry import integer, register, text

if TYPE_CHECKING:
    from torch import Tensor

BITS = (2, 3, 4, 8)
STEP_ROUNDING = 2.0**-7
"""The largest relative increase of a step by rounding up to bfloat16."""


@register("blockq")
@dataclass(frozen=True)
class BlockQ(Compressor):
    """Rounds each block to multiples of one step: its largest magnitude / 2^(bits-1), rounded up to bfloat16.

    Zero is a multiple, so no coordinate's error exceeds its magnitude or half a step, h. In a block of n coordinates
    with largest magnitude 1, the worst case is n - 1 coordinates of size h, all lost: ‖C(x)-x‖² <= (n-1)h² and
    ‖x‖² >= 1 + (n-1)h². (On one side the multiples stop one step short, so n - 1 coordinates of size 1 there may lose
    a step each.) With stochastic rounding, steps are wide enough for both sides and C(x) equals x in expectation, but
    there is no bound on its error.
    """

    bits: int = integer(4, low=2, high=8, doc="bits per coordinate: 2, 3, 4 or 8")
    block: int = integer(128, low=8, high=65536, doc="coordinates that share a step, a power of two")
    rounding: str = text("nearest", choices=("nearest", "stochastic"), doc="to the nearest multiple, or without bias")

    reference = (
        "Alistarh et al.: QSGD, NeurIPS 2017; Dettmers et al.: 8-bit Optimizers via Block-wise Quantization, 2022"
    )
    reveals_nonfinite = True  # in the step
    examples = (
        "blockq",
        "blockq(bits=2, block=8)",
        "blockq(bits=3, block=16)",
        "blockq(bits=8)",
        "blockq(rounding=stochastic)",
        "blockq(bits=8, block=64, rounding=stochastic)",
    )
    refused = (
        ("blockq(bits=5)", "bits=5; allowed: 2, 3, 4 or 8"),
        ("blockq(bits=1)", r"allowed: an integer in \[2, 8\]"),
        ("blockq(block=100)", "block=100; allowed: a power of two"),
        ("blockq(rounding=up)", "allowed: nearest or stochastic"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in BITS:
            raise SpecError(f"blockq: bits={self.bits}; allowed: 2, 3, 4 or 8")
        if self.block & (self.block - 1):
            raise SpecError(f"blockq: block={self.block}; allowed: a power of two, 8 to 65536")

    def fields(self, layout: Layout) -> dict[str, Field]:
        return {"step": Field("bf16", -(-layout.d // self.block)), "level": Field("packed", layout.d, self.bits)}

    def squared_error_bound(self, layout: Layout) -> float | None:
        if self.unbiased:
            return None
        others, step = min(self.block, layout.d) - 1, (1 + STEP_ROUNDING) / most(self.bits)
        small, first = others * step**2 / 4, min(STEP_ROUNDING, step / 2) ** 2  # the largest itself is rounded too
        return max((small + first) / (1 + small), (others * step**2 + first) / (1 + others))

    @property
    def unbiased(self) -> bool:
        return self.rounding == "stochastic"

    def compress(self, x: Tensor, layout: Layout, keys: Sequence[int]) -> Code:
        seeds = torch.tensor([[key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF] for key in keys]) if self.unbiased else None
        steps, levels = quantise(x, self.bits, self.block, seeds)
        return {"step": steps, "level": levels}

    def accumulate_(self, out: Tensor, code: Code, layout: Layout, weight: float) -> None:
        add_levels_(out, code["level"], code["step"], self.bits, self.block, weight)

    def norms(self, code: Code, layout: Layout) -> Tensor:
        return row_norms(block_norms(code["level"], code["step"], self.bits, self.block, layout.d))
