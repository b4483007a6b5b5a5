"""The steps of a whole cohort laid out as one grid: who takes part in each, and which examples they see."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcams.local import Plan

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Grid:
    """S steps of C clients with up to B examples each."""

    example: Integers
    """`[S, C, B]`, places in the pool; padding repeats the batch's first, since 0 times another client's NaN is NaN."""
    draw: Integers
    """`[S, C, B]`, places among the cohort's augmentation draws laid end to end."""
    size: Integers
    """`[S, C]`, real examples of each batch; zero where a client is done."""

    @property
    def weight(self) -> NDArray[np.float64]:
        """`[S, C, B]`, what each example counts in its batch's mean: 1/size, and zero for padding."""
        real = np.arange(self.example.shape[-1]) < self.size[..., None]
        weight: NDArray[np.float64] = real / np.maximum(self.size, 1)[..., None]
        return weight

    @functools.cached_property
    def active(self) -> list[int]:
        """How many clients take each step: the first ones, where clients with more steps come first."""
        active: list[int] = (self.size > 0).sum(-1).tolist()
        return active

    def groups(self, step: int) -> Iterator[tuple[slice | Integers, int]]:
        """The clients that take a step, those with batches of one size together: their rows, and that size."""
        sizes = self.size[step]
        for size in np.unique(sizes[sizes > 0]):
            rows = np.flatnonzero(sizes == size)
            first = bool(rows[-1] == len(rows) - 1)
            yield slice(0, len(rows)) if first else rows, int(size)


def lay_out(
    plans: Sequence[Plan], places: Sequence[Integers], width: int | None = None, rows: int | None = None
) -> Grid:
    """The grid of clients with these plans and these places of their examples in the pool.

    It is as wide as the largest batch, or `width`; of `rows` those without a client have nothing to do.
    """
    size = np.zeros((rows or len(plans), max(len(plan.sizes) for plan in plans)), np.int64)
    for row, plan in zip(size, plans, strict=False):
        row[: len(plan.sizes)] = plan.sizes
    real = np.arange(width or size.max()) < size[..., None]
    example, draw = np.zeros(real.shape, np.int64), np.zeros(real.shape, np.int64)
    seen = [part[plan.order] for part, plan in zip(places, plans, strict=True)]
    example[: len(seen)] = np.array([own[0] for own in seen])[:, None, None]
    example[real] = np.concatenate(seen)
    example = np.where(real, example, example[..., :1])
    draw[real] = np.arange(size.sum())
    return Grid(example.swapaxes(0, 1), draw.swapaxes(0, 1), size.T)
