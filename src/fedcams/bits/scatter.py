"""Taking and adding a few values at given positions of a long vector."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcams.bits.parallel import kernel


def take_at(x: Tensor, positions: Tensor) -> Tensor:
    """`x [C, d]` at `positions [C, k]` -> `[C, k]`."""
    if x.device.type != "cpu":
        return x.gather(-1, positions)
    rows = [row[places] for row, places in zip(x.numpy(), positions.numpy(), strict=True)]
    return torch.from_numpy(np.stack(rows))


def add_at_(out: Tensor, positions: Tensor, values: Tensor, weight: float) -> None:
    """`out [C, d] += weight * values [C, k]` at `positions [C, k]`, distinct within a row; in place."""
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
        out[positions[i]] += weight * values[i]
