"""Checksums of long data on several threads: CRC-32 for messages, and a cheaper sum for files.

CRC-32 reads the data as a polynomial over two elements, and takes the remainder of its division by a fixed polynomial.
Appending data multiplies what came before by a power of x. So each range has its own checksum, and a few products join
them.

The cheaper sum takes one read of memory; CRC-32 takes several times as long. For 32-bit words w[0], w[1], ... it is
the sum of w[i] and the sum of (i + 1) w[i], each modulo 2**64. The first changes with any word, the second with their
order. The sums of ranges add up, so threads may compute them in any order.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fedcams.bits.parallel import BLOCK, kernel, map_ranges

# -- CRC-32 --------------------------------------------------------------------------------------------------------

POLYNOMIAL = 0xEDB88320
"""CRC-32's polynomial, lowest power first: bit 31 is 1, bit 30 is x, and x**32 is left out."""
ONE, X = 1 << 31, 1 << 30
CRC_RESIDUE = 0x2144DF1C
"""The checksum of data that ends with its own checksum, as payloads and messages do."""
LONG = 16 * BLOCK
"""From this many bytes on, threads pay off."""


def crc32(data: bytes | bytearray | memoryview, start: int = 0) -> int:
    """Return `zlib.crc32(data, start)`; long data is split over threads."""
    view = memoryview(data).cast("B")
    if len(view) < LONG:
        return zlib.crc32(view, start)
    for length, found in map_ranges(len(view), lambda a, b: (b - a, zlib.crc32(view[a:b]))):
        start = joined(start, found, length)
    return start


def crc32_of(parts: Iterable[bytes | memoryview]) -> int:
    """Return the CRC-32 of parts that follow each other."""
    return functools.reduce(lambda checksum, part: crc32(part, checksum), parts, 0)


def joined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of data with the checksum `first`, followed by `length` bytes with the checksum `second`."""
    return _times(first, _power(length)) ^ second


@functools.lru_cache(64)
def _power(length: int) -> int:
    """Return x**(8 * length)."""
    result, square = ONE, X
    exponent = 8 * length
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square = _times(square, square)
        exponent >>= 1
    return result


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials modulo CRC-32's."""
    product = 0
    for power in range(31, -1, -1):
        if a >> power & 1:
            product ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product


# -- sums ----------------------------------------------------------------------------------------------------------

Sums = tuple[int, int]
MODULUS = 2**64


def sums(values: NDArray[np.float32]) -> Sums:
    """Return both sums of values `[n]`."""
    words = values.view(np.uint32)
    return whole(map_ranges(words.size, lambda a, b: range_sums(words[a:b], a)))


def range_sums(words: NDArray[np.uint32], at: int) -> Sums:
    """Return both sums of words `[n]` that start at position `at`, on one thread."""
    first, second = map(int, _sums(words))
    return first, (second + at * first) % MODULUS


def whole(parts: list[Sums]) -> Sums:
    """Return the sums of the whole from those of its ranges."""
    return sum(first for first, _ in parts) % MODULUS, sum(second for _, second in parts) % MODULUS


@kernel
def _sums(words: NDArray[np.uint32]) -> tuple[np.uint64, np.uint64]:
    first, second = np.uint64(0), np.uint64(0)
    for i in range(words.size):
        word = np.uint64(words[i])
        first += word
        second += word * np.uint64(i + 1)
    return first, second
