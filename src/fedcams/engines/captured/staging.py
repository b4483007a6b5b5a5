"""A client's batches, gathered, augmented and prepared ahead of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.engines.batches import Integers, lay_out, padded_width
from fedcams.engines.captured.step import Batch
from fedcams.engines.problem import Problem
from fedcams.engines.trees import map_tensors, numbers_per_example, take
from fedcams.local import batch_order

if TYPE_CHECKING:
    from torch import Tensor

AHEAD = 2**28
"""Bytes of inputs that are prepared at once for one client."""


@dataclass(frozen=True)
class Staged:
    """Some successive steps of a client."""

    batches: Batch
    """Every tensor `[steps, B, ...]`."""
    sizes: list[int]
    """The number of real examples in each batch."""
    full: int
    """The size of a batch that is not the last of an epoch."""

    def batch(self, step: int) -> Batch:
        """Return the batch of a step: with padding, or cut to its size if there is none."""
        if self.batches.real is None:
            return Batch(*take(tuple(self.batches), (step, slice(self.sizes[step]))))
        return Batch(*take(tuple(self.batches), step))

    def is_full(self, step: int) -> bool:
        """Return whether batches like that of a step are most of all batches."""
        return self.batches.real is not None or self.sizes[step] == self.full


class Staging:
    """The batches of one client in a round."""

    def __init__(self, problem: Problem, client: int, round: int, seed: int, channels_last: bool) -> None:
        self.problem, self.channels_last = problem, channels_last
        self.x, self.y, places = problem.pool([client])
        self.order = batch_order(problem.local, len(places[0]), seed, round, client)
        self.examples, self.seen = len(places[0]), len(self.order.order)
        self.width = padded_width(problem.local, [self.order]) if problem.may_pad else max(self.order.sizes)
        self.grid = lay_out([self.order], places, self.width)
        self.draws = problem.draws(self.seen, seed, round, client)

    def parts(self) -> Iterator[Staged]:
        """Yield all steps of the client, as many at once as fit into `AHEAD` bytes.

        Batches are padded to one size if that changes nothing; otherwise each has its own.
        """
        some = max(1, AHEAD // (4 * self.width * numbers_per_example(self.x)))
        for first in range(0, len(self.order.sizes), some):
            yield self._part(slice(first, first + some))

    def _part(self, steps: slice) -> Staged:
        problem, width = self.problem, self.width
        example = self._upload(self.grid.example[steps, 0])
        drawn = None if self.draws is None else self.draws[self._upload(self.grid.draw[steps, 0])]
        inputs, targets = problem.inputs(take(self.x, example), drawn), take(self.y, example)
        inputs = map_tensors(as_channels_last, inputs) if self.channels_last else inputs
        inputs, targets = map_tensors(lambda part: part.unflatten(0, (-1, width)), (inputs, targets))
        sizes = self.grid.size[steps, 0].tolist()
        real = _real(problem, sizes, width) if problem.may_pad else None
        return Staged(Batch(inputs, targets, real), sizes, problem.local.batch)

    def _upload(self, places: Integers) -> Tensor:
        return torch.from_numpy(places.flatten()).to(self.problem.device)


def _real(problem: Problem, sizes: list[int], width: int) -> Tensor:
    """Return one for every example and zero for padding, `[steps, B]`."""
    real = torch.arange(width) < torch.tensor(sizes)[:, None]
    return real.to(problem.device, problem.sum_dtype)


def as_channels_last(images: Tensor) -> Tensor:
    """Return images `[n, k, h, w]` with channels last in memory, where convolutions are faster; others unchanged."""
    if images.dim() != 4 or not images.is_floating_point():
        return images
    return images.contiguous(memory_format=torch.channels_last)
