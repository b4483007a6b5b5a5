"""Integers of b bits as bytes, one after the other, lowest bit first, padded with zeros.

Torch operations pack bools and levels (at most 8 bits) on any device; a kernel on the CPU packs wider integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams.bits.parallel import kernel
from fedcams.errors import BadPadding

if TYPE_CHECKING:
    from torch import Tensor

Bytes = NDArray[np.uint8]
Values = NDArray[np.int64]


def packed_size(count: int) -> int:
    """Return how many bytes hold `count` bits."""
    return -(-count // 8)


def pack_bools(mask: Tensor) -> Tensor:
    """Pack bool `[..., count]` into uint8 `[..., ceil(count/8)]`, on any device."""
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[-1] % 8))
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    packed: Tensor = (padded.unflatten(-1, (-1, 8)) * weights).sum(-1, dtype=torch.uint8)
    return packed


def unpack_bools(bits: Tensor, count: int) -> Tensor:
    """Unpack uint8 `[..., ceil(count/8)]` to bool `[..., count]`, on any device."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(-1) >> places) & 1).flatten(-2)[..., :count].bool()


def pack_levels(levels: Tensor, bits: int) -> Tensor:
    """Pack uint8 `[..., count]`, each below 2^bits, into uint8 `[..., ceil(count·bits/8)]`, on any device."""
    count = levels.shape[-1]
    groups = torch.nn.functional.pad(levels, (0, -count % 8)).unflatten(-1, (-1, 8)).long()
    words = (groups << bits * torch.arange(8, device=levels.device)).sum(-1)
    spread = (words[..., None] >> 8 * torch.arange(bits, device=levels.device)) & 255
    packed: Tensor = spread.to(torch.uint8).flatten(-2)[..., : packed_size(count * bits)]
    return packed


def unpack_levels(data: Tensor, bits: int, count: int) -> Tensor:
    """Unpack uint8 `[..., ceil(count·bits/8)]` to uint8 `[..., count]`, each below 2^bits, on any device."""
    groups = torch.nn.functional.pad(data, (0, -data.shape[-1] % bits)).unflatten(-1, (-1, bits)).long()
    words = (groups << 8 * torch.arange(bits, device=data.device)).sum(-1)
    spread = (words[..., None] >> bits * torch.arange(8, device=data.device)) & ((1 << bits) - 1)
    levels: Tensor = spread.to(torch.uint8).flatten(-2)[..., :count]
    return levels


def pack_uints(values: Values, bits: int) -> Bytes:
    """Pack int64 `[n]`, each in [0, 2^bits) with bits <= 32, into `ceil(n·bits/8)` bytes."""
    out = np.zeros(packed_size(values.size * bits), np.uint8)
    _pack_(values, bits, out)
    return out


def unpack_uints(data: Bytes, bits: int, count: int) -> Values:
    """Unpack `count` integers of `bits` bits to int64 `[count]`; refuse padding that is not zero."""
    values = np.empty(count, np.int64)
    if _unpack_(data, bits, values):
        raise BadPadding(f"the bits after the last of {count} {bits}-bit integers are not zero")
    return values


@kernel
def _pack_(values: Values, bits: int, out: Bytes) -> None:
    held, width, at = np.uint64(0), 0, 0
    for i in range(values.size):
        held |= np.uint64(values[i]) << np.uint64(width)
        width += bits
        while width >= 8:
            out[at] = np.uint8(held & np.uint64(255))
            held >>= np.uint64(8)
            width, at = width - 8, at + 1
    if width:
        out[at] = np.uint8(held)


@kernel
def _unpack_(data: Bytes, bits: int, values: Values) -> bool:
    """Unpack the integers; return whether the padding is not zero."""
    held, width, at = np.uint64(0), 0, 0
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(values.size):
        while width < bits:
            held |= np.uint64(data[at]) << np.uint64(width)
            width, at = width + 8, at + 1
        values[i] = np.int64(held & mask)
        held >>= np.uint64(bits)
        width -= bits
    return bool(held != 0)


@kernel
def pack_small_(levels: Bytes, bits: int, out: Bytes) -> None:
    """Pack levels of 2, 3, 4 or 8 bits, eight into `bits` bytes; where none crosses a byte, loops vectorise."""
    if bits == 8:
        # not a slice, for which Numba would spend seconds compiling the error message for different sizes
        for i in range(out.size):
            out[i] = levels[i]
    elif bits == 4:
        for i in range(out.size):
            out[i] = levels[2 * i] | (levels[2 * i + 1] << np.uint8(4))
    elif bits == 2:
        for i in range(out.size):
            low = levels[4 * i] | (levels[4 * i + 1] << np.uint8(2))
            out[i] = low | (levels[4 * i + 2] << np.uint8(4)) | (levels[4 * i + 3] << np.uint8(6))
    else:
        for i in range(0, out.size, bits):
            word = np.uint64(0)
            for j in range(8):
                word |= np.uint64(levels[8 * i // bits + j]) << np.uint64(bits * j)
            for j in range(min(bits, out.size - i)):
                out[i + j] = np.uint8((word >> np.uint64(8 * j)) & np.uint64(255))


@kernel
def unpack_small_(packed: Bytes, bits: int, levels: Bytes) -> None:
    """Unpack what `pack_small_` packed; `levels` may be longer."""
    if bits == 8:
        for i in range(packed.size):
            levels[i] = packed[i]
    elif bits == 4:
        for i in range(packed.size):
            levels[2 * i] = packed[i] & np.uint8(15)
            levels[2 * i + 1] = packed[i] >> np.uint8(4)
    elif bits == 2:
        for i in range(packed.size):
            for j in range(4):
                levels[4 * i + j] = (packed[i] >> np.uint8(2 * j)) & np.uint8(3)
    else:
        for i in range(0, packed.size, bits):
            word = np.uint64(0)
            for j in range(min(bits, packed.size - i)):
                word |= np.uint64(packed[i + j]) << np.uint64(8 * j)
            for j in range(8):
                levels[8 * i // bits + j] = np.uint8((word >> np.uint64(bits * j)) & np.uint64((1 << bits) - 1))
