"""Positions in long vectors: draw them from a seed, read or add values there, and track when each last changed.

A 32-bit seed determines k distinct positions out of d, the same on every device, so the positions are not sent. The
seed chooses a bijection of the b-bit integers, where d - 1 has b bits: four rounds of an odd multiplication, an
addition and a shift. Position i is the image of i. An image outside [0, d) is mapped again until it lies inside, which
keeps the map one to one.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams.bits.parallel import kernel, map_ranges

if TYPE_CHECKING:
    from torch import Tensor

Times = NDArray[np.int32]
Positions = NDArray[np.int64]
ROUNDS = 4
SEED_BITS = 32
CHUNK = 4096


# -- drawing -------------------------------------------------------------------------------------------------------


def sample_positions(seeds: Tensor, k: int, d: int) -> Tensor:
    """Draw distinct positions int64 `[C, k]` in [0, d), unordered, from seeds int64 `[C]`."""
    bits = max(1, (d - 1).bit_length())
    constants = torch.tensor([_constants(seed) for seed in seeds.tolist()], dtype=torch.int64)
    if seeds.device.type != "cpu":
        return _positions_torch(constants.to(seeds.device), k, d, bits)
    out = np.empty((len(constants), k), np.int64)
    for row, target in zip(constants.numpy(), out, strict=True):
        _draw_row_(row, d, bits, target)
    return torch.from_numpy(out)


def _constants(seed: int) -> list[int]:
    """Return the multiplier (odd) and the addend of each round."""
    return [_mix(seed * 2 * ROUNDS + i + 1) | (i % 2 == 0) for i in range(2 * ROUNDS)]


def _mix(value: int) -> int:
    """Return a 32-bit hash of an integer."""
    value = ((value >> 32) * 0x9E3779B9 ^ value) & 0xFFFFFFFF
    value = ((value ^ value >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    value = ((value ^ value >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return value ^ value >> 16


def _draw_row_(constants: NDArray[np.int64], d: int, bits: int, out: NDArray[np.int64]) -> None:
    map_ranges(out.size, lambda a, b: _draw_(constants, a, d, bits, out[a:b]))


@kernel
def _draw_(constants: NDArray[np.int64], first: int, d: int, bits: int, out: NDArray[np.int64]) -> None:
    mask, shift = (np.int64(1) << bits) - 1, (bits + 1) >> 1
    for i in range(out.size):
        value = np.int64(first + i)
        while True:
            for j in range(0, 2 * ROUNDS, 2):
                value = (value * constants[j] + constants[j + 1]) & mask
                value ^= value >> shift
            if value < d:
                break
        out[i] = value


def _positions_torch(constants: Tensor, k: int, d: int, bits: int) -> Tensor:
    """Draw the same positions `[C, k]` with torch operations, on any device."""
    value = torch.arange(k, device=constants.device).repeat(len(constants), 1)
    outside = torch.ones_like(value, dtype=torch.bool)
    while bool(outside.any()):
        value = torch.where(outside, _round(value, constants, bits), value)
        outside = value >= d
    return value


def _round(value: Tensor, constants: Tensor, bits: int) -> Tensor:
    mask, shift = (1 << bits) - 1, (bits + 1) >> 1
    for j in range(0, 2 * ROUNDS, 2):
        value = (value * constants[:, j, None] + constants[:, j + 1, None]) & mask
        value = value ^ (value >> shift)
    return value


# -- reading and adding ---------------------------------------------------------------------------------------------


def take_at(x: Tensor, positions: Tensor) -> Tensor:
    """Return the values `[C, k]` of `x [C, d]` at `positions [C, k]`."""
    if x.device.type != "cpu":
        return x.gather(-1, positions)
    rows = [row[places] for row, places in zip(x.numpy(), positions.numpy(), strict=True)]
    return torch.from_numpy(np.stack(rows))


def add_at_(out: Tensor, positions: Tensor, values: Tensor, weight: float) -> None:
    """Add `weight * values [C, k]` to `out [C, d]` at `positions [C, k]`, distinct within a row; in place."""
    if out.device.type != "cpu":
        out.scatter_(-1, positions, out.gather(-1, positions) + values * weight)
        return
    for row, places, row_values in zip(out.numpy(), positions.numpy(), values.numpy(), strict=True):
        _add_(row, places, row_values, np.float32(weight))


@kernel
def _add_(
    out: NDArray[np.float32], positions: NDArray[np.int64], values: NDArray[np.float32], weight: np.float32
) -> None:
    for i in range(positions.size):
        place = np.uint64(positions[i])  # unsigned, so that Numba does not check for negative indices
        out[place] += weight * values[i]


# -- changes -------------------------------------------------------------------------------------------------------


def note_changes(times: Tensor, before: Tensor, after: Tensor, now: int) -> Tensor:
    """Return a copy of `times [d]`, int32, with `now` wherever the bits of the two vectors `[d]` differ."""
    if times.device.type != "cpu":
        return torch.where(before.view(torch.int32) != after.view(torch.int32), now, times)
    out = np.empty_like(old := times.numpy())
    words = before.numpy().view(np.int32), after.numpy().view(np.int32)
    map_ranges(out.size, lambda a, b: _note_(old[a:b], words[0][a:b], words[1][a:b], np.int32(now), out[a:b]))
    return torch.from_numpy(out)


@kernel
def _note_(old: Times, before: Times, after: Times, now: np.int32, out: Times) -> None:
    for i in range(out.size):
        out[i] = now if before[i] != after[i] else old[i]


def changed_since(times: Tensor, then: int) -> Tensor:
    """Return the ascending positions `[k]` of the coordinates that changed after the time `then`."""
    if times.device.type != "cpu":
        return (times > then).nonzero().squeeze(-1)
    array, later = times.numpy(), np.int32(then)
    ranges = map_ranges(array.size, lambda a, b: (a, b, int(_count(array[a:b], later))))
    out = np.empty(sum(count for _, _, count in ranges), np.int64)
    places = itertools.accumulate((count for _, _, count in ranges), initial=0)
    work = dict(zip([a for a, _, _ in ranges], places, strict=False))
    map_ranges(array.size, lambda a, b: _list_(array[a:b], later, a, out[work[a] :]))
    return torch.from_numpy(out)


@kernel
def _count(times: Times, then: np.int32) -> int:
    count = 0
    for i in range(times.size):
        count += int(times[i] > then)
    return count


@kernel
def _list_(times: Times, then: np.int32, base: int, out: Positions) -> None:
    """Work in chunks, so that an extra write never lands in the range of another thread."""
    places = np.empty(CHUNK + 1, np.int64)
    at = 0
    for start in range(0, times.size, CHUNK):
        chunk = times[start : start + CHUNK]
        found = 0
        for i in range(chunk.size):
            places[found] = base + start + i
            found += int(chunk[i] > then)
        for i in range(found):
            out[at + i] = places[i]
        at += found
