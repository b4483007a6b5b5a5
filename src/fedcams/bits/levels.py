"""Blocks of neighbours as small integers times a step: quantised, packed, and added back, each in one pass.

A block of n coordinates has one step s, a bfloat16 with the sign of the block's largest magnitude; coordinate x becomes
the integer q nearest to x/s (or one of its two neighbours at random), -(2^(b-1) - 1) <= q <= 2^(b-1), and travels as
the b-bit level q + 2^(b-1) - 1. A step has 8 significant bits, so s·q is exact in float32. Levels are stored one after
the other, lowest bit first, padded with zeros. A block is a power of two of at least 8 coordinates: it starts at a
whole byte, and no thread's range cuts it.

Each function has a kernel for one row on the CPU and a batched torch version for any other device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams.bits.packing import pack_levels, pack_small_, packed_size, unpack_levels, unpack_small_
from fedcams.bits.parallel import kernel, map_ranges

if TYPE_CHECKING:
    from torch import Tensor

Vector = NDArray[np.float32]
Bytes = NDArray[np.uint8]
BF16_MAX = (2 - 2.0**-7) * 2.0**127
"""The largest bfloat16."""
MASK = 0xFFFFFFFF
MAGNITUDE = 0x7FFFFFFF


def most(bits: int) -> int:
    """Return the largest |q| on the side of the step's sign; on the other side it is one less."""
    return 1 << (bits - 1)


def largest_step(bits: int) -> float:
    """Return the largest step with which no level overflows."""
    return BF16_MAX / most(bits)


# -- quantising ----------------------------------------------------------------------------------------------------


def quantise(x: Tensor, bits: int, block: int, seeds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantise `x [C, d]` to bfloat16 steps `[C, ceil(d/block)]` and packed uint8 levels `[C, ceil(d·bits/8)]`.

    Without seeds, rounds to the nearest; with seeds (int64 `[C, 2]`, 32 bits each), at random, so that q·s has mean x.
    """
    if x.device.type != "cpu":
        return _quantise_torch(x, bits, block, seeds)
    rows, d = x.shape
    steps = torch.empty(rows, -(-d // block), dtype=torch.int16)
    out = torch.empty(rows, packed_size(d * bits), dtype=torch.uint8)
    keys = np.zeros((rows, 2), np.uint32) if seeds is None else seeds.numpy().astype(np.uint32)
    for row, step, packed, key in zip(x.numpy(), steps.numpy().view(np.uint16), out.numpy(), keys, strict=True):
        _quantise_row_(row, bits, block, seeds is not None, key, step, packed)
    return steps.view(torch.bfloat16), out


def _quantise_row_(
    row: Vector, bits: int, block: int, draw: bool, key: NDArray[np.uint32], steps: NDArray[np.uint16], out: Bytes
) -> None:
    def work(a: int, b: int) -> None:
        part, targets = row[a:b], steps[a // block : -(-b // block)]
        _quantise_(part, part.view(np.int32), a, bits, block, draw, key, targets, out[a * bits >> 3 :])

    map_ranges(row.size, work)


@kernel
def _quantise_(
    x: Vector,
    words: NDArray[np.int32],
    first: int,
    bits: int,
    block: int,
    draw: bool,
    key: NDArray[np.uint32],
    steps: NDArray[np.uint16],
    out: Bytes,
) -> None:
    levels = np.zeros(block, np.uint8)
    rounded = np.zeros(1, np.uint32)
    for number in range(steps.size):
        start = number * block
        part = x[start : start + block]
        rounded[0] = _step(words[start : start + block], bits, draw)
        steps[number] = rounded[0] >> np.uint32(16)
        step = rounded.view(np.float32)[0]
        if step == 0:
            levels[: part.size] = (1 << (bits - 1)) - 1
        elif draw:
            _round_at_random_(part, step, bits, first + start, key, levels)
        else:
            _round_to_nearest_(part, step, bits, levels)
        levels[part.size :] = 0
        at = start * bits >> 3
        pack_small_(levels, bits, out[at : at + ((part.size * bits + 7) >> 3)])


@kernel
def _step(words: NDArray[np.int32], bits: int, draw: bool) -> np.uint32:
    """Return the bits of the step, rounded away from zero to bfloat16. Floats of one sign sort like their bits."""
    above, below = np.int32(0), np.uint32(0)
    for i in range(words.size):
        above = max(above, words[i])
        below = max(below, np.uint32(words[i]))
    high, low = np.uint32(above), below & np.uint32(MAGNITUDE) if below > np.uint32(MAGNITUDE) else np.uint32(0)
    pair = np.empty(2, np.uint32)
    pair[0], pair[1] = max(high, low), min(high, low)
    sizes = pair.view(np.float32)
    half = 1 << (bits - 1)
    size = np.float32(sizes[0] / np.float32(half))
    if draw:  # no value may be clipped, on either side
        size = max(size, np.float32(sizes[1] / np.float32(half - 1)))
    if pair[0] >= np.uint32(0x7F800000):  # infinity or NaN: shows in the step
        return np.uint32(0x7F800000)
    size = min(size, np.float32(BF16_MAX / half))
    sizes[0] = size
    up = (pair[0] + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return np.uint32(up | np.uint32(0x80000000)) if low > high else np.uint32(up)


@kernel
def _round_to_nearest_(x: Vector, step: np.float32, bits: int, levels: Bytes) -> None:
    half = np.float32(1 << (bits - 1))
    least = np.float32(1) - half
    for i in range(x.size):
        q = min(max(np.rint(x[i] / step), least), half)
        levels[i] = np.uint8(np.int32(q - least))


@kernel
def _round_at_random_(
    x: Vector, step: np.float32, bits: int, first: int, key: NDArray[np.uint32], levels: Bytes
) -> None:
    half = np.float32(1 << (bits - 1))
    least = np.float32(1) - half
    for i in range(x.size):
        ratio = x[i] / step
        down = np.floor(ratio)
        chance = np.float32(_hash(np.uint32(first + i), key[0], key[1]) >> np.uint32(8)) * np.float32(2.0**-24)
        q = min(max(down + np.float32(chance < ratio - down), least), half)
        levels[i] = np.uint8(np.int32(q - least))


@kernel
def _hash(i: np.uint32, first: np.uint32, second: np.uint32) -> np.uint32:
    """Return 32 random bits for a coordinate, from two words of a key."""
    value = i ^ first
    value = np.uint32((value ^ (value >> np.uint32(16))) * np.uint32(0x7FEB352D))
    value = np.uint32((value ^ (value >> np.uint32(15))) * np.uint32(0x846CA68B))
    value = np.uint32((value ^ (value >> np.uint32(16))) + second)
    value = np.uint32((value ^ (value >> np.uint32(16))) * np.uint32(0x7FEB352D))
    return value ^ (value >> np.uint32(15))


def _quantise_torch(x: Tensor, bits: int, block: int, seeds: Tensor | None) -> tuple[Tensor, Tensor]:
    d, half = x.shape[-1], most(bits)
    blocks = torch.nn.functional.pad(x, (0, -d % block)).unflatten(-1, (-1, block))
    high, low = blocks.amax(-1).clamp(min=0), -blocks.amin(-1).clamp(max=0)
    size = torch.maximum(high, low) / half
    if seeds is not None:
        size = torch.maximum(size, torch.minimum(high, low) / (half - 1))
    size = torch.where(size.isfinite(), size.clamp(max=largest_step(bits)), torch.inf)
    up = ((size.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    steps = torch.where(low > high, -up, up)
    ratio = blocks / steps[..., None]
    if seeds is None:
        q = ratio.round()
    else:
        q = ratio.floor() + (_chances(seeds, d, block, x.device) < ratio - ratio.floor())
    q = torch.where(steps[..., None] == 0, 0, q.clamp(1 - half, half))
    levels = (q.nan_to_num() + (half - 1)).to(torch.uint8).flatten(-2)[..., :d]
    return steps.bfloat16(), pack_levels(levels, bits)


def _chances(seeds: Tensor, d: int, block: int, device: torch.device) -> Tensor:
    """Return random numbers `[C, blocks, block]` in [0, 1), the same as the kernel's."""
    place = torch.arange(d + -d % block, device=device) & MASK
    value = place ^ seeds[:, :1].to(device)
    value = ((value ^ value >> 16) * 0x7FEB352D) & MASK
    value = ((value ^ value >> 15) * 0x846CA68B) & MASK
    value = ((value ^ value >> 16) + seeds[:, 1:].to(device)) & MASK
    value = ((value ^ value >> 16) * 0x7FEB352D) & MASK
    chances: Tensor = ((value ^ value >> 15) >> 8).float().mul(2.0**-24).unflatten(-1, (-1, block))
    return chances


# -- adding back ---------------------------------------------------------------------------------------------------


def add_levels_(out: Tensor, levels: Tensor, steps: Tensor, bits: int, block: int, weight: float) -> None:
    """Add `weight·q·steps` to `out [C, d]` in place; `steps` is bfloat16 `[C, ceil(d/block)]`, `levels` is packed."""
    limit = largest_step(bits)  # our encoder never sends a larger step, but another one might
    if out.device.type != "cpu":
        sizes = (steps.float().clamp(-limit, limit) * weight).repeat_interleave(block, -1)
        out += (unpack_levels(levels, bits, out.shape[-1]).float() - (most(bits) - 1)) * sizes[..., : out.shape[-1]]
        return
    words = steps.view(torch.int16).numpy().astype(np.uint32) << 16  # not with torch, whose threads keep spinning
    scaled = np.clip(words.view(np.float32), -limit, limit) * np.float32(weight)
    for row, packed, size in zip(out.numpy(), levels.numpy(), scaled, strict=True):
        _add_row_(row, packed, size, bits, block)


def _add_row_(row: Vector, packed: Bytes, steps: Vector, bits: int, block: int) -> None:
    map_ranges(row.size, lambda a, b: _add_(row[a:b], packed[a * bits >> 3 :], steps[a // block :], bits, block))


@kernel
def _add_(out: Vector, packed: Bytes, steps: Vector, bits: int, block: int) -> None:
    levels = np.zeros(block, np.uint8)
    least = np.float32((1 << (bits - 1)) - 1)
    for number in range((out.size + block - 1) // block):
        part = out[number * block : (number + 1) * block]
        at = number * block * bits >> 3
        unpack_small_(packed[at : at + ((part.size * bits + 7) >> 3)], bits, levels)
        step = steps[number]
        for i in range(part.size):
            part[i] += step * (np.float32(levels[i]) - least)


# -- norms ---------------------------------------------------------------------------------------------------------


def block_norms(levels: Tensor, steps: Tensor, bits: int, block: int, d: int) -> Tensor:
    """Return the norm of each block of q·steps, read from the levels: float64 `[C, ceil(d/block)]`."""
    limit = largest_step(bits)
    if levels.device.type != "cpu":
        squares = _squares_torch(levels, bits, block, d)
    else:
        squares = torch.stack([_sum_squares(row.numpy(), bits, block, d) for row in levels])
    return squares.double().sqrt() * steps.double().clamp(-limit, limit).abs()


def _sum_squares(packed: Bytes, bits: int, block: int, d: int) -> Tensor:
    out = np.empty(-(-d // block), np.int64)
    map_ranges(d, lambda a, b: _squares_(packed[a * bits >> 3 :], b - a, bits, block, out[a // block :]))
    return torch.from_numpy(out)


@kernel
def _squares_(packed: Bytes, size: int, bits: int, block: int, out: NDArray[np.int64]) -> None:
    """The sums of q² over the blocks of the first `size` levels."""
    levels, table = np.zeros(block, np.uint8), _squares_in_bytes(bits)
    least = np.int32((1 << (bits - 1)) - 1)
    for number in range((size + block - 1) // block):
        length = min(block, size - number * block)
        at, total = number * block * bits >> 3, np.int32(0)  # at most 65536 squares of 128 at most: below 2^31
        part = packed[at : at + ((length * bits + 7) >> 3)]
        if 8 % bits == 0 and length * bits % 8 == 0:  # two to three times as fast as unpacking them
            for byte in part:
                total += table[byte]
        else:
            unpack_small_(part, bits, levels)
            for i in range(length):
                q = np.int32(levels[i]) - least
                total += q * q
        out[number] = total


@kernel
def _squares_in_bytes(bits: int) -> NDArray[np.int32]:
    """Return the sum of q² over the levels in each of the 256 bytes; of use if a byte holds whole levels."""
    table = np.zeros(256, np.int32)
    least, mask = (1 << (bits - 1)) - 1, (1 << bits) - 1
    for byte in range(256):
        for shift in range(0, 8, bits):
            q = ((byte >> shift) & mask) - least
            table[byte] += q * q
    return table


def _squares_torch(levels: Tensor, bits: int, block: int, d: int) -> Tensor:
    q = unpack_levels(levels, bits, d).long() - (most(bits) - 1)
    sums: Tensor = torch.nn.functional.pad(q * q, (0, -d % block)).unflatten(-1, (-1, block)).sum(-1)
    return sums
