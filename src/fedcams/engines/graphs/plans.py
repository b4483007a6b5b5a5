"""What every client sees in every step, on the device: drawn on the host as everywhere, uploaded at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcams.engines.batching import lay_out
from fedcams.engines.problem import Problem
from fedcams.local import plan


class Batches:
    """The examples and the augmentation of some clients in one round, on the device."""

    def __init__(self, problem: Problem, cohort: Sequence[int], round: int, seed: int, clients: int) -> None:
        self.problem = problem
        self.x, self.y, places = problem.pool(cohort)
        plans = [plan(problem.local, len(p), seed, round, c) for c, p in zip(cohort, places, strict=True)]
        self.examples = [len(part) for part in places]
        self.steps = [len(each.sizes) for each in plans]
        self.seen = [len(each.order) for each in plans]
        self.smallest = [min(each.sizes) for each in plans]
        grid = lay_out(plans, places, problem.local.batch, clients)
        self.sizes, self.weight = _upload(problem, grid.size.astype(np.int32)), _upload(problem, grid.weight)
        self.example = _upload(problem, grid.example)
        draws = [problem.draws(len(each.order), seed, round, c) for c, each in zip(cohort, plans, strict=True)]
        self.draws = None if problem.augment is None else torch.cat([d for d in draws if d is not None])
        self.draw = None if self.draws is None else _upload(problem, grid.draw)

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


def _upload(problem: Problem, values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values).to(problem.device)
