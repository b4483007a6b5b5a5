"""Sums and additions over long float32 vectors, on the same threads as the other kernels.

After a parallel operation, torch's threads keep spinning for some milliseconds, which would take a core from the next
kernel. So on the CPU, these functions do not use torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams.bits.parallel import BLOCK, kernel, map_ranges

if TYPE_CHECKING:
    from torch import Tensor

Vector = NDArray[np.float32]
SHORT = 1 << 15
"""Up to this size torch uses no threads and is faster to call."""


def add_(out: Tensor, x: Tensor, threads: int | None = None) -> None:
    """Add `x [n]` to `out [n]` in place, on as many threads as torch has unless `threads` is given."""
    if out.numel() <= SHORT or not (_suits_kernels(out) and _suits_kernels(x)):
        out.add_(x)
        return
    target, source = out.numpy(), x.numpy()
    map_ranges(target.size, lambda a, b: _add_kernel_(target[a:b], source[a:b]), threads)


def divide_(out: Tensor, by: float) -> float:
    """Divide `out [n]` by a number, in place; return the sum of |out| like `abs_sum`, taken in the same pass."""
    if out.numel() <= SHORT or not _suits_kernels(out):
        return abs_sum(out.div_(by))
    target = out.numpy()
    return float(np.concatenate(map_ranges(target.size, lambda a, b: _divide_(target[a:b], np.float32(by)))).sum())


def abs_sum(x: Tensor) -> float:
    """Return the sum of |x| of `x [n]` in float64, which no finite float32 vector can overflow."""
    if not _suits_kernels(x):
        return float(x.abs().sum(dtype=torch.float64))
    vector = x.numpy()
    if vector.size <= BLOCK:
        return float(_block_sums(vector).sum())
    return float(np.concatenate(map_ranges(vector.size, lambda a, b: _block_sums(vector[a:b]))).sum())


def row_norms(rows: Tensor) -> Tensor:
    """Return the L2 norm of each row of `rows [C, d]` as float64 `[C]`, on the same device.

    Sums are taken in float64, which no finite float32 row can overflow, and in an order that depends only on d: a row
    has the same norm, bit for bit, regardless of the other rows and their number.
    """
    if rows.device.type == "cpu":
        sums = [float(_block_dots(row, row).sum()) for row in map(_array, rows)]
        return torch.tensor(sums, dtype=torch.float64).sqrt_()
    return _stack([wide.square().sum() for wide in map(_wide, rows)], rows).sqrt_()


def row_dots(rows: Tensor, vector: Tensor) -> Tensor:
    """Return the inner products of `rows [C, d]` with `vector [d]` as float64 `[C]`, summed like `row_norms`."""
    if rows.device.type == "cpu":
        other = _array(vector)
        return torch.tensor([float(_block_dots(row, other).sum()) for row in map(_array, rows)], dtype=torch.float64)
    other_wide = _wide(vector)
    return _stack([wide.mul(other_wide).sum() for wide in map(_wide, rows)], rows)


def read_floats(data: NDArray[np.uint8]) -> tuple[Vector, float]:
    """Copy bytes, which need not be aligned, into a new vector; return it and the sum of |x| like `abs_sum`.

    A range is summed while it is still in the cache.
    """
    vector = np.empty(data.size // 4, np.float32)
    raw = vector.view(np.uint8)

    def read(a: int, b: int) -> NDArray[np.float64]:
        raw[4 * a : 4 * b] = data[4 * a : 4 * b]
        return _block_sums(vector[a:b])

    return vector, float(np.concatenate(map_ranges(vector.size, read)).sum())


def _array(x: Tensor) -> NDArray[np.float32]:
    """Return a vector on the CPU as contiguous memory, float32 or float64."""
    return np.ascontiguousarray(x.detach().numpy())


def _wide(x: Tensor) -> Tensor:
    """Return a float64 copy in new memory, because the order of a GPU's sums depends on where a row starts."""
    return x.detach().to(torch.float64, copy=True)


def _stack(sums: list[Tensor], rows: Tensor) -> Tensor:
    return torch.stack(sums) if sums else rows.new_zeros(0, dtype=torch.float64)


def _suits_kernels(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and not x.requires_grad


@kernel
def _add_kernel_(out: Vector, x: Vector) -> None:
    for i in range(out.size):
        out[i] += x[i]


@kernel
def _divide_(out: Vector, by: np.float32) -> NDArray[np.float64]:
    """Return the sum of |out| over each block, which is still in the cache."""
    sums = np.zeros((out.size + BLOCK - 1) // BLOCK)
    for block in range(sums.size):
        part = out[block * BLOCK : (block + 1) * BLOCK]
        for i in range(part.size):
            part[i] /= by
        total = 0.0
        for i in range(part.size):
            total += np.float64(abs(part[i]))
        sums[block] = total
    return sums


@kernel
def _block_sums(x: Vector) -> NDArray[np.float64]:
    """Return the sum of |x| over each block."""
    sums = np.zeros((x.size + BLOCK - 1) // BLOCK)
    for block in range(sums.size):
        part = x[block * BLOCK : (block + 1) * BLOCK]
        total = 0.0
        for i in range(part.size):
            total += np.float64(abs(part[i]))
        sums[block] = total
    return sums


@kernel
def _block_dots(x: Vector, y: Vector) -> NDArray[np.float64]:
    """Return the sum of x·y over each block."""
    sums = np.zeros((x.size + BLOCK - 1) // BLOCK)
    for block in range(sums.size):
        start, stop = block * BLOCK, min((block + 1) * BLOCK, x.size)
        total = 0.0
        for i in range(start, stop):
            total += np.float64(x[i]) * np.float64(y[i])
        sums[block] = total
    return sums
