"""The checksum of our own files: its definition, that ranges combine, and which changes it detects."""

from __future__ import annotations

import numpy as np
import pytest

from fedcams.bits.checksum import range_sums, sums, whole

SIZES = [0, 1, 7, 65_536, 300_001]


def values(size: int) -> np.ndarray:
    return np.random.default_rng(size).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_it_says(size: int) -> None:
    words = [int(word) for word in values(size).view(np.uint32)]
    by_hand = sum(words) % 2**64, sum((i + 1) * word for i, word in enumerate(words)) % 2**64
    assert sums(values(size)) == by_hand


@pytest.mark.parametrize("size", SIZES)
def test_ranges_in_any_order_add_up(size: int) -> None:
    data, cuts = values(size), [0, size // 3, size // 3, size]
    ranges = [range_sums(data[a:b].view(np.uint32), a) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert whole(ranges[::-1]) == sums(data)


def test_it_notices_what_happens_to_files() -> None:
    data = values(10_000)
    swapped, moved, cleared, flipped = (data.copy() for _ in range(4))
    swapped[[3, 9000]] = swapped[[9000, 3]]
    moved[:] = np.roll(moved, 1)
    cleared[1024:2048] = 0
    flipped.view(np.uint32)[77] ^= 1
    found = {sums(changed) for changed in (data, swapped, moved, cleared, flipped)}
    assert len(found) == 5
