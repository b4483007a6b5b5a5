"""How many coordinates a sparse compressor keeps: a fraction (`ratio`) or a number (`k`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedcams.compress.base import Compressor
from fedcams.errors import SpecError
from fedcams.layout import Layout, segments
from fedcams.registry import Number, exact, integer, number


@dataclass(frozen=True)
class Sparse(Compressor):
    """The base class of topk, ternary and randk; give either `ratio` or `k`."""

    ratio: Number | None = number(None, low=0, high=1, open="low", doc="kept fraction: k = max(1, floor(ratio·d))")
    k: int | None = integer(None, low=1, doc="kept coordinates, at most d; instead of ratio")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.ratio is None) == (self.k is None):
            known = f"ratio={self.ratio}, k={self.k}"
            raise SpecError(f"{self.name}: {known}: give either ratio, such as {self.name}(ratio=1/64), or k")

    def kept(self, layout: Layout, scope: str) -> list[int]:
        """Return how many coordinates of each segment are kept: exactly max(1, floor(ratio·size)), or min(k, size)."""
        sizes = [stop - start for start, stop in segments(layout, scope)]
        if self.k is not None:
            return [min(self.k, size) for size in sizes]
        return [max(1, math.floor(exact(self.ratio or 0) * size)) for size in sizes]
