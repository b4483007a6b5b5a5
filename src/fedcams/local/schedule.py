"""Which examples make up which batch: a function of (seed, round, client), drawn on the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedcams.keys import generator
from fedcams.local.sgd import SGD

Batch = NDArray[np.int64]


def batches(local: SGD, examples: int, seed: int, round: int, client: int) -> list[Batch]:
    """The example numbers of each step of a client's training in a round."""
    rng = generator(seed, "shuffle", round, client)
    endless = itertools.chain.from_iterable(_epoch(local, rng.permutation(examples)) for _ in itertools.count())
    return list(itertools.islice(endless, step_count(local, examples)))


def step_count(local: SGD, examples: int) -> int:
    """How many steps a client with so many examples takes in a round."""
    if local.steps is not None:
        return local.steps
    whole, rest = divmod(examples, local.batch)
    return (local.epochs or 1) * max(1, whole + (rest > 0 and not local.drop_last))


def _epoch(local: SGD, order: NDArray[np.int64]) -> Iterator[Batch]:
    """One pass: full batches, and the last one where it is kept or the only one."""
    for start in range(0, len(order), local.batch):
        batch = order[start : start + local.batch].astype(np.int64)
        if len(batch) == local.batch or start == 0 or not local.drop_last:
            yield batch
