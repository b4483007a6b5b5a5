"""Identity: every coordinate as float32. The uncompressed baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedcams.bits.vectors import row_norms
from fedcams.compress.base import Code, Compressor, Field
from fedcams.layout import Layout
from fedcams.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("identity")
@dataclass(frozen=True)
class Identity(Compressor):
    """Sends all coordinates as float32: C(x) = x."""

    reveals_nonfinite = True
    examples = ("identity",)

    def fields(self, layout: Layout) -> dict[str, Field]:
        return {"values": Field("f32", layout.d)}

    def squared_error_bound(self, layout: Layout) -> float:
        return 0.0

    @property
    def never_lengthens(self) -> bool:
        return True

    def compress(self, x: Tensor, layout: Layout, keys: Sequence[int]) -> Code:
        return {"values": x.clone()}

    def accumulate_(self, out: Tensor, code: Code, layout: Layout, weight: float) -> None:
        out.add_(code["values"], alpha=weight)

    def norms(self, code: Code, layout: Layout) -> Tensor:
        return row_norms(code["values"])


IDENTITY = Identity()
"""The codec of what travels uncompressed: dense models and buffers."""
