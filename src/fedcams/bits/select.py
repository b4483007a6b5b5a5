"""Exact top-k: the positions of the k largest magnitudes, ties to the lower index, in ascending order.

On the CPU, a sample gives two magnitudes that the k-th largest lies between. A first pass over the vector finds it
among the few words between them, and a second pass writes what is kept to its final place: reading twice costs less
than new memory. If the sample was misleading, a histogram of the whole vector replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams.bits.parallel import kernel, map_ranges, map_threads, trailing_zeros
from fedcams.bits.select_torch import top_positions_torch

if TYPE_CHECKING:
    from torch import Tensor

Words = NDArray[np.uint32]
Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]
Segments = Sequence[tuple[int, int]]

MAGNITUDE = np.uint32(0x7FFFFFFF)  # without the sign, a float's bits sort like its absolute value
SHIFT = 16  # 31 - 15 bits
BINS = 1 << 15
CHUNK = 4096  # words whose hits fit in the first-level cache
SAMPLED_CHUNKS = 32
SPREADS = 4  # tolerance of a sampled rank, in standard deviations


class Part(NamedTuple):
    """A range of the words: how many magnitudes lie above the two limits, and those that lie between them."""

    start: int
    stop: int
    above: int
    between: Words


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


def _select_(words: Words, base: int, places: Positions, found: Words) -> None:
    """Write the positions, from `base` on, and the words of the largest magnitudes, as many as there is room for."""
    k, stride = places.size, max(CHUNK, words.size // SAMPLED_CHUNKS)
    parts, above, reach = _survey(words, *_bracket(_histogram(words, stride), words.size, k))
    if stride > CHUNK and not above < k <= reach:  # the sample was misleading
        whole = np.sum(map_ranges(words.size, lambda a, b: _histogram(words[a:b], CHUNK)), axis=0)
        parts, above, reach = _survey(words, *_bracket(whole, words.size, k))
    if reach < k:  # the rest of the k are zeros
        _take_nonzero_and_first_zeros_(words, k - reach, base, places, found)
        return
    last, ties = _kth_largest(np.concatenate([part.between for part in parts]), k - above)
    _keep_(words, parts, np.uint32(last), ties, base, places, found)


def _bracket(histogram: NDArray[np.int64], size: int, k: int) -> tuple[int, int]:
    """Return two magnitudes that the k-th largest lies between, judging by a histogram of all or some words."""
    seen = int(histogram.sum())
    rank = k * seen / size
    allowance = 0.0 if seen == size else SPREADS * math.sqrt(rank) + 1
    lowest, _ = _boundary(histogram, min(seen, math.ceil(rank + allowance)))
    highest, _ = _boundary(histogram, max(1, math.floor(rank - allowance)))
    return max(1, int(lowest) << SHIFT), (int(highest) + 1) << SHIFT


def _survey(words: Words, lower: int, upper: int) -> tuple[list[Part], int, int]:
    """Return what lies in each range, and how many magnitudes in all reach `upper` and `lower`."""
    limits = np.uint32(lower), np.uint32(upper)
    parts = map_ranges(words.size, lambda a, b: Part(a, b, *_look(words[a:b], *limits)))
    above = sum(part.above for part in parts)
    return parts, above, above + sum(part.between.size for part in parts)


def _keep_(
    words: Words, parts: list[Part], last: np.uint32, ties: int, base: int, places: Positions, found: Words
) -> None:
    """Write what lies above the magnitude `last`, and the first `ties` of those that equal it."""
    work, at = [], 0
    for part in parts:
        taken = min(ties, int(np.count_nonzero(part.between == last)))
        end = at + part.above + int(np.count_nonzero(part.between > last)) + taken
        work.append((part, taken, slice(at, end)))
        at, ties = end, ties - taken

    def write(part: Part, taken: int, at: slice) -> None:
        _write_(words[part.start : part.stop], last, taken, base + part.start, places[at], found[at])

    map_threads(work, lambda item: write(*item))


@kernel
def _histogram(words: Words, stride: int) -> NDArray[np.int64]:
    """Count the upper 15 bits over a chunk at the start of every stride; over all words if the stride is CHUNK."""
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
def _look(words: Words, lower: np.uint32, upper: np.uint32) -> tuple[int, Words]:
    """Return how many magnitudes reach `upper`, and those that reach `lower` but not `upper`.

    Only the pages of the buffer that are written take memory. A chunk is read again while it is in the cache.
    """
    between = np.empty(words.size + 1, np.uint32)
    hits = np.zeros(CHUNK // 64, np.uint64)
    count = above = 0
    for start in range(0, words.size, CHUNK):
        chunk = words[start : start + CHUNK]
        _mark_(chunk, lower, np.uint32(upper - lower), hits.view(np.uint8))
        for i in range(hits.size):
            hit = hits[i]
            while hit:
                between[count] = chunk[64 * i + trailing_zeros(hit)] & MAGNITUDE
                count += 1
                hit &= hit - np.uint64(1)
        above += _count_from(chunk, upper)
    return above, between[:count]


@kernel
def _count_from(words: Words, least: np.uint32) -> int:
    """Count the magnitudes that reach `least`; in 32 bits, as the words are, which compiles to vector instructions."""
    count = np.uint32(0)
    for i in range(words.size):
        count += np.uint32((words[i] & MAGNITUDE) >= least)
    return int(np.int64(count))


@kernel
def _write_(words: Words, last: np.uint32, ties: int, base: int, places: Positions, found: Words) -> None:
    """Write position and word of all above `last`, and of the first `ties` that equal it."""
    hits = np.zeros(CHUNK // 64, np.uint64)
    count = 0
    for start in range(0, words.size, CHUNK):
        chunk = words[start : start + CHUNK]
        _mark_(chunk, last, np.uint32(MAGNITUDE - last + np.uint32(1)), hits.view(np.uint8))
        for i in range(hits.size):
            hit = hits[i]
            while hit:
                at = 64 * i + trailing_zeros(hit)
                hit &= hit - np.uint64(1)
                if chunk[at] & MAGNITUDE == last:
                    if ties == 0:
                        continue
                    ties -= 1
                places[count], found[count] = base + start + at, chunk[at]
                count += 1


@kernel
def _mark_(words: Words, least: np.uint32, width: np.uint32, hits: Bytes) -> None:
    """Set one bit per word, 1 if its magnitude is in [least, least + width): compiles to vector instructions."""
    whole = words.size >> 3
    for i in range(whole):
        byte = np.uint32(0)
        for j in range(8):
            byte |= np.uint32(np.uint32((words[8 * i + j] & MAGNITUDE) - least) < width) << np.uint32(j)
        hits[i] = byte
    hits[whole:] = 0
    for i in range(8 * whole, words.size):
        hits[whole] |= np.uint8(np.uint32((words[i] & MAGNITUDE) - least) < width) << np.uint8(i & 7)


@kernel
def _kth_largest(magnitudes: Words, k: int) -> tuple[int, int]:
    """The k-th largest magnitude, found from the top bits down, and how many of those that equal it are among the k."""
    prefix, shift = 0, 31
    for bits in (12, 12, 7):
        counts = np.zeros(1 << bits, np.int64)
        for i in range(magnitudes.size):
            magnitude = np.int64(magnitudes[i])
            if magnitude >> shift == prefix:
                counts[(magnitude >> (shift - bits)) & ((1 << bits) - 1)] += 1
        here, k = _boundary(counts, k)
        prefix, shift = (prefix << bits) | here, shift - bits
    return prefix, k


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
