"""Signs as bits: one bit per coordinate, 1 for x >= 0 (and -0.0), lowest bit of a byte first, padded with zeros.

Each function has a kernel for one row on the CPU and a batched torch version for any other device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams.bits.packing import pack_bools, packed_size, unpack_bools
from fedcams.bits.parallel import BLOCK, kernel, map_ranges
from fedcams.bits.vectors import abs_sum

if TYPE_CHECKING:
    from torch import Tensor

NEGATIVE_ZERO = np.uint32(0x80000000)  # as unsigned integers, exactly the negative floats are above it
CHUNK = 4096  # elements that stay in the first-level cache
Segments = Sequence[tuple[int, int]]


# -- packing -----------------------------------------------------------------------------------------------------


def pack_signs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the signs of `x [C, d]`, uint8 `[C, ceil(d/8)]`, and from the same read the sums of |x|, float64 `[C]`."""
    if x.device.type != "cpu":
        return pack_bools(x >= 0), x.abs().sum(-1, dtype=torch.float64)
    out = torch.empty(x.shape[0], packed_size(x.shape[1]), dtype=torch.uint8)
    if x.shape[1] <= BLOCK:  # too short to be split: all rows in one call
        return out, torch.from_numpy(_pack_rows_(x.numpy(), x.numpy().view(np.uint32), out.numpy()))
    sums = [_pack_row_(row, target) for row, target in zip(x.numpy(), out.numpy(), strict=True)]
    return out, torch.tensor(sums, dtype=torch.float64)


def _pack_row_(row: NDArray[np.float32], out: NDArray[np.uint8]) -> float:
    words = row.view(np.uint32)
    parts = map_ranges(row.size, lambda a, b: _pack_and_sum_(row[a:b], words[a:b], out[a >> 3 : (b + 7) >> 3]))
    return float(np.concatenate(parts).sum())


@kernel
def _pack_and_sum_(row: NDArray[np.float32], words: NDArray[np.uint32], out: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Work in chunks, so that the sum finds in the cache what packing has just read; return one sum per BLOCK."""
    sums = np.zeros((row.size + BLOCK - 1) // BLOCK)
    for start in range(0, row.size, CHUNK):
        _pack_(words[start : start + CHUNK], out[start >> 3 : (start + CHUNK) >> 3])
        part = row[start : start + CHUNK]
        total = 0.0
        for i in range(part.size):
            total += np.float64(abs(part[i]))
        sums[start // BLOCK] += total
    return sums


@kernel
def _pack_rows_(x: NDArray[np.float32], words: NDArray[np.uint32], out: NDArray[np.uint8]) -> NDArray[np.float64]:
    sums = np.zeros(x.shape[0])
    for row in range(x.shape[0]):
        sums[row] = _pack_and_sum_(x[row], words[row], out[row]).sum()
    return sums


@kernel
def _pack_(words: NDArray[np.uint32], out: NDArray[np.uint8]) -> None:
    whole = words.size >> 3
    for i in range(whole):
        byte = np.uint32(0)
        for j in range(8):
            byte |= np.uint32(words[8 * i + j] <= NEGATIVE_ZERO) << np.uint32(j)
        out[i] = byte
    rest = words[8 * whole :]
    if rest.size:
        byte = np.uint32(0)
        for j in range(rest.size):
            byte |= np.uint32(rest[j] <= NEGATIVE_ZERO) << np.uint32(j)
        out[whole] = byte


# -- adding back ---------------------------------------------------------------------------------------------------


def add_signs_(out: Tensor, bits: Tensor, segments: Segments, magnitudes: Tensor) -> None:
    """Add `±magnitudes [C, S]`, one per segment, to `out [C, d]` in place; `bits [C, ceil(d/8)]` has the signs.

    With `out [1, d]`, all rows are added to that row, one after the other.
    """
    if out.device.type != "cpu":
        return _add_signs_torch_(out, bits, segments, magnitudes)
    if out.shape[1] <= BLOCK and len(segments) == 1:
        return _add_rows_(out.numpy(), bits.numpy(), magnitudes.numpy())
    for row, packed, sizes in zip(_rows(out, bits), bits.numpy(), magnitudes.numpy(), strict=False):
        for (start, stop), size in zip(segments, sizes, strict=True):
            _add_segment_(row[start:stop], packed, start, size)


@kernel
def _add_rows_(out: NDArray[np.float32], bits: NDArray[np.uint8], magnitudes: NDArray[np.float32]) -> None:
    for row in range(bits.shape[0]):
        _add_(out[row % out.shape[0]], bits[row], 0, magnitudes[row, 0])


def _rows(out: Tensor, bits: Tensor) -> Iterable[NDArray[np.float32]]:
    return out.numpy() if len(out) == len(bits) else itertools.repeat(out.numpy()[0])


def _add_segment_(out: NDArray[np.float32], bits: NDArray[np.uint8], first: int, size: np.float32) -> None:
    map_ranges(out.size, lambda a, b: _add_(out[a:b], bits, first + a, size))


@kernel
def _add_(out: NDArray[np.float32], bits: NDArray[np.uint8], first: int, size: np.float32) -> None:
    head = min(out.size, -first % 8)  # up to the first whole byte of this range
    for i in range(head):
        out[i] += size if (bits[(first + i) >> 3] >> ((first + i) & 7)) & 1 else -size
    body = out[head:]
    whole = bits[(first + head) >> 3 :]
    for i in range(body.size >> 3):
        byte = whole[i]
        for j in range(8):
            body[8 * i + j] += size if (byte >> j) & 1 else -size
    for i in range(body.size >> 3 << 3, body.size):
        body[i] += size if (whole[i >> 3] >> (i & 7)) & 1 else -size


def _add_signs_torch_(out: Tensor, bits: Tensor, segments: Segments, magnitudes: Tensor) -> None:
    if len(out) < len(bits):
        for packed, sizes in zip(bits, magnitudes, strict=True):
            _add_signs_torch_(out, packed[None], segments, sizes[None])
        return
    positive = unpack_bools(bits, out.shape[-1])
    for number, (start, stop) in enumerate(segments):
        size = magnitudes[:, number, None]
        out[:, start:stop] += torch.where(positive[:, start:stop], size, -size)


# -- magnitudes ----------------------------------------------------------------------------------------------------


def abs_sums(x: Tensor, segments: Segments) -> Tensor:
    """Return the sum of |x| over each segment: `x [C, d]` -> float64 `[C, S]`."""
    if x.device.type != "cpu":
        return torch.stack([x[:, a:b].abs().sum(-1, dtype=torch.float64) for a, b in segments], dim=-1)
    return torch.tensor([[abs_sum(row[a:b]) for a, b in segments] for row in x], dtype=torch.float64)
