"""Ascending positions as entropy-coded gaps: an adaptive Golomb-Rice code that follows the local density.

A gap g is written as its quotient g >> r in unary (that many 1 bits, then a 0) and its lowest r bits. The parameter r
is never sent: both sides derive it from the previous gaps, starting from the mean gap (d - k) / k. Uniform positions
cost about 1.5% more than log2 C(d, k); clustered positions, as in real networks, cost less than that.
A quotient of 32 or more is escaped (32 ones, then the gap in 40 bits), so that no symbol is longer than 72 bits.
Bits fill each byte from the lowest; the last byte is padded with zeros.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

from fedcams.bits.parallel import kernel, trailing_zeros
from fedcams.errors import BadPadding, BadPosition, NonCanonical, Truncated

ESCAPE = 32
RAW_BITS = 40
MAX_D = 1 << RAW_BITS
HUGE_PAGE = 1 << 21
WINDOW = 32  # sum and count are halved after this many gaps, so recent ones count most

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Positions = NDArray[np.int64]
State = tuple[int, int]  # (sum of recent gaps, number of recent gaps)


@kernel
def _start(d: int, k: int) -> State:
    """Return the state as if `WINDOW / 2` gaps of mean length had been seen."""
    half = WINDOW >> 1
    return half * (d - k) // max(k, 1), half


@kernel
def _parameter(total: int, count: int, r: int) -> int:
    """Return the smallest r with 2^r >= 0.4812 (mean gap + 1), optimal for geometric gaps; in integers, 13/27.

    The search starts at the previous r, which seldom changes, so that the processor predicts the branches.
    """
    while r > 0 and (27 * count << (r - 1)) >= 13 * (total + count):
        r -= 1
    while (27 * count << r) < 13 * (total + count):
        r += 1
    return r


@kernel
def _advance(total: int, count: int, gap: int) -> State:
    total, count = total + gap, count + 1
    if count >= WINDOW:
        return total >> 1, count >> 1
    return total, count


@kernel
def rice_bits(positions: Positions, d: int) -> int:
    """Return the exact length of the code in bits, without writing it."""
    total, count = _start(d, positions.size)
    bits, before, r = 0, -1, 0
    for i in range(positions.size):
        gap = positions[i] - before - 1
        before = positions[i]
        r = _parameter(total, count, r)
        quotient = gap >> r
        bits += quotient + 1 + r if quotient < ESCAPE else ESCAPE + RAW_BITS
        total, count = _advance(total, count, gap)
    return bits


def rice_size(positions: Positions, d: int) -> int:
    """Return the exact length of the code in bytes."""
    return (int(rice_bits(positions, d)) + 7) // 8


def rice_encode(positions: Positions, d: int) -> Bytes:
    """Encode strictly ascending positions in [0, d) as bytes."""
    longest = positions.size * (ESCAPE + RAW_BITS)
    out = np.empty(longest // 32 + 2, np.uint32)
    bits = int(_encode_(positions, d, out))
    return out.view(np.uint8)[: (bits + 7) // 8]


@kernel
def _encode_(positions: Positions, d: int, out: Words) -> int:
    """Write 32 bits at a time; return how many bits were written."""
    total, count = _start(d, positions.size)
    held, width, at, before, r = np.uint64(0), 0, 0, -1, 0  # bits not yet written, how many, the next word
    for i in range(positions.size):
        gap = positions[i] - before - 1
        before = positions[i]
        r = _parameter(total, count, r)
        quotient = gap >> r
        if quotient + r < 32:
            code = ((1 << quotient) - 1) | ((gap & ((1 << r) - 1)) << (quotient + 1))
            held, width, at = _push_(held, width, at, code, quotient + 1 + r, out)
        elif quotient < ESCAPE:
            held, width, at = _push_(held, width, at, (1 << quotient) - 1, quotient + 1, out)
            held, width, at = _push_long_(held, width, at, gap & ((1 << r) - 1), r, out)
        else:
            held, width, at = _push_(held, width, at, (1 << ESCAPE) - 1, ESCAPE, out)
            held, width, at = _push_long_(held, width, at, gap, RAW_BITS, out)
        total, count = _advance(total, count, gap)
    out[at] = np.uint32(held)
    return 32 * at + width


@kernel
def _push_(held: np.uint64, width: int, at: int, code: int, bits: int, out: Words) -> tuple[np.uint64, int, int]:
    """Append a code of at most 32 bits; at most 31 are held before and after.

    A word is written whether it is full or not: a branch would be unpredictable, and so slower.
    """
    held |= np.uint64(code) << np.uint64(width)
    width += bits
    out[at] = np.uint32(held & np.uint64(0xFFFFFFFF))
    full = width >> 5
    return held >> np.uint64(32 * full), width - 32 * full, at + full


@kernel
def _push_long_(held: np.uint64, width: int, at: int, code: int, bits: int, out: Words) -> tuple[np.uint64, int, int]:
    """Append a code of at most 64 bits: r is above 32 if gaps of billions are common."""
    if bits > 32:
        held, width, at = _push_(held, width, at, code & 0xFFFFFFFF, 32, out)
        code, bits = code >> 32, bits - 32
    return _push_(held, width, at, code, bits, out)


_ENDED, _RANGE, _ESCAPED, _PADDED = -1, -2, -3, -4


def rice_decode(data: Bytes, k: int, d: int) -> tuple[Positions, int]:
    """Read k positions from the start of `data`; return them and the bytes they took; refuse damaged data."""
    if k > 8 * data.size:  # each takes at least one bit, so the data bounds the allocation
        raise Truncated(f"{k} positions do not fit into {data.size} bytes")
    words = np.empty(data.size // 4 + 4, np.uint32)
    whole = words.view(np.uint8)
    whole[: data.size], whole[data.size :] = data, 0  # zeros after the end: overruns show in the bits used
    positions = _in_huge_pages(k)
    used = int(_decode_(words, 8 * data.size, d, positions))
    if used == _ENDED:
        raise Truncated(f"the data ends within the {k} positions")
    if used == _RANGE:
        raise BadPosition(f"a position is not in [0, {d})")
    if used == _ESCAPED:
        raise NonCanonical("a gap is escaped although it has a shorter code")
    if used == _PADDED:
        raise BadPadding("the bits after the last position are not zero")
    return positions, used


def _in_huge_pages(k: int) -> Positions:
    """Return new memory for positions, in huge pages if they are many and the system has such pages.

    Making many small pages takes a good part of the time of decoding.
    """
    size = 8 * k
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(k, np.int64)
    memory = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # Linux may be built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.int64, k)


@kernel
def _decode_(words: Words, available: int, d: int, out: Positions) -> int:
    """Read 32 bits at a time; return how many bytes were used, or what is wrong."""
    total, count = _start(d, out.size)
    held, width, at, before, r = np.uint64(0), 0, 0, -1, 0  # bits not yet used, how many, the next word
    for i in range(out.size):
        r = _parameter(total, count, r)
        held, width, at = _fill(words, held, width, at)
        quotient = trailing_zeros(~held)
        if quotient + r < 32:  # at least 33 bits are held
            gap = (quotient << r) | int((held >> np.uint64(quotient + 1)) & np.uint64((1 << r) - 1))
            held, width = held >> np.uint64(quotient + 1 + r), width - (quotient + 1 + r)
        else:
            gap, held, width, at = _read_long(words, held, width, at, min(quotient, ESCAPE), r)
            if gap < 0:
                return _ENDED if 32 * at - width > available else _ESCAPED
        before += 1 + gap
        if before >= d or width < 0:
            return _ENDED if 32 * at - width > available else _RANGE
        out[i] = before
        total, count = _advance(total, count, gap)
    used = (32 * at - width + 7) // 8
    padding = 8 * used - (32 * at - width)
    if used > available // 8:
        return _ENDED
    return _PADDED if held & np.uint64((1 << padding) - 1) else used


@kernel
def _read_long(
    words: Words, held: np.uint64, width: int, at: int, quotient: int, r: int
) -> tuple[int, np.uint64, int, int]:
    """Read a gap of more than 32 bits, escaped or not; it is -1 if the escape was unnecessary."""
    escaped = quotient == ESCAPE
    taken = ESCAPE if escaped else quotient + 1
    held, width = held >> np.uint64(taken), width - taken
    tail, held, width, at = _read_bits(words, held, width, at, RAW_BITS if escaped else r)
    if escaped:
        return tail if tail >> r >= ESCAPE else -1, held, width, at
    return (quotient << r) | tail, held, width, at


@kernel
def _read_bits(words: Words, held: np.uint64, width: int, at: int, need: int) -> tuple[int, np.uint64, int, int]:
    """Return the next `need` bits as an integer, in steps that always fit into what is held."""
    value, taken = 0, 0
    while taken < need:
        held, width, at = _fill(words, held, width, at)
        step = min(need - taken, 32)
        value |= int(held & np.uint64((1 << step) - 1)) << taken
        held, width, taken = held >> np.uint64(step), width - step, taken + step
    return value, held, width, at


@kernel
def _fill(words: Words, held: np.uint64, width: int, at: int) -> tuple[np.uint64, int, int]:
    """Refill to at least 33 bits, as long as there are words."""
    if width <= 32 and at < words.size:
        return held | (np.uint64(words[at]) << np.uint64(width)), width + 32, at + 1
    return held, width, at
