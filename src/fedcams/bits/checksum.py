"""CRC-32 of long data on several threads: zlib's, range by range, put together as if it had been one.

A CRC is what is left of the data as a polynomial over two elements, divided by a fixed one; data that follow multiply
what was before by a power of x. So ranges can be summed up apart, and a few products join them.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable

from fedcams.bits.parallel import BLOCK, map_ranges

POLYNOMIAL = 0xEDB88320
"""CRC-32's, lowest power first: bit 31 is 1, bit 30 is x, and x**32 is left out."""
ONE, X = 1 << 31, 1 << 30
SEALED = 0x2144DF1C
"""The checksum of whatever ends in its own checksum, as payloads and messages do; of nothing else that long."""
LONG = 16 * BLOCK
"""Bytes from which threads pay."""


def crc32(data: bytes | bytearray | memoryview, start: int = 0) -> int:
    """`zlib.crc32`."""
    view = memoryview(data).cast("B")
    if len(view) < LONG:
        return zlib.crc32(view, start)
    for length, found in map_ranges(len(view), lambda a, b: (b - a, zlib.crc32(view[a:b]))):
        start = joined(start, found, length)
    return start


def crc32_of(parts: Iterable[bytes | memoryview], start: int = 0) -> int:
    """Of parts that follow each other."""
    return functools.reduce(lambda checksum, part: crc32(part, checksum), parts, start)


def joined(first: int, second: int, length: int) -> int:
    """The checksum of data with the checksum `first`, followed by `length` bytes with the checksum `second`."""
    return _times(first, _power(length)) ^ second


@functools.lru_cache(64)
def _power(length: int) -> int:
    """x**(8 * length)."""
    result, square = ONE, X
    exponent = 8 * length
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square = _times(square, square)
        exponent >>= 1
    return result


def _times(a: int, b: int) -> int:
    """The product of two polynomials, less all multiples of CRC-32's."""
    product = 0
    for power in range(31, -1, -1):
        if a >> power & 1:
            product ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product
