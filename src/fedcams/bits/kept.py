"""What is kept of a vector as signs and means: the mean magnitude of each tensor's part, and adding it back.

Positions `[C, k]` ascend, so what is kept of a segment of the vector, such as a tensor, lies together: a *group*. Its
mean does not depend on the order of summation, bit for bit, because integers are added. With the largest magnitude of
the group between 2^e and 2^(e+1), each magnitude counts in whole units of 2^(e-23-up); the rest is cut off. There are
fewer than 2^(39-up) magnitudes, each below 2^(24+up) units, so the sum stays below 2^63. For a million kept coordinates
a unit is 2^-42 of the group's largest magnitude, far below what rounding to float32 changes.

Each function has a kernel for one row on the CPU and a batched torch version for any other device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams.bits.packing import unpack_bools
from fedcams.bits.parallel import kernel, map_ranges, map_threads

if TYPE_CHECKING:
    from torch import Tensor

Segments = Sequence[tuple[int, int]]
Vector = NDArray[np.float32]
Words = NDArray[np.uint32]
Positions = NDArray[np.int64]
MAGNITUDE = 0x7FFFFFFF
INFINITE = 0x7F800000
FRACTION = 0x7FFFFF
PIECE = 1 << 18
"""Coordinates that stay in the cache while all rows are added."""
SPARE_BITS = 39  # of 63, above the 24 of a float's fraction


def group_bounds(positions: Tensor, segments: Segments) -> Tensor:
    """Return where each segment's group starts among positions `[C, k]`, and where the last ends: int64 `[C, S + 1]`.

    The segments lie end to end.
    """
    cuts = [start for start, _ in segments] + [segments[-1][1]]
    if positions.device.type != "cpu":
        wanted = torch.tensor(cuts, device=positions.device)
        return torch.searchsorted(positions, wanted.repeat(len(positions), 1))
    out = torch.empty(len(positions), len(cuts), dtype=torch.int64)
    for found, row in zip(out.numpy(), positions.numpy(), strict=True):
        found[:] = row.searchsorted(cuts)  # every payload needs this, and torch is slow to call
    return out


# -- means -----------------------------------------------------------------------------------------------------------


def group_means(values: Tensor, bounds: Tensor) -> Tensor:
    """Return the mean of |values| of each group, +0.0 where it is empty: `[C, k]`, `[C, S + 1]` -> float32 `[C, S]`.

    Infinity and NaN in a group make its mean infinite.
    """
    if values.device.type != "cpu":
        return group_means_torch(values, bounds, bounds.diff(dim=-1).clamp(min=1))
    rows = zip(values.numpy().view(np.uint32), bounds.numpy(), strict=True)
    return torch.from_numpy(np.stack([_means(*row) for row in rows]))


def _means(words: Words, cuts: Positions) -> Vector:
    up = spare_bits(words.size)
    largest = np.max(map_ranges(words.size, lambda a, b: _largest(words, cuts, a, b)), axis=0)
    exponents = np.maximum(largest >> 23, 1)
    units = np.sum(map_ranges(words.size, lambda a, b: _units(words, cuts, exponents, up, a, b)), axis=0)
    return finish_means(largest, units, up, np.maximum(np.diff(cuts), 1))


def spare_bits(k: int) -> int:
    """Return by how many bits the largest magnitude of a group of k at most may be shifted up."""
    return SPARE_BITS - k.bit_length()


def finish_means(largest: Positions, units: Positions, up: int, counts: Positions) -> Vector:
    """Return means as float32 from the bits of the largest magnitudes, the sums of units and the counts, any shape."""
    exponents = np.maximum(largest >> 23, 1)
    means = np.ldexp(units.astype(np.float64), exponents - 150 - up) / counts
    return np.where(largest >= INFINITE, np.inf, means).astype(np.float32)


@kernel
def _largest(words: Words, cuts: Positions, first: int, last: int) -> NDArray[np.int64]:
    """The largest magnitude of each group among the words from `first` to `last`."""
    out = np.zeros(cuts.size - 1, np.int64)
    for group in range(out.size):
        part = words[max(first, cuts[group]) : max(first, min(last, cuts[group + 1]))]
        top = np.uint32(0)
        for i in range(part.size):
            top = max(top, part[i] & np.uint32(MAGNITUDE))
        out[group] = top
    return out


@kernel
def _units(
    words: Words, cuts: Positions, exponents: NDArray[np.int64], up: int, first: int, last: int
) -> NDArray[np.int64]:
    """The sum of each group's magnitudes from `first` to `last`, in units of 2^(exponent - 150 - up).

    The exponent of what is below 2^-126 is 1 too, without the leading bit.
    """
    out = np.zeros(exponents.size, np.int64)
    for group in range(out.size):
        part = words[max(first, cuts[group]) : max(first, min(last, cuts[group + 1]))]
        total = np.int64(0)
        for i in range(part.size):
            word = np.int64(part[i]) & np.int64(MAGNITUDE)
            own = word >> np.int64(23)
            fraction = (word & np.int64(FRACTION)) | (np.int64(own > 0) << np.int64(23))
            total += (fraction << up) >> min(exponents[group] - max(own, np.int64(1)), np.int64(63))
        out[group] = total
    return out


def group_means_torch(values: Tensor, bounds: Tensor, counts: Tensor) -> Tensor:
    """The same in torch operations, on any device.

    `counts [C, S]`, 1 or more, says how many of each group count; the others are zero.
    """
    k = values.shape[-1]
    largest = _largest_torch(values, bounds)
    exponents = (largest >> 23).clamp(min=1)
    words = (values.view(torch.int32) & MAGNITUDE).long()
    own = words >> 23
    fraction = (words & FRACTION) | ((own > 0).long() << 23)
    units = (fraction << spare_bits(k)) >> (exponents.gather(-1, group_of_each(bounds, k)) - own.clamp(min=1)).clamp(
        max=63
    )
    unit = (exponents - 150 - spare_bits(k) + 1023 << 52).view(torch.float64)  # a power of two, by its bits
    means = sums_between(units, bounds).double() * unit / counts
    return torch.where(largest >= INFINITE, torch.inf, means).float()


def _largest_torch(values: Tensor, bounds: Tensor) -> Tensor:
    """The bits of the largest magnitude of each group: int64 `[C, S]`; NaN counts as largest."""
    rows, k = values.shape
    starts = bounds[:, :-1] + k * torch.arange(rows, device=values.device)[:, None]
    offsets = torch.nn.functional.pad(starts.flatten(), (0, 1), value=rows * k)
    largest = torch.segment_reduce(values.abs().flatten(), "max", offsets=offsets, initial=0.0, unsafe=True)
    return (largest.view(torch.int32) & MAGNITUDE).long().view(rows, -1)


def group_of_each(bounds: Tensor, k: int) -> Tensor:
    """Return the group of each kept coordinate: `[C, S + 1]` -> int64 `[C, k]`."""
    places = torch.arange(k, device=bounds.device).repeat(len(bounds), 1)
    return torch.searchsorted(bounds[:, 1:].contiguous(), places, right=True)


def sums_between(units: Tensor, bounds: Tensor) -> Tensor:
    """Return the sums of integers over each group, `[C, k]` -> `[C, S]`, as differences of a running sum that may wrap.

    The sum runs through all rows, because a GPU is slow at summing a few long rows.
    """
    running = torch.nn.functional.pad(units.flatten().cumsum(0), (1, 0))
    first = torch.arange(len(units), device=units.device)[:, None] * units.shape[-1]
    sums: Tensor = running[bounds + first].diff(dim=-1)
    return sums


# -- adding back -----------------------------------------------------------------------------------------------------


def add_signs_at_(out: Tensor, positions: Tensor, bits: Tensor, bounds: Tensor, magnitudes: Tensor) -> None:
    """Add `±magnitudes [C, S]`, one per group, to `out [C, d]` at positions `[C, k]` in place; `bits` has the signs."""
    if out.device.type != "cpu":
        return add_signs_at_torch_(out, positions, bits, bounds, magnitudes)
    rows = zip(out.numpy(), positions.numpy(), bits.numpy(), bounds.numpy(), magnitudes.numpy(), strict=True)
    for row, places, signs, cuts, sizes in rows:
        _add_row_(row, places, signs, cuts, sizes)


def _add_row_(out: Vector, positions: Positions, bits: NDArray[np.uint8], cuts: Positions, sizes: Vector) -> None:
    map_ranges(positions.size, lambda a, b: _add_(out, positions, bits, cuts, sizes, a, b))


@kernel
def _add_(
    out: Vector, positions: Positions, bits: NDArray[np.uint8], cuts: Positions, sizes: Vector, first: int, last: int
) -> None:
    """Add the coordinates from `first` to `last`.

    With unsigned indices, Numba skips its check for negative ones, which takes a fifth of the time.
    """
    for group in range(sizes.size):
        size = sizes[group]
        for i in range(max(first, cuts[group]), min(last, cuts[group + 1])):
            bit = np.int32((bits[np.uint64(i >> 3)] >> (i & 7)) & 1)
            out[np.uint64(positions[i])] += size * np.float32(2 * bit - 1)  # no branch, which would be unpredictable


def add_rows_of_signs_at_(out: Tensor, rows: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
    """Add several rows of `(positions, bits, bounds, magnitudes)`, each `[1, ...]`, to `out [1, d]` in place, in order.

    They go through the vector together, piece by piece, so that it is read and written once and not for every row.
    """
    if out.device.type != "cpu":
        for row in rows:
            add_signs_at_torch_(out, *row)
        return
    target = out.numpy()[0]
    edges = np.append(np.arange(0, target.size, PIECE), target.size)
    arrays = [(p.numpy()[0], b.numpy()[0], c.numpy()[0], m.numpy()[0]) for p, b, c, m in rows]
    starts = [np.searchsorted(positions, edges) for positions, *_ in arrays]

    def add(piece: int) -> None:
        for (positions, bits, cuts, sizes), start in zip(arrays, starts, strict=True):
            _add_(target, positions, bits, cuts, sizes, start[piece], start[piece + 1])

    map_threads(range(edges.size - 1), add)


def add_signs_at_torch_(out: Tensor, positions: Tensor, bits: Tensor, bounds: Tensor, magnitudes: Tensor) -> None:
    """The same in torch operations, on any device."""
    k = positions.shape[-1]
    size = magnitudes.gather(-1, group_of_each(bounds, k))
    out.scatter_(-1, positions, out.gather(-1, positions) + torch.where(unpack_bools(bits, k), size, -size))
