"""The steps of a whole cohort as one grid: which clients take part in each step, and which examples they see."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams.engines.problem import Problem
from fedcams.local import BatchOrder, Local, batch_order

if TYPE_CHECKING:
    from torch import Tensor

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Grid:
    """S steps of C clients with up to B examples each."""

    example: Integers
    """`[S, C, B]`, places in the pool; padding repeats the batch's first: 0 times another client's NaN would be NaN."""
    draw: Integers
    """`[S, C, B]`, places in the concatenation of the cohort's augmentation draws."""
    size: Integers
    """`[S, C]`, the number of real examples in each batch; zero if a client is done."""

    @property
    def weight(self) -> NDArray[np.float64]:
        """The weight `[S, C, B]` of each example in its batch's mean: 1/size, and zero for padding."""
        real = np.arange(self.example.shape[-1]) < self.size[..., None]
        weight: NDArray[np.float64] = real / np.maximum(self.size, 1)[..., None]
        return weight

    @functools.cached_property
    def active(self) -> list[int]:
        """How many clients take each step; they are the first ones, because clients with more steps come first."""
        active: list[int] = (self.size > 0).sum(-1).tolist()
        return active

    def groups(self, step: int) -> Iterator[tuple[slice | Integers, int]]:
        """Yield the rows of clients that take a step, grouped by the size of their batches, with that size."""
        sizes = self.size[step]
        for size in np.unique(sizes[sizes > 0]):
            rows = np.flatnonzero(sizes == size)
            first = bool(rows[-1] == len(rows) - 1)
            yield slice(0, len(rows)) if first else rows, int(size)


def lay_out(
    orders: Sequence[BatchOrder], places: Sequence[Integers], width: int | None = None, rows: int | None = None
) -> Grid:
    """Return the grid of clients with these orders and these places of their examples in the pool.

    It is as wide as the largest batch, or `width`. Rows without a client, up to `rows`, have nothing to do.
    """
    size = np.zeros((rows or len(orders), max(len(each.sizes) for each in orders)), np.int64)
    for row, each in zip(size, orders, strict=False):
        row[: len(each.sizes)] = each.sizes
    real = np.arange(width or size.max()) < size[..., None]
    example, draw = np.zeros(real.shape, np.int64), np.zeros(real.shape, np.int64)
    seen = [part[each.order] for part, each in zip(places, orders, strict=True)]
    example[: len(seen)] = np.array([own[0] for own in seen])[:, None, None]
    example[real] = np.concatenate(seen)
    example = np.where(real, example, example[..., :1])
    draw[real] = np.arange(size.sum())
    return Grid(example.swapaxes(0, 1), draw.swapaxes(0, 1), size.T)


def padded_width(local: Local, orders: Sequence[BatchOrder]) -> int:
    """Return the size to which batches are padded: that of a full one, or for small clients some sixteenths of it."""
    part = max(1, local.batch // 16)
    return min(local.batch, -(-max(max(each.sizes) for each in orders) // part) * part)


class Batches:
    """The examples and the augmentation of some clients in one round, drawn on the host and uploaded at once.

    Rows without a client, up to `clients`, have nothing to do.
    """

    def __init__(self, problem: Problem, cohort: Sequence[int], round: int, seed: int, clients: int) -> None:
        self.problem = problem
        self.x, self.y, places = problem.pool(cohort)
        orders = [batch_order(problem.local, len(p), seed, round, c) for c, p in zip(cohort, places, strict=True)]
        self.examples = [len(part) for part in places]
        self.steps = [len(each.sizes) for each in orders]
        self.seen = [len(each.order) for each in orders]
        self.smallest = [min(each.sizes) for each in orders]
        grid = lay_out(orders, places, problem.local.batch, clients)
        self.sizes, self.weight = _upload(problem, grid.size.astype(np.int32)), _upload(problem, grid.weight)
        self.example = _upload(problem, grid.example)
        draws = [problem.draws(len(each.order), seed, round, c) for c, each in zip(cohort, orders, strict=True)]
        self.draws = None if problem.augment is None else torch.cat([d for d in draws if d is not None])
        self.draw = None if self.draws is None else _upload(problem, grid.draw)

    def __len__(self) -> int:
        return len(self.sizes)

    def inputs(self, first: int, last: int) -> Tensor:
        """Return the inputs `[steps, C, B, ...]` of some steps, augmented and prepared."""
        where = self.example[first:last]
        changes = None if self.draw is None or self.draws is None else self.draws[self.draw[first:last].flatten()]
        x: Tensor = self.problem.inputs(self.x[where.flatten()], changes).unflatten(0, where.shape)
        return x

    def targets(self, first: int, last: int) -> Tensor:
        """Return the targets `[steps, C, B, ...]` of some steps."""
        y: Tensor = self.y[self.example[first:last]]
        return y


def _upload(problem: Problem, values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values).to(problem.device)


def weighted(losses: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted sums `[C]` of losses `[C, B]`; a loss of weight zero does not count, even if it is NaN.

    A client that is done has no examples, so batch-norm divides by the root of `eps` in every layer, and what it
    computes for padding overflows.
    """
    return (losses.where(weight > 0, 0) * weight).sum(-1)
