"""IID: every client gets a random sample of the same size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fedcams.partition.base import Ints, Partition
from fedcams.registry import register


@register("iid")
@dataclass(frozen=True)
class IID(Partition):
    """Cuts a random permutation into equal parts; sizes differ by at most one."""

    reference = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"
    examples = ("iid",)
    refused = (("iid(2)", "at most 0 values"), ("iid(alpha=1)", "has no key 'alpha'"))

    def owners(self, labels: Ints, clients: int, rng: Generator, keys: Ints | None) -> Ints:
        return rng.permutation(np.arange(len(labels)) % clients)
