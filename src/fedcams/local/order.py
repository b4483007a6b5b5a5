"""Which examples make up which batch: a function of (seed, round, client), drawn on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcams.keys import permutations
from fedcams.local.base import Local

Batch = NDArray[np.int64]


class BatchOrder(NamedTuple):
    """The batches of one client in one round."""

    order: Batch
    """The example numbers in the order in which they are seen, batch after batch."""
    sizes: list[int]
    """How many of them make up each batch."""

    def batches(self) -> list[Batch]:
        """Returns the example numbers of each step."""
        return np.split(self.order, np.cumsum(self.sizes)[:-1])


def batch_order(local: Local, examples: int, seed: int, round: int, client: int) -> BatchOrder:
    """Returns which of its examples a client sees in a round, step by step."""
    each = _epoch(local, examples)
    steps = local.steps or (local.epochs or 1) * len(each)
    epochs = -(-steps // len(each))
    used, sizes = sum(each), (each * epochs)[:steps]
    shuffled = permutations(epochs, examples, seed, "shuffle", round, client)
    order = np.concatenate(shuffled if used == examples else [epoch[:used] for epoch in shuffled])
    return BatchOrder(order[: sum(sizes)], sizes)


def batches(local: Local, examples: int, seed: int, round: int, client: int) -> list[Batch]:
    """Returns the example numbers of each step of a client's training in a round."""
    return batch_order(local, examples, seed, round, client).batches()


def step_count(local: Local, examples: int) -> int:
    """Returns how many steps a client with so many examples takes in a round."""
    return local.steps or (local.epochs or 1) * len(_epoch(local, examples))


def _epoch(local: Local, examples: int) -> list[int]:
    """The sizes of the batches of one pass: full ones, and the last one where it is kept or the only one."""
    whole, rest = divmod(examples, local.batch)
    keep = rest > 0 and (whole == 0 or not local.drop_last)
    return [local.batch] * whole + [rest] * keep
