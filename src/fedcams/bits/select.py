"""Exact top-k: the positions of the k largest magnitudes, ties to the lower index, in ascending order.

On the CPU, a sample gives a magnitude that slightly more than k coordinates reach; one pass collects those, and exact
selection works only on them. If the sample was misleading, a histogram of the whole vector replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcams.bits.parallel import kernel, map_ranges

Words = NDArray[np.uint32]
Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]
Segments = Sequence[tuple[int, int]]

MAGNITUDE = np.uint32(0x7FFFFFFF)  # without the sign, a float's bits sort like its absolute value
SHIFT = 19  # 31 - 12 bits
BINS = 1 << 12
CHUNK = 4096  # words whose hits fit in the first-level cache
SAMPLED_CHUNKS = 32
LOWEST_ONE = np.array([max(0, (byte & -byte).bit_length() - 1) for byte in range(256)], np.int64)


def top_values(x: Tensor, segments: Segments, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the positions of the `counts[j]` largest magnitudes of each segment j of `x [C, d]`, and their values.

    Positions are int64 `[C, k]`, ascending; values float32 `[C, k]`; k is the sum of the counts.
    """
    if x.device.type != "cpu":
        parts = zip(segments, counts, strict=True)
        positions = torch.cat([top_positions_torch(x[:, a:b], k) + a for (a, b), k in parts], dim=-1)
        return positions, x.gather(-1, positions)
    shape = len(x), sum(counts)
    places, values = np.empty(shape, np.int64), np.empty(shape, np.float32)
    found = values.view(np.uint32)
    for row, words in enumerate(x.numpy().view(np.uint32)):
        at = 0
        for (start, stop), k in zip(segments, counts, strict=True):
            _select_(words[start:stop], start, places[row, at : at + k], found[row, at : at + k])
            at += k
    return torch.from_numpy(places), torch.from_numpy(values)


def top_positions_torch(x: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest magnitudes of each row, `x [C, n]` -> int64 `[C, k]`, on any device."""
    magnitude = x.contiguous().view(torch.int32) & int(MAGNITUDE)
    return magnitude.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(dim=-1).values


def _select_(words: Words, base: int, places: Positions, found: Words) -> None:
    """Write the positions, from `base` on, and the words of the largest magnitudes, as many as there is room for."""
    k, stride = places.size, max(CHUNK, words.size // SAMPLED_CHUNKS)
    at, kept = _candidates(words, _least(_histogram(words, stride), words.size, k))
    if at.size < k and stride > CHUNK:  # the sample misled
        whole = np.sum(map_ranges(words.size, lambda a, b: _histogram(words[a:b], CHUNK)), axis=0)
        at, kept = _candidates(words, _least(whole, words.size, k))
    if at.size < k:  # the rest of the k are zeros
        _take_nonzero_and_first_zeros_(words, k - at.size, base, places, found)
    else:
        _refine_(at, kept, base, places, found)


def _least(histogram: NDArray[np.int64], size: int, k: int) -> int:
    """Return a magnitude above zero that at least k words reach, judging by a histogram of all or some of them."""
    seen = int(histogram.sum())
    rank = k * seen / size
    edge, _ = _boundary(histogram, k if seen == size else min(seen, math.ceil(rank + 4 * math.sqrt(rank) + 1)))
    return max(1, int(edge) << SHIFT)


def _candidates(words: Words, least: int) -> tuple[Positions, Words]:
    parts = map_ranges(words.size, lambda a, b: _collect(words[a:b], np.uint32(least), a))
    positions, found = zip(*parts, strict=True)
    return np.concatenate(positions), np.concatenate(found)


@kernel
def _histogram(words: Words, stride: int) -> NDArray[np.int64]:
    """Count the upper 12 bits over a chunk at the start of every stride; over all words if the stride is CHUNK."""
    counts = np.zeros(BINS, np.int64)
    for start in range(0, words.size, stride):
        chunk = words[start : start + CHUNK]
        for i in range(chunk.size):
            counts[(chunk[i] & MAGNITUDE) >> np.uint32(SHIFT)] += 1
    return counts


@kernel
def _boundary(counts: NDArray[np.int64], k: int) -> tuple[int, int]:
    """Return the bin that contains the k-th largest, and how many of that bin belong to the k largest."""
    above = 0
    for i in range(counts.size - 1, -1, -1):
        if above + counts[i] >= k:
            return i, k - above
        above += counts[i]
    return 0, k - above


@kernel
def _collect(words: Words, least: np.uint32, base: int) -> tuple[Positions, Words]:
    """Position and word of all that reach `least`; of the buffer only pages written to become memory."""
    found = np.empty(words.size + 1, np.int64)
    hits, places = np.empty(CHUNK // 8, np.uint8), np.empty(CHUNK // 8 + 1, np.int64)
    whole = words.size // CHUNK * CHUNK
    count = 0
    for start in range(0, whole, CHUNK):
        _mark_(words[start : start + CHUNK], least, hits)
        count = _list_(hits, places, start, found, count)
    for i in range(whole, words.size):
        found[count] = i
        count += int((words[i] & MAGNITUDE) >= least)
    hit = np.empty(count, np.uint32)
    for i in range(count):
        hit[i] = words[found[i]]
    return found[:count] + base, hit


@kernel
def _mark_(words: Words, least: np.uint32, hits: Bytes) -> None:
    """Set one bit per word, 1 if its magnitude is `least` or more: compiles to vector instructions."""
    for i in range(hits.size):
        byte = np.uint32(0)
        for j in range(8):
            byte |= np.uint32((words[8 * i + j] & MAGNITUDE) >= least) << np.uint32(j)
        hits[i] = byte


@kernel
def _list_(hits: Bytes, places: Positions, start: int, out: Positions, count: int) -> int:
    """Append the positions of the 1 bits: first the bytes that have any, without a branch, then their bits."""
    some = 0
    for i in range(hits.size):
        places[some] = i
        some += int(hits[i] != 0)
    for i in range(some):
        byte = np.int64(hits[places[i]])
        while byte:
            out[count] = start + 8 * places[i] + LOWEST_ONE[byte]
            count += 1
            byte &= byte - 1
    return count


@kernel
def _refine_(positions: Positions, words: Words, base: int, places: Positions, found: Words) -> None:
    """Find the exact k-th magnitude, from the top bits down, then keep what lies above it and the first ties."""
    prefix, remaining, shift = 0, places.size, 31
    for bits in (12, 12, 7):
        counts = np.zeros(1 << bits, np.int64)
        for i in range(words.size):
            magnitude = np.int64(words[i] & MAGNITUDE)
            if magnitude >> shift == prefix:
                counts[(magnitude >> (shift - bits)) & ((1 << bits) - 1)] += 1
        here, remaining = _boundary(counts, remaining)
        prefix, shift = (prefix << bits) | here, shift - bits
    count = 0
    for i in range(words.size):
        if count < places.size:  # once full, what is left are ties of a higher index
            places[count] = base + positions[i]
            found[count] = words[i]
        magnitude = np.int64(words[i] & MAGNITUDE)
        tie = int(magnitude == prefix and remaining > 0)
        count += tie | int(magnitude > prefix)
        remaining -= tie


@kernel
def _take_nonzero_and_first_zeros_(words: Words, zeros: int, base: int, places: Positions, found: Words) -> None:
    count = 0
    for i in range(words.size):
        zero = words[i] & MAGNITUDE == 0
        if not zero or zeros > 0:
            places[count] = base + i
            found[count] = words[i]
            count += 1
            zeros -= int(zero)
