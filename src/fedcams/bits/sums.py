"""A checksum that costs one reading of memory, for files that only this package reads; CRC-32 takes several times that.

Of 32-bit words w[0], w[1], ... it is the sum of w[i] and the sum of (i + 1) w[i], each modulo 2**64. The first changes
with any one word, the second with their order. Sums of ranges add up, so that they may be found on several threads and
in any order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcams.bits.parallel import kernel, map_ranges

Sums = tuple[int, int]
MODULUS = 2**64


def sums(values: NDArray[np.float32], at: int = 0) -> Sums:
    """Both sums of values `[n]` that stand from position `at` on."""
    words = values.view(np.uint32)
    return whole(map_ranges(words.size, lambda a, b: range_sums(words[a:b], at + a)))


def range_sums(words: NDArray[np.uint32], at: int) -> Sums:
    """The same on one thread."""
    first, second = map(int, _sums(words))
    return first, (second + at * first) % MODULUS


def whole(parts: list[Sums]) -> Sums:
    """Of ranges, those of the whole."""
    return sum(first for first, _ in parts) % MODULUS, sum(second for _, second in parts) % MODULUS


@kernel
def _sums(words: NDArray[np.uint32]) -> tuple[np.uint64, np.uint64]:
    first, second = np.uint64(0), np.uint64(0)
    for i in range(words.size):
        word = np.uint64(words[i])
        first += word
        second += word * np.uint64(i + 1)
    return first, second
