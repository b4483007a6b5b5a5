"""Shards: sort by label, cut into pieces, and give every client a few of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fedcams.errors import SpecError
from fedcams.partition.base import Ints, Partition, shuffled_by
from fedcams.registry import integer, register


@register("shards")
@dataclass(frozen=True)
class Shards(Partition):
    """Sorts examples by label, cuts them into clients·per_client shards of equal size (±1), and deals these at random.

    A shard has one label, or a few if it crosses a boundary: all clients together see at most
    clients·per_client + classes - 1 pairs of client and label.
    """

    per_client: int = integer(2, low=1, doc="shards per client, which is about its number of labels")

    reference = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"
    examples = ("shards", "shards(per_client=5)")
    refused = (
        ("shards(per_client=0)", r"allowed: an integer in \[1, inf\)"),
        ("shards(per_client=1.5)", "not a whole number"),
    )

    def owners(self, labels: Ints, clients: int, rng: Generator, keys: Ints | None) -> Ints:
        shards, n = clients * self.per_client, len(labels)
        if shards > n:
            raise SpecError(
                f"shards: per_client={self.per_client} and clients={clients} make {shards} shards of {n} examples; "
                f"lower one of them"
            )
        dealt = rng.permutation(np.arange(shards) % clients)
        owners = np.empty_like(labels)
        owners[shuffled_by(labels, rng)] = dealt[np.arange(n) * shards // n]
        return owners
