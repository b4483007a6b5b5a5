"""Unsigned integers of b bits, one after the other, the lowest bit first, padding zero."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcams.bits.parallel import kernel
from fedcams.bits.signs import packed_size
from fedcams.errors import BadPadding

Bytes = NDArray[np.uint8]
Values = NDArray[np.int64]


def pack_uints(values: Values, bits: int) -> Bytes:
    """int64 `[n]`, each in [0, 2^bits) with bits <= 32 -> `ceil(n bits / 8)` bytes."""
    out = np.zeros(packed_size(values.size * bits), np.uint8)
    _pack_(values, bits, out)
    return out


def unpack_uints(data: Bytes, bits: int, count: int) -> Values:
    """The reverse; refuses padding that is not zero."""
    values = np.empty(count, np.int64)
    if _unpack_(data, bits, values):
        raise BadPadding(f"the bits after the last of {count} {bits}-bit integers are not zero")
    return values


@kernel
def _pack_(values: Values, bits: int, out: Bytes) -> None:
    held, width, at = np.uint64(0), 0, 0
    for i in range(values.size):
        held |= np.uint64(values[i]) << np.uint64(width)
        width += bits
        while width >= 8:
            out[at] = np.uint8(held & np.uint64(255))
            held >>= np.uint64(8)
            width, at = width - 8, at + 1
    if width:
        out[at] = np.uint8(held)


@kernel
def _unpack_(data: Bytes, bits: int, values: Values) -> bool:
    """Returns whether anything but zeros is left."""
    held, width, at = np.uint64(0), 0, 0
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(values.size):
        while width < bits:
            held |= np.uint64(data[at]) << np.uint64(width)
            width, at = width + 8, at + 1
        values[i] = np.int64(held & mask)
        held >>= np.uint64(bits)
        width -= bits
    return bool(held != 0)
