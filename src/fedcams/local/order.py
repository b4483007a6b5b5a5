"""The order of examples in batches: a function of (seed, round, client), drawn on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcams.keys import generator, permutations
from fedcams.local.base import Local

Batch = NDArray[np.int64]


class BatchOrder(NamedTuple):
    """The batches of one client in one round."""

    order: Batch
    """The numbers of the examples in the order in which they are seen, batch after batch."""
    sizes: list[int]
    """The number of examples in each batch."""

    def batches(self) -> list[Batch]:
        """Return the numbers of the examples in each batch."""
        return np.split(self.order, np.cumsum(self.sizes)[:-1])


def batch_order(local: Local, examples: int, seed: int, round: int, client: int) -> BatchOrder:
    """Return which of its examples a client sees in each step of a round.

    Arguments:
        local: the local rule, which has epochs or steps and the batch size.
        examples: how many examples the client has.
        seed: that of the run.
        round: the round, from 1.
        client: the client's number.

    Returns:
        The numbers of the examples, one batch after another, and the size of each batch.

    Examples:
        >>> from fedcams.local import batch_order, local
        >>> batch_order(local("sgd(epochs=1, batch=2)"), examples=5, seed=1, round=1, client=0).sizes
        [2, 2, 1]
    """
    epoch_sizes = _epoch(local, examples)
    steps = local.steps or (local.epochs or 1) * len(epoch_sizes)
    epochs = -(-steps // len(epoch_sizes))
    used, sizes = sum(epoch_sizes), (epoch_sizes * epochs)[:steps]
    if local.replace:
        return BatchOrder(generator(seed, "draw", round, client).integers(examples, size=sum(sizes)), sizes)
    shuffled = permutations(epochs, examples, seed, "shuffle", round, client)
    order = np.concatenate(shuffled if used == examples else [epoch[:used] for epoch in shuffled])
    return BatchOrder(order[: sum(sizes)], sizes)


def batches(local: Local, examples: int, seed: int, round: int, client: int) -> list[Batch]:
    """Return the numbers of the examples in each batch of a client's training in a round.

    Arguments:
        local: the local rule, which has epochs or steps and the batch size.
        examples: how many examples the client has.
        seed: that of the run.
        round: the round, from 1.
        client: the client's number.

    Returns:
        One array per batch.

    Examples:
        >>> from fedcams.local import batches, local
        >>> drawn = batches(local("sgd(epochs=1, batch=2)"), examples=4, seed=1, round=1, client=0)
        >>> sorted(int(number) for batch in drawn for number in batch)
        [0, 1, 2, 3]
    """
    return batch_order(local, examples, seed, round, client).batches()


def step_count(local: Local, examples: int) -> int:
    """Return how many steps a client takes per round.

    Arguments:
        local: the local rule, which has epochs or steps and the batch size.
        examples: how many examples the client has.

    Returns:
        The number of steps.

    Examples:
        >>> from fedcams.local import local, step_count
        >>> step_count(local("sgd(epochs=3, batch=20)"), examples=400)
        60
    """
    return local.steps or (local.epochs or 1) * len(_epoch(local, examples))


def _epoch(local: Local, examples: int) -> list[int]:
    """Return the sizes of the batches of one pass: full ones, and the last one if it is kept or the only one."""
    whole, rest = divmod(examples, local.batch)
    keep = rest > 0 and (whole == 0 or not local.drop_last)
    return [local.batch] * whole + [rest] * keep
