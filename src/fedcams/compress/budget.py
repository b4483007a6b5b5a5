"""How many coordinates a sparse compressor keeps: a fraction (`ratio`) or a number (`k`)."""

from __future__ import annotations

import math

from fedcams.errors import SpecError
from fedcams.registry import Number, exact


def check_budget(name: str, ratio: Number | None, k: int | None) -> None:
    """Refuse a spec of the compressor `name` that gives both `ratio` and `k`, or neither."""
    if (ratio is None) == (k is None):
        raise SpecError(f"{name}: ratio={ratio}, k={k}: give either ratio, such as {name}(ratio=1/64), or k")


def kept(ratio: Number | None, k: int | None, size: int) -> int:
    """Return how many of `size` coordinates are kept: the exact max(1, floor(ratio·size)), or min(k, size)."""
    if k is not None:
        return min(k, size)
    return max(1, math.floor(exact(ratio or 0) * size))
