"""The vectors that tests try everything on."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fedcams import Layout

DIMENSIONS = (1, 2, 7, 8, 9, 63, 64, 65, 1000, 4097, 100_003)


def vectors(d: int, seed: int = 0) -> dict[str, Tensor]:
    """Name -> float32 `[d]`."""
    return {name: vector.clone() for name, vector in _vectors(d, seed).items()}


@functools.cache
def _vectors(d: int, seed: int) -> dict[str, Tensor]:
    random = torch.randn(d, generator=torch.Generator().manual_seed(seed + d))
    spike = torch.zeros(d)
    spike[d // 2] = -3.0
    sparse = torch.where(torch.arange(d) % 17 == 3, random, torch.zeros(d))
    negative_zero = torch.where(torch.arange(d) % 2 == 0, -0.0, random)
    return {
        "zeros": torch.zeros(d),
        "one spike": spike,
        "ties": torch.where(random > 0, 1.0, -1.0),
        "-0.0": negative_zero,
        "denormals": random * 1e-41,
        "huge": random.sign() * 3.4e38 * torch.rand(d, generator=torch.Generator().manual_seed(seed)),
        "random": random,
        "already sparse": sparse,
    }


def tensors_layout(d: int) -> Layout:
    """A layout of d coordinates in several tensors, one of them empty, with filters where their sizes allow it."""
    sizes = [d - d // 2 - d // 5, d // 2, 0, d // 5]
    return Layout(tuple("abcd"), tuple(_filters(size) for size in sizes))


def _filters(size: int) -> tuple[int, ...]:
    """The shape of a convolution of so many weights, with the largest filters of 9 weights or fewer that fit."""
    cell = next(cell for cell in (9, 5, 4, 3, 2, 1) if size % cell == 0)
    return size // cell, 1, cell
