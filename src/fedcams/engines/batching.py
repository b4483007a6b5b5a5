"""The steps of a whole cohort: which rows take part in each, and which examples they see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from fedcams.local.schedule import Batch

Integers = NDArray[np.int64]


class Step(NamedTuple):
    """One batched step of some rows of the stack, G of them, B examples each."""

    rows: slice | Tensor
    """The rows that take part; a slice wherever they are the first ones, so that nothing is copied."""
    example: Tensor
    """`[G, B]`, places among the cohort's examples laid end to end."""
    draw: Tensor
    """`[G, B]`, places among the cohort's augmentation draws laid end to end."""
    weight: Tensor
    """`[G, B]`, what each example counts in its batch's mean: 1/size, and zero for padding."""
    sizes: Tensor
    """`[G]`, real examples of each batch."""
    active: int
    """How many rows, the first ones, really take this step; fewer than G only in steps of a fixed shape."""

    @property
    def numbers(self) -> list[int]:
        """The numbers of the rows."""
        return self.rows.tolist() if isinstance(self.rows, Tensor) else list(range(self.rows.stop))

    def filled(self, rows: int, width: int) -> Step:
        """The same with that many rows and examples; what is added weighs nothing."""
        count, used = self.weight.shape
        grown = (0, width - used, 0, rows - count)
        example, draw, weight = (pad(grid, grown) for grid in (self.example, self.draw, self.weight))
        return Step(slice(0, rows), example, draw, weight, pad(self.sizes, (0, rows - count)), self.active)

    def to(self, device: torch.device) -> Step:
        """The same on a device."""
        rows = self.rows.to(device) if isinstance(self.rows, Tensor) else self.rows
        grids = (self.example.to(device), self.draw.to(device), self.weight.to(device))
        return Step(rows, *grids, self.sizes.to(device), self.active)


def steps(
    plans: Sequence[Sequence[Batch]], examples: Sequence[int], padded: bool, fixed: int | None = None
) -> Iterator[Step]:
    """The steps of clients with these plans, the longest plan first.

    With `padded` all rows that are still active make one step, short batches filled up with examples of weight zero;
    otherwise there is one step for each size of batch. With `fixed` every step has all rows and that many examples a
    row, so that its shape is always the same, which compiled code wants.
    """
    first_example = np.cumsum([0, *examples[:-1]])
    first_draw = np.cumsum([0, *(sum(map(len, plan)) for plan in plans[:-1])])
    for number in range(len(plans[0])):
        active = [plan[number] for plan in plans if len(plan) > number]
        seen = np.array([sum(map(len, plan[:number])) for plan in plans[: len(active)]])
        sizes = np.array([len(batch) for batch in active])
        for chosen in [np.arange(len(active))] if padded else _by_size(sizes):
            batches = [active[i] for i in chosen]
            step = _step(chosen, batches, first_example[chosen], first_draw[chosen] + seen[chosen])
            yield step if fixed is None else step.filled(len(plans), fixed)


def _by_size(sizes: Integers) -> list[Integers]:
    return [np.flatnonzero(sizes == size) for size in np.unique(sizes)]


def _step(chosen: Integers, batches: list[Batch], first_example: Integers, first_draw: Integers) -> Step:
    sizes = np.array([len(batch) for batch in batches])
    real = np.arange(sizes.max()) < sizes[:, None]
    index = np.zeros(real.shape, np.int64)
    index[real] = np.concatenate(batches)
    draw = np.where(real, np.arange(sizes.max()) + first_draw[:, None], first_draw[:, None])
    prefix = bool((chosen == np.arange(len(chosen))).all())
    return Step(
        slice(0, len(chosen)) if prefix else torch.from_numpy(chosen),
        torch.from_numpy(index + first_example[:, None]),
        torch.from_numpy(draw),
        torch.from_numpy(real / sizes[:, None]),
        torch.from_numpy(sizes),
        len(chosen),
    )
