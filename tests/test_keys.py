"""Randomness as a function of (seed, purpose, round, client)."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from fedcams import encode
from fedcams.keys import derive, generator, permutations


def test_every_argument_matters_and_nothing_else() -> None:
    keys = {
        derive(seed, purpose, round, client)
        for seed in (0, 1, -1, 2**63)
        for purpose in ("shuffle", "sample")
        for round in (0, 1, 500)
        for client in (0, 1, 2**64 - 1)
    }
    assert len(keys) == 4 * 2 * 3 * 3
    assert derive(1, "shuffle", 2, 3) == derive(1, "shuffle", 2, 3)


def test_keys_and_draws_are_stable_across_versions() -> None:
    assert derive(1, "shuffle", 2, 3) == 12209317583253077249
    assert generator(1, "shuffle", 2, 3).permutation(8).tolist() == [6, 1, 5, 7, 3, 4, 2, 0]


def test_numpys_integers_count_as_pythons() -> None:
    assert derive(np.int64(-1), "shuffle", np.int32(2), np.uint64(2**64 - 1)) == derive(-1, "shuffle", 2, 2**64 - 1)
    x = torch.arange(9.0)
    assert encode("randk(k=3)", x, key=cast(int, np.int64(7))) == encode("randk(k=3)", x, key=7)


def test_permutations_are_those_of_a_fresh_generator() -> None:
    for client in (3, 4, 3):
        fresh = generator(1, "shuffle", 2, client)
        expected = [fresh.permutation(9).tolist() for _ in range(3)]
        assert [order.tolist() for order in permutations(3, 9, 1, "shuffle", 2, client)] == expected


def test_generators_are_fresh_each_time() -> None:
    assert generator(1, "a").random() == generator(1, "a").random()
    assert generator(1, "a").random() != generator(1, "b").random()
