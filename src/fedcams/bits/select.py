"""Exact top-k: the positions of the k largest magnitudes, ties to the lower index, in ascending order.

On the CPU, a sample gives a magnitude that slightly more than k coordinates reach; one pass collects those, and exact
selection works only on them. If the sample was misleading, a histogram of the whole vector replaces it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcams.bits.parallel import kernel, map_ranges

Words = NDArray[np.uint32]
Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]

MAGNITUDE = np.uint32(0x7FFFFFFF)  # without the sign, a float's bits sort like its absolute value
SHIFT = 19  # 31 - 12 bits
BINS = 1 << 12
CHUNK = 4096  # words whose hits fit in the first-level cache
SAMPLED_CHUNKS = 32
LOWEST_ONE = np.array([max(0, (byte & -byte).bit_length() - 1) for byte in range(256)], np.int64)


def top_positions(x: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest magnitudes of each row: `x [C, n]` -> int64 `[C, k]`, ascending."""
    if x.device.type != "cpu":
        return torch.stack([top_positions_torch(row, k) for row in x])
    words = x.numpy().view(np.uint32)
    out = np.empty((x.shape[0], k), np.int64)
    for row, target in zip(words, out, strict=True):
        _select_(row, k, target)
    return torch.from_numpy(out)


def top_positions_torch(row: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest magnitudes of one row `[n]`, in torch operations on any device."""
    magnitude = row.view(torch.int32) & int(MAGNITUDE)
    smallest = torch.topk(magnitude, k, sorted=False).values.min()
    above, ties = magnitude > smallest, magnitude == smallest
    keep = above | (ties & (ties.cumsum(0) <= k - above.sum()))
    return keep.nonzero().squeeze(-1)


def _select_(words: Words, k: int, out: Positions) -> None:
    stride = max(CHUNK, words.size // SAMPLED_CHUNKS)
    positions, magnitudes = _candidates(words, _least(_histogram(words, stride), words.size, k))
    if positions.size < k and stride > CHUNK:  # the sample was misleading
        whole = np.sum(map_ranges(words.size, lambda a, b: _histogram(words[a:b], CHUNK)), axis=0)
        positions, magnitudes = _candidates(words, _least(whole, words.size, k))
    if positions.size < k:  # the rest of the k are zeros
        _take_nonzero_and_first_zeros_(words, k - positions.size, out)
    else:
        _refine_(positions, magnitudes, out)


def _least(histogram: NDArray[np.int64], size: int, k: int) -> int:
    """Return a magnitude above zero that at least k words reach, judging by a histogram of all or some of them."""
    seen = int(histogram.sum())
    rank = k * seen / size
    edge, _ = _boundary(histogram, k if seen == size else min(seen, math.ceil(rank + 4 * math.sqrt(rank) + 1)))
    return max(1, int(edge) << SHIFT)


def _candidates(words: Words, least: int) -> tuple[Positions, Words]:
    parts = map_ranges(words.size, lambda a, b: _collect(words[a:b], np.uint32(least), a))
    positions, magnitudes = zip(*parts, strict=True)
    return np.concatenate(positions), np.concatenate(magnitudes)


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
    """Return the positions and magnitudes of all that reach `least`; only pages written to use memory."""
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
    magnitudes = np.empty(count, np.uint32)
    for i in range(count):
        magnitudes[i] = words[found[i]] & MAGNITUDE
    return found[:count] + base, magnitudes


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
def _refine_(positions: Positions, magnitudes: Words, out: Positions) -> None:
    """Find the exact k-th magnitude, from the top bits down, then keep what lies above it and the first ties."""
    prefix, remaining, shift = 0, out.size, 31
    for bits in (12, 12, 7):
        counts = np.zeros(1 << bits, np.int64)
        for i in range(magnitudes.size):
            magnitude = np.int64(magnitudes[i])
            if magnitude >> shift == prefix:
                counts[(magnitude >> (shift - bits)) & ((1 << bits) - 1)] += 1
        found, remaining = _boundary(counts, remaining)
        prefix, shift = (prefix << bits) | found, shift - bits
    count = 0
    for i in range(magnitudes.size):
        if count < out.size:  # once it is full, only ties with a higher index are left
            out[count] = positions[i]
        tie = int(magnitudes[i] == prefix and remaining > 0)
        count += tie | int(magnitudes[i] > prefix)
        remaining -= tie


@kernel
def _take_nonzero_and_first_zeros_(words: Words, zeros: int, out: Positions) -> None:
    count = 0
    for i in range(words.size):
        zero = words[i] & MAGNITUDE == 0
        if not zero or zeros > 0:
            out[count] = i
            count += 1
            zeros -= int(zero)
