"""Exact top-k of many rows at once in torch operations: what a GPU runs in place of the kernels of `select`.

A sorted sample of each row tells a magnitude that a few more than k of it reach. All rows' coordinates that do are
listed by one operation, and one stable sort orders these few by row, magnitude and position. A row whose sample
misleads is sorted as a whole.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAGNITUDE = 0x7FFFFFFF  # a float's bits without the sign order as its absolute value does
SHORT = 1 << 17
"""Rows up to this length are sorted as a whole."""
SAMPLE = 1 << 16
STRIDE = 0x9E3779B1
"""A prime near the golden section of 2^32: its multiples modulo any length spread evenly, and follow no shape."""
SPREADS = 4  # standard deviations of a sampled rank that are allowed for
MOST = 2
"""At most so many times k coordinates are worth listing; beyond it, ties abound."""


def top_positions_torch(x: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest magnitudes of each row, `x [C, n]` -> int64 `[C, k]`, ascending.

    Ties go to the lower index. Works on any device.
    """
    magnitudes = x.contiguous().view(torch.int32) & MAGNITUDE
    if x.shape[-1] <= SHORT or MOST * k >= x.shape[-1]:
        return _by_sorting(magnitudes, k)
    return _by_sampling(magnitudes, k)


def _by_sorting(magnitudes: Tensor, k: int) -> Tensor:
    order = magnitudes.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :k].sort(dim=-1).values


def _by_sampling(magnitudes: Tensor, k: int) -> Tensor:
    rows, n = magnitudes.shape
    hits = (magnitudes >= _reached(magnitudes, k)).flatten().nonzero().squeeze(-1)
    starts = torch.searchsorted(hits, n * torch.arange(rows + 1, device=hits.device))
    counts = starts.diff()
    if not bool(((counts >= k) & (counts <= MOST * k)).all()):  # some sample misled, or ties abound
        apart = [_by_sampling if k <= count <= MOST * k else _by_sorting for count in counts.tolist()]
        return torch.cat([find(magnitudes[i : i + 1], k) for i, find in enumerate(apart)])
    row = hits // n
    order = ((row << 31) | (MAGNITUDE - magnitudes.flatten()[hits])).sort(stable=True).indices
    kept = torch.zeros_like(hits, dtype=torch.bool)
    kept[order[starts[:-1, None] + torch.arange(k, device=hits.device)]] = True
    return hits[kept].view(rows, k) - n * torch.arange(rows, device=hits.device)[:, None]


def _reached(magnitudes: Tensor, k: int) -> Tensor:
    """A magnitude that by a sample a few more than k of each row reach: `[C, n]` -> `[C, 1]`."""
    n = magnitudes.shape[-1]
    places = torch.arange(SAMPLE, device=magnitudes.device) * STRIDE % n
    rank = k * SAMPLE / n
    place = min(SAMPLE, math.ceil(rank + SPREADS * math.sqrt(rank) + 1)) - 1
    return magnitudes[:, places].sort(dim=-1, descending=True).values[:, place, None]
