"""Exact top-k of many rows at once in torch operations: what a GPU runs in place of the kernels of `select`.

A sorted sample of each row gives two magnitudes around the k-th largest: what lies above both is kept, what lies below
both is not. Only the few coordinates between them are listed, and one stable sort orders these by row, magnitude and
position. A row whose sample misleads is sorted as a whole.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

MAGNITUDE = 0x7FFFFFFF  # without the sign, a float's bits sort like its absolute value
SHORT = 1 << 17
"""Rows up to this length are sorted as a whole."""
SAMPLE = 1 << 16
STRIDE = 0x9E3779B1
"""A prime near the golden section of 2^32: its multiples modulo any length spread evenly, and follow no shape."""
SPREADS = 4  # tolerance of a sampled rank, in standard deviations
MOST = 8
"""Up to 1/8 of a row between the two magnitudes is worth listing; beyond it, ties abound."""


def top_positions_torch(x: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest magnitudes of each row, `x [C, n]` -> int64 `[C, k]`, ascending.

    Ties go to the lower index. Works on any device.
    """
    magnitudes = x.contiguous().view(torch.int32) & MAGNITUDE
    if x.shape[-1] <= SHORT:
        return _by_sorting(magnitudes, k)
    return _by_sampling(magnitudes, k)


def _by_sorting(magnitudes: Tensor, k: int) -> Tensor:
    order = magnitudes.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :k].sort(dim=-1).values


def _by_sampling(magnitudes: Tensor, k: int) -> Tensor:
    rows, n = magnitudes.shape
    low, high = _around(magnitudes, k)
    kept = magnitudes > high
    between = ((magnitudes >= low) & ~kept).flatten().nonzero().squeeze(-1)
    starts = torch.searchsorted(between, n * torch.arange(rows + 1, device=between.device))
    missing = k - kept.sum(dim=-1)
    fits = (missing >= 0) & (missing <= starts.diff()) & (starts.diff() <= n // MOST)
    if not bool(fits.all()):  # some sample misled, or ties abound
        apart = [_by_sampling if fit else _by_sorting for fit in fits.tolist()]
        return torch.cat([find(magnitudes[i : i + 1], k) for i, find in enumerate(apart)])
    row = between // n
    order = ((row << 31) | (MAGNITUDE - magnitudes.flatten()[between])).sort(stable=True).indices
    place = torch.arange(len(between), device=between.device) - starts[row]  # of a row: sorting moves none to another
    kept.view(-1)[between[order[place < missing[row]]]] = True
    return kept.flatten().nonzero().view(rows, k) - n * torch.arange(rows, device=between.device)[:, None]


def _around(magnitudes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return two magnitudes around the k-th largest of each row, judged by a sample: `[C, n]` -> twice `[C, 1]`."""
    n = magnitudes.shape[-1]
    places = torch.arange(SAMPLE, device=magnitudes.device) * STRIDE % n
    ordered = magnitudes[:, places].sort(dim=-1, descending=True).values
    rank = k * SAMPLE / n
    spread = SPREADS * math.sqrt(rank * (1 - rank / SAMPLE)) + 1
    first, last = math.floor(rank - spread) - 1, math.ceil(rank + spread) - 1
    low = ordered[:, last, None] if last < SAMPLE else torch.zeros_like(ordered[:, :1])
    high = ordered[:, first, None] if first >= 0 else torch.full_like(ordered[:, :1], MAGNITUDE)
    return low, high
