"""How many coordinates a sparse compressor keeps: a fraction of them (`ratio`) or a number (`k`)."""

from __future__ import annotations

import math

from fedcams.errors import SpecError
from fedcams.registry import Number, exact


def check_budget(name: str, ratio: Number | None, k: int | None) -> None:
    """Refuses both and neither."""
    if (ratio is None) == (k is None):
        raise SpecError(f"{name}: ratio={ratio}, k={k}: give either ratio, such as {name}(ratio=1/64), or k")


def kept(ratio: Number | None, k: int | None, size: int) -> int:
    """k for a vector of that size: max(1, floor(ratio·size)), exactly, or the given k but at most the size."""
    if k is not None:
        return min(k, size)
    return max(1, math.floor(exact(ratio or 0) * size))
