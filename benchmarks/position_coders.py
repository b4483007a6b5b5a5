"""Codes of kept positions that `positions.py` compares with the one that payloads use.

A binary arithmetic coder with adaptive probabilities stands behind two models: one of the gaps between positions, and
one of the bit kept or dropped of every coordinate, in the context of what its output channel, its input channel and
its cell (`fedcams.bits.cells`) have kept so far. Each model is one loop that both writes and reads.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcams.bits.cells import Cells
from fedcams.bits.parallel import kernel
from fedcams.bits.rice import rice_encode
from fedcams.layout import Layout

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]
Odds = NDArray[np.int64]
State = tuple[int, int, int, int]  # bounds of the interval, what is read of it, the next byte
MASK = 0xFFFFFFFF
SPARE = 16  # bytes behind the end of the data that a reader may touch
LEVELS = 32


# -- Golomb-Rice, tensor by tensor -----------------------------------------------------------------------------------


def tensor_rice(positions: Positions, layout: Layout) -> int:
    """Return the bytes of today's code, started again in each tensor after its number of positions in 4 bytes."""
    bounds = np.searchsorted(positions, layout.offsets)
    parts = zip(layout.offsets, layout.sizes, bounds, bounds[1:], strict=False)
    return sum(4 + rice_encode(positions[a:b] - start, size).size for start, size, a, b in parts)


# -- the arithmetic coder --------------------------------------------------------------------------------------------


@kernel
def _start(data: Bytes, reading: bool) -> State:
    read = 0
    if reading:
        for i in range(4):
            read = (read << 8) | int(data[i])
    return 0, MASK, read, 4 if reading else 0


@kernel
def _code_(state: State, data: Bytes, bit: int, odds: int, reading: bool) -> tuple[State, int]:
    """Write the bit, or read it, whose probability of being 1 is odds / 65536."""
    low, high, read, at = state
    middle = low + ((high - low) * odds >> 16)
    if reading:
        bit = int(read <= middle)
    if bit:
        high = middle
    else:
        low = middle + 1
    while (low ^ high) >> 24 == 0:
        if reading:
            read = ((read << 8) & MASK) | int(data[at])
        else:
            data[at] = high >> 24
        low, high, at = (low << 8) & MASK, ((high << 8) & MASK) | 255, at + 1
    return (low, high, read, at), bit


@kernel
def _finish_(state: State, data: Bytes) -> int:
    low, _, _, at = state
    for i in range(4):
        data[at + i] = (low >> (24 - 8 * i)) & 255
    return at + 4


@kernel
def _learn_(odds: Odds, seen: Odds, context: int, bit: int) -> None:
    """Fast at first, then slowly, as a mean of about the last 500."""
    seen[context] = min(seen[context] + 1, 500)
    moved = odds[context] + ((bit << 16) - odds[context]) / (seen[context] + 1.5)
    odds[context] = min(max(int(moved), 32), 65536 - 32)


@kernel
def _level(value: int) -> int:
    """Twice the logarithm of a positive integer to base two, rounded down: half octaves."""
    bits = 0
    while value >> bits > 1:
        bits += 1
    half = (value >> (bits - 1)) & 1 if bits else 0
    return 2 * bits + half


# -- gaps ------------------------------------------------------------------------------------------------------------


def encode_gaps(positions: Positions) -> Bytes:
    """Return the positions as gaps: the number of bits in the context of recent gaps, then the bits."""
    data = np.zeros(10 * positions.size + SPARE, np.uint8)
    return data[: _gaps_(positions, data, False)]


def decode_gaps(data: Bytes, k: int) -> Positions:
    """Return k positions that `encode_gaps` wrote."""
    positions = np.empty(k, np.int64)
    _gaps_(positions, np.append(data, np.zeros(SPARE, np.uint8)), True)
    return positions


@kernel
def _gaps_(positions: Positions, data: Bytes, reading: bool) -> int:
    odds, seen = np.full(128 * 128, 32768), np.zeros(128 * 128, np.int64)
    state, before, recent = _start(data, reading), -1, 256
    for i in range(positions.size):
        gap = 0 if reading else positions[i] - before  # one or more
        context = 128 * min(_level(recent), 127)
        bits, more = 0, 1
        while more:
            state, more = _code_(state, data, int(gap >> (bits + 1) > 0), odds[context + bits], reading)
            _learn_(odds, seen, context + bits, more)
            bits += more
        value = 1
        for place in range(bits - 1, -1, -1):
            own = context + 64 + 2 * bits + (value & 1 if place == bits - 2 else 0)
            learned = place >= bits - 2 and bits < 30
            state, bit = _code_(state, data, (gap >> place) & 1, odds[own] if learned else 32768, reading)
            if learned:
                _learn_(odds, seen, own, bit)
            value = 2 * value + bit
        before += value
        positions[i] = before
        recent += value - (recent >> 4)
    return 0 if reading else _finish_(state, data)


# -- bits ------------------------------------------------------------------------------------------------------------


def encode_bits(kept: Bytes, layout: Layout) -> Bytes:
    """Return the bits `kept [d]`, 1 for each coordinate that is kept."""
    data = np.zeros(kept.size + SPARE, np.uint8)
    return data[: _bits_(kept, *_matrices(layout), data, False)]


def decode_bits(data: Bytes, layout: Layout) -> Bytes:
    """Return the bits `[d]` that `encode_bits` wrote."""
    kept = np.empty(layout.d, np.uint8)
    _bits_(kept, *_matrices(layout), np.append(data, np.zeros(SPARE, np.uint8)), True)
    return kept


def _matrices(layout: Layout) -> tuple[Positions, Positions, Positions]:
    """Return where each tensor starts, its number of input channels, and the size of its cells."""
    columns = [shape[1] if len(shape) > 1 else size for shape, size in zip(layout.shapes, layout.sizes, strict=True)]
    cells = Cells.of(layout.shapes)
    return cells.offsets, np.array(columns, np.int64), cells.sizes


@kernel
def _bits_(kept: Bytes, offsets: Positions, columns: Positions, sizes: Positions, data: Bytes, reading: bool) -> int:
    """Densities of a row and of a column are moving means over 64 and 32 cells, out of 65536."""
    odds, seen = np.full(4 * LEVELS * LEVELS, 4096), np.zeros(4 * LEVELS * LEVELS, np.int64)
    state, row = _start(data, reading), 4096
    for tensor in range(sizes.size):
        size, at = sizes[tensor], offsets[tensor]
        column = np.full(columns[tensor], row)
        while at < offsets[tensor + 1]:
            for channel in range(column.size):
                context = 4 * (LEVELS * min(_level(row), LEVELS - 1) + min(_level(column[channel]), LEVELS - 1))
                found = 0
                for _ in range(size):
                    own = context + min(found, 3)
                    state, bit = _code_(state, data, int(kept[at]), odds[own], reading)
                    _learn_(odds, seen, own, bit)
                    kept[at] = bit
                    found, at = found + bit, at + 1
                share = (found << 16) // size
                row = max(row + (share - row >> 6), 1)
                column[channel] = max(column[channel] + (share - column[channel] >> 5), 1)
    return 0 if reading else _finish_(state, data)
