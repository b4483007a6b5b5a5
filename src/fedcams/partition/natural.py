"""Natural: the data names the owner of each example."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fedcams.errors import SpecError
from fedcams.partition.base import Ints, Partition
from fedcams.registry import register


@register("natural")
@dataclass(frozen=True)
class Natural(Partition):
    """Makes one client per group of `keys` (the writer of a text, the user of a phone), in ascending order of keys.

    With fewer clients than groups, whole groups are dealt in turn: group g goes to client g mod clients. Only the order
    within a client is random.
    """

    reference = "Caldas et al., LEAF: A Benchmark for Federated Settings, 2018"
    examples = ("natural",)
    refused = (("natural(3)", "at most 0 values"), ("natural(key=writer)", "has no key 'key'"))

    def owners(self, labels: Ints, clients: int, rng: Generator, keys: Ints | None) -> Ints:
        if keys is None:
            raise SpecError(
                "natural: keys=None, so the owners of the examples are unknown; give the group of each example, or use "
                "another partition, such as iid"
            )
        groups, group = np.unique(keys, return_inverse=True)
        if clients > len(groups):
            raise SpecError(f"natural: clients={clients}, but keys has {len(groups)} groups; give at most that many")
        return group % clients
