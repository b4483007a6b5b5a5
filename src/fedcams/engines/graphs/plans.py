"""What every client sees in every step, as grids of numbers: drawn on the host as everywhere, uploaded at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcams.engines.problem import Problem
from fedcams.engines.shards import Examples
from fedcams.errors import UpdateError
from fedcams.local import batches
from fedcams.local.schedule import Batch


@runtime_checkable
class Pooled(Protocol):
    """Clients whose examples are parts of one data set that is held once."""

    @property
    def pool(self) -> Examples:
        """All examples."""

    def part(self, client: int) -> Tensor:
        """int64 `[n]`, where a client's examples stand in the pool."""


@dataclass(frozen=True)
class Grids:
    """`[S, C, B]` for S steps of C clients with at most B examples each; a client that is done has size 0."""

    example: NDArray[np.int64]
    """Places among the client's own examples."""
    draw: NDArray[np.int64]
    """Places among the client's augmentation draws, which are in the order of use."""
    sizes: NDArray[np.int32]
    """`[S, C]`."""

    @property
    def weight(self) -> NDArray[np.float64]:
        """What each example counts in its batch's mean: 1/size, and zero for what fills the batch up."""
        real = np.arange(self.example.shape[-1]) < self.sizes[..., None]
        return real / np.maximum(self.sizes, 1)[..., None]


def grids(plans: Sequence[Sequence[Batch]], width: int, clients: int) -> Grids:
    """The grids of these plans; rows beyond them are clients that have nothing to do."""
    steps = max(map(len, plans))
    sizes = np.zeros((steps, clients), np.int32)
    example = np.zeros((steps, clients, width), np.int64)
    draw = np.zeros_like(example)
    for row, plan in enumerate(plans):
        lengths = np.array([len(batch) for batch in plan])
        sizes[: len(plan), row] = lengths
        real = np.arange(width) < lengths[:, None]
        example[: len(plan), row][real] = np.concatenate(plan)
        draw[: len(plan), row][real] = np.arange(lengths.sum())
    return Grids(example, draw, sizes)


class Batches:
    """The examples and the augmentation of some clients in one round, on the device."""

    def __init__(self, problem: Problem, cohort: Sequence[int], round: int, seed: int, clients: int) -> None:
        self.problem = problem
        (self.x, self.y), places = _examples(problem, cohort)
        self.examples = [len(part) for part in places]
        plans = [batches(problem.local, len(p), seed, round, c) for c, p in zip(cohort, places, strict=True)]
        self.steps = [len(plan) for plan in plans]
        self.seen = [sum(map(len, plan)) for plan in plans]
        self.smallest = [min(map(len, plan)) for plan in plans]
        table = grids(plans, problem.local.batch, clients)
        self.sizes, self.weight = _upload(problem, table.sizes), _upload(problem, table.weight)
        rows = np.arange(len(cohort))
        self.example = _placed(problem, places, table.example, rows)
        draws = [problem.draws(count, seed, round, c) for c, count in zip(cohort, self.seen, strict=True)]
        self.draws = None if problem.augment is None else torch.cat([d for d in draws if d is not None])
        firsts = np.cumsum([0, *self.seen[:-1]])
        table.draw[:, rows] += firsts[:, None]
        self.draw = None if self.draws is None else _upload(problem, table.draw)

    def __len__(self) -> int:
        return len(self.sizes)

    def inputs(self, first: int, last: int) -> Tensor:
        """`[steps, C, B, ...]` of these steps, augmented and prepared; images with channels last."""
        where = self.example[first:last]
        changes = None if self.draw is None or self.draws is None else self.draws[self.draw[first:last].flatten()]
        x = self.problem.inputs(self.x[where.flatten()], changes).unflatten(0, where.shape)
        return channels_last(x)

    def targets(self, first: int, last: int) -> Tensor:
        """`[steps, C, B, ...]`."""
        return self.y[self.example[first:last]]


def channels_last(x: Tensor) -> Tensor:
    """`[..., k, h, w] -> [..., h, w, k]` for steps of images `[S, C, B, k, h, w]`; others as they are."""
    return x.movedim(-3, -1) if x.dim() == 6 else x


def _examples(problem: Problem, cohort: Sequence[int]) -> tuple[Examples, list[Tensor]]:
    """One pool of examples on the model's device, and where each client's stand in it."""
    held = problem.clients
    if isinstance(held, Pooled) and held.pool[0].device == problem.device:
        parts = [held.part(client) for client in cohort]
        for client, part in zip(cohort, parts, strict=True):
            if len(part) == 0:
                raise UpdateError(f"client {client} has 0 inputs and 0 targets; give one target each, one or more")
        return held.pool, parts
    data = [problem.examples_of(client) for client in cohort]
    firsts = np.cumsum([0, *(len(x) for x, _ in data)])
    places = [torch.arange(a, b, device=problem.device) for a, b in zip(firsts[:-1], firsts[1:], strict=True)]
    return (torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])), places


def _placed(problem: Problem, places: Sequence[Tensor], example: NDArray[np.int64], rows: NDArray[np.int64]) -> Tensor:
    """`[S, C, B]`, places in the pool; what fills up a batch is some client's first example."""
    lengths = np.array([len(part) for part in places])
    firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    example[:, rows] += firsts[:, None]
    return torch.cat(list(places))[_upload(problem, example)]


def _upload(problem: Problem, values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values).to(problem.device)
