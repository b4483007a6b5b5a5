"""What is kept of a vector as signs and means: the mean magnitude of each tensor's part, and adding it back.

Positions `[C, k]` ascend, so what is kept of a segment of the vector, such as a tensor, lies together: a *group*. Its
mean is the same, bit for bit, in whatever order it is added up, because integers are added: with the largest
magnitude of the group between 2^e and 2^(e+1), each magnitude counts in whole units of 2^(e-23-up), and what is below a
unit is cut off. There are less than 2^(39-up) of them, each below 2^(24+up) units, so the sum stays below 2^63. For a
million kept coordinates a unit is 2^-42 of the group's largest magnitude, far below what rounding to float32 changes.

Each function has a kernel for one row on the CPU and a batched torch version for any other device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcams.bits.packing import unpack_bools
from fedcams.bits.parallel import kernel, map_ranges

Segments = Sequence[tuple[int, int]]
Vector = NDArray[np.float32]
Words = NDArray[np.uint32]
Positions = NDArray[np.int64]
MAGNITUDE = 0x7FFFFFFF
INFINITE = 0x7F800000
FRACTION = 0x7FFFFF
SPARE_BITS = 39  # of 63, above the 24 of a float's fraction


def group_bounds(positions: Tensor, segments: Segments) -> Tensor:
    """Return where each segment's group starts among positions `[C, k]`, and where the last ends: int64 `[C, S + 1]`.

    The segments lie end to end.
    """
    cuts = torch.tensor([start for start, _ in segments] + [segments[-1][1]], device=positions.device)
    return torch.searchsorted(positions, cuts.repeat(len(positions), 1))


# -- means -----------------------------------------------------------------------------------------------------------


def group_means(values: Tensor, bounds: Tensor) -> Tensor:
    """Return the mean of |values| of each group, +0.0 where it is empty: `[C, k]`, `[C, S + 1]` -> float32 `[C, S]`.

    Infinity and NaN in a group make its mean infinite.
    """
    if values.device.type != "cpu":
        return group_means_torch(values, bounds)
    out = np.empty((len(values), bounds.shape[1] - 1), np.float32)
    for words, cuts, means in zip(values.numpy().view(np.uint32), bounds.numpy(), out, strict=True):
        _means_(words, cuts, _spare(words.size), means)
    return torch.from_numpy(out)


def _spare(k: int) -> int:
    """By how many bits the largest magnitude of a group of k at most may be shifted up."""
    return SPARE_BITS - k.bit_length()


@kernel
def _means_(words: Words, cuts: Positions, up: int, out: Vector) -> None:
    for group in range(out.size):
        part = words[cuts[group] : cuts[group + 1]]
        largest = np.uint32(0)
        for i in range(part.size):
            largest = max(largest, part[i] & np.uint32(MAGNITUDE))
        if largest >= np.uint32(INFINITE):
            out[group] = np.inf
        elif part.size:
            exponent = max(int(np.int64(largest >> np.uint32(23))), 1)  # an unsigned integer would turn into a float
            total = math.ldexp(np.float64(_units(part, exponent, up)), exponent - 150 - up)
            out[group] = np.float32(total / part.size)
        else:
            out[group] = 0


@kernel
def _units(words: Words, exponent: int, up: int) -> int:
    """The sum of magnitudes in units of 2^(exponent - 150 - up); 1 is the exponent of what is below 2^-126 too."""
    total = 0
    for i in range(words.size):
        word = int(np.int64(words[i])) & MAGNITUDE
        own = word >> 23
        fraction = (word & FRACTION) | (int(own > 0) << 23)
        total += (fraction << up) >> min(exponent - max(own, 1), 63)
    return total


def group_means_torch(values: Tensor, bounds: Tensor) -> Tensor:
    """The same in torch operations, on any device."""
    k, counts = values.shape[-1], bounds.diff(dim=-1)
    groups = _group_of_each(bounds, k)
    words = (values.view(torch.int32) & MAGNITUDE).long()
    largest = torch.zeros_like(counts).scatter_reduce_(-1, groups, words, "amax")
    exponents = (largest >> 23).clamp(min=1)
    own = words >> 23
    fraction = (words & FRACTION) | ((own > 0).long() << 23)
    units = (fraction << _spare(k)) >> (exponents.gather(-1, groups) - own.clamp(min=1)).clamp(max=63)
    unit = (exponents - 150 - _spare(k) + 1023 << 52).view(torch.float64)  # a power of two, by its bits
    means = _sums_between(units, bounds).double() * unit / counts.clamp(min=1)
    return torch.where(largest >= INFINITE, torch.inf, means).float()


def _group_of_each(bounds: Tensor, k: int) -> Tensor:
    """The group of each kept coordinate: `[C, S + 1]` -> int64 `[C, k]`."""
    places = torch.arange(k, device=bounds.device).repeat(len(bounds), 1)
    return torch.searchsorted(bounds[:, 1:].contiguous(), places, right=True)


def _sums_between(units: Tensor, bounds: Tensor) -> Tensor:
    """Sums of integers over each group: `[C, k]` -> `[C, S]`, as differences of one running sum, which may wrap.

    One long vector, since a GPU adds up few rows slowly.
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
    """Those from `first` to `last` among the positions."""
    for group in range(sizes.size):
        size = sizes[group]
        for i in range(max(first, cuts[group]), min(last, cuts[group + 1])):
            out[positions[i]] += size if (bits[i >> 3] >> (i & 7)) & 1 else -size


def add_signs_at_torch_(out: Tensor, positions: Tensor, bits: Tensor, bounds: Tensor, magnitudes: Tensor) -> None:
    """The same in torch operations, on any device."""
    k = positions.shape[-1]
    size = magnitudes.gather(-1, _group_of_each(bounds, k))
    out.scatter_(-1, positions, out.gather(-1, positions) + torch.where(unpack_bools(bits, k), size, -size))
