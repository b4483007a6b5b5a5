"""k distinct positions out of d from a 32-bit seed: the same integers on every device, and none of them is sent.

The seed picks a bijection of the b-bit integers, b the bits of d - 1: four rounds of an odd multiplication, an addition
and a shift. Position i is where i lands; what lands outside of [0, d) is sent through again until it lies inside,
which keeps the map one to one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcams.bits.parallel import kernel, map_ranges

ROUNDS = 4
SEED_BITS = 32


def sample_positions(seeds: Tensor, k: int, d: int) -> Tensor:
    """Seeds int64 `[C]` -> distinct positions int64 `[C, k]` in [0, d), in no order."""
    bits = max(1, (d - 1).bit_length())
    constants = torch.tensor([_constants(seed) for seed in seeds.tolist()], dtype=torch.int64)
    if seeds.device.type != "cpu":
        return _positions_torch(constants.to(seeds.device), k, d, bits)
    out = np.empty((len(constants), k), np.int64)
    for row, target in zip(constants.numpy(), out, strict=True):
        _fill_row_(row, d, bits, target)
    return torch.from_numpy(out)


def _constants(seed: int) -> list[int]:
    """Multiplier (odd) and addend of each round."""
    return [_mix(seed * 2 * ROUNDS + i + 1) | (i % 2 == 0) for i in range(2 * ROUNDS)]


def _mix(value: int) -> int:
    """A hash of an integer to 32 bits."""
    value = ((value >> 32) * 0x9E3779B9 ^ value) & 0xFFFFFFFF
    value = ((value ^ value >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    value = ((value ^ value >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return value ^ value >> 16


def _fill_row_(constants: NDArray[np.int64], d: int, bits: int, out: NDArray[np.int64]) -> None:
    map_ranges(out.size, lambda a, b: _fill_(constants, a, d, bits, out[a:b]))


@kernel
def _fill_(constants: NDArray[np.int64], first: int, d: int, bits: int, out: NDArray[np.int64]) -> None:
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
    """The same in torch operations `[C, k]`, on any device."""
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
