"""The sum of clipped rows, in which no client counts for more than the bound."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams.bits.vectors import row_norms
from fedcams.compress import Code, Compressor
from fedcams.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

Vector = NDArray[np.float64]
AT_ONCE = 1 << 22
"""Coordinates that are decoded at a time."""


class ClippedSum:
    """Adds decoded rows, each clipped to the norm `bound`, in ascending client id and in float64.

    In float32, the rounding of a long sum could let one client count for more than the bound. With `in_order` rows
    arrive in ascending client id and are added at once; otherwise they are kept until the end.
    """

    def __init__(self, layout: Layout, bound: float, in_order: bool = False) -> None:
        self.layout, self.bound, self.in_order = layout, bound, in_order
        self._total = torch.zeros(layout.d, dtype=torch.float64)
        self._waiting: dict[int, Tensor] = {}

    def add(self, ids: tuple[int, ...], codec: Compressor, code: Code) -> None:
        """Add what these clients sent, tensors `[C, columns]`; a few rows are decoded at a time."""
        step = max(1, AT_ONCE // self.layout.d)
        for start in range(0, len(ids), step):
            part = {name: tensor[start : start + step] for name, tensor in code.items()}
            rows = codec.decode(part, self.layout).cpu()
            if self.in_order:
                self._add(rows)
            else:
                self._waiting |= dict(zip(ids[start : start + step], rows, strict=True))

    def _add(self, rows: Tensor) -> None:
        for row, norm in zip(rows, row_norms(rows).tolist(), strict=True):
            self._total.add_(row, alpha=1.0 if norm <= self.bound else self.bound / norm)

    def total(self) -> Vector:
        """Return the sum `[d]` of all rows so far."""
        for client in sorted(self._waiting):
            self._add(self._waiting.pop(client)[None])
        return self._total.numpy()


def digest(total: Vector) -> bytes:
    """Return a digest of a sum, which decides its noise: another sum gets unrelated noise."""
    return hashlib.blake2b(np.ascontiguousarray(total).tobytes(), digest_size=32).digest()
