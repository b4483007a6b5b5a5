"""Magnitudes as a few classes: what is kept is split at its mean, each half at its own mean, and so on.

A value travels as a level of b bits, the lowest of which is its sign (1 for positive or zero) and the others its class;
a class travels as its mean, a float32. Means are those of `fedcams.bits.kept`: the same, bit for bit, on every device.
Numbers come in contiguous groups, and each group is split separately.

Each function has kernels for one row on the CPU and a batched torch version for any other device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams.bits.kept import (
    FRACTION,
    MAGNITUDE,
    finish_means,
    group_means_torch,
    group_of_each,
    spare_bits,
    sums_between,
)
from fedcams.bits.packing import pack_levels, packed_size, unpack_levels
from fedcams.bits.parallel import kernel, map_ranges

if TYPE_CHECKING:
    from torch import Tensor

Vector = NDArray[np.float32]
Words = NDArray[np.uint32]
Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]


# -- encoding --------------------------------------------------------------------------------------------------------


def split_at_means(values: Tensor, bounds: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Split |values| `[C, k]` into 2^(bits-1) classes; return packed levels, uint8 `[C, ceil(k·bits/8)]`, and means.

    A higher class has larger magnitudes. `bounds [C, S + 1]` says where each of S groups starts and ends; the means are
    float32 `[C, S, 2^(bits-1)]`, +0.0 where a class is empty, and infinite where it has infinity or NaN.
    """
    if values.device.type != "cpu":
        return split_at_means_torch(values, bounds, bits)
    levels = torch.empty(len(values), packed_size(values.shape[-1] * bits), dtype=torch.uint8)
    rows = zip(values.numpy().view(np.uint32), bounds.numpy(), levels.numpy(), strict=True)
    means = np.stack([_split_row_(words, cuts, bits, out) for words, cuts, out in rows])
    return levels, torch.from_numpy(means)


def _split_row_(words: Words, cuts: Positions, bits: int, out: Bytes) -> Vector:
    classes = np.zeros(words.size, np.uint8)
    for level in range(bits - 1):
        _split_all_(words, classes, cuts, _class_means(words, classes, cuts, 1 << level).view(np.uint32))
    map_ranges(words.size, lambda a, b: _pack_(words[a:b], classes[a:b], bits, out[a * bits >> 3 :]))
    return _class_means(words, classes, cuts, 1 << (bits - 1))


def _split_all_(words: Words, classes: Bytes, cuts: Positions, limits: Words) -> None:
    map_ranges(words.size, lambda a, b: _split_(words, classes, cuts, limits, a, b))


def _class_means(words: Words, classes: Bytes, cuts: Positions, count: int) -> Vector:
    """`[S, count]`."""
    up = spare_bits(words.size)
    largest = np.max(map_ranges(words.size, lambda a, b: _largest(words, classes, cuts, count, a, b)), axis=0)
    exponents = np.maximum(largest >> 23, 1)
    sums = np.sum(map_ranges(words.size, lambda a, b: _sums(words, classes, cuts, exponents, up, a, b)), axis=0)
    return finish_means(largest, sums[0], up, np.maximum(sums[1], 1))


@kernel
def _largest(words: Words, classes: Bytes, cuts: Positions, count: int, first: int, last: int) -> Positions:
    """The largest magnitude of each group's classes among the words from `first` to `last`."""
    out = np.zeros((cuts.size - 1, count), np.int64)
    for group in range(len(out)):
        for i in range(max(first, cuts[group]), min(last, cuts[group + 1])):
            magnitude = np.int64(words[i] & np.uint32(MAGNITUDE))
            out[group, classes[i]] = max(out[group, classes[i]], magnitude)
    return out


@kernel
def _sums(
    words: Words, classes: Bytes, cuts: Positions, exponents: Positions, up: int, first: int, last: int
) -> Positions:
    """The sums of each group's classes in the units of `fedcams.bits.kept`, and how many they have: `[2, S, count]`."""
    out = np.zeros((2, *exponents.shape), np.int64)
    for group in range(len(exponents)):
        for i in range(max(first, cuts[group]), min(last, cuts[group + 1])):
            word = np.int64(words[i]) & np.int64(MAGNITUDE)
            own = word >> np.int64(23)
            fraction = (word & np.int64(FRACTION)) | (np.int64(own > 0) << np.int64(23))
            shift = min(exponents[group, classes[i]] - max(own, np.int64(1)), np.int64(63))
            out[0, group, classes[i]] += (fraction << up) >> shift
            out[1, group, classes[i]] += 1
    return out


@kernel
def _split_(words: Words, classes: Bytes, cuts: Positions, limits: Words, first: int, last: int) -> None:
    for group in range(len(limits)):
        for i in range(max(first, cuts[group]), min(last, cuts[group + 1])):
            above = (words[i] & np.uint32(MAGNITUDE)) >= limits[group, classes[i]]
            classes[i] = 2 * classes[i] + np.uint8(above)


@kernel
def _pack_(words: Words, classes: Bytes, bits: int, out: Bytes) -> None:
    each = 8 // bits
    for i in range((words.size + each - 1) // each):
        byte = np.uint8(0)
        for j in range(each * i, min(each * (i + 1), words.size)):
            positive = np.uint8(words[j] <= np.uint32(0x80000000))  # -0.0 is the largest of these as an integer
            byte |= np.uint8(2 * classes[j] + positive) << np.uint8(bits * (j - each * i))
        out[i] = byte


def split_at_means_torch(values: Tensor, bounds: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The same in torch operations, on any device."""
    classes = torch.zeros_like(values, dtype=torch.int64)
    for level in range(bits - 1):
        own = _take(_class_means_torch(values, classes, bounds, 1 << level), classes, bounds)
        classes = 2 * classes + (values.abs() >= own)
    levels = pack_levels((2 * classes + (values >= 0)).to(torch.uint8), bits)
    return levels, _class_means_torch(values, classes, bounds, 1 << (bits - 1))


def _class_means_torch(values: Tensor, classes: Tensor, bounds: Tensor, count: int) -> Tensor:
    """`[C, S, count]`, one class after the other, as there are eight at most."""
    sizes = _sizes(classes, bounds, count).clamp(min=1).unbind(-1)
    members = [torch.where(classes == number, values, 0.0) for number in range(count)]
    means = [group_means_torch(part, bounds, size) for part, size in zip(members, sizes, strict=True)]
    return torch.stack(means, dim=-1)


# -- decoding --------------------------------------------------------------------------------------------------------


def signed_means(levels: Tensor, bits: int, means: Tensor, bounds: Tensor, k: int) -> Tensor:
    """Return what packed levels stand for: with means `[C, S, 2^(bits-1)]`, float32 `[C, k]`."""
    if levels.device.type != "cpu":
        return signed_means_torch(levels, bits, means, bounds, k)
    out = np.empty((len(levels), k), np.float32)
    for packed, sizes, cuts, row in zip(levels.numpy(), means.numpy(), bounds.numpy(), out, strict=True):
        _unpack_row_(packed, bits, sizes, cuts, row)
    return torch.from_numpy(out)


def _unpack_row_(packed: Bytes, bits: int, means: Vector, cuts: Positions, out: Vector) -> None:
    map_ranges(out.size, lambda a, b: _unpack_(packed, bits, means, cuts, a, b, out))


@kernel
def _unpack_(packed: Bytes, bits: int, means: Vector, cuts: Positions, first: int, last: int, out: Vector) -> None:
    for group in range(len(means)):
        for i in range(max(first, cuts[group]), min(last, cuts[group + 1])):
            level = (packed[i * bits >> 3] >> (i * bits & 7)) & ((1 << bits) - 1)
            out[i] = means[group, level >> 1] * np.float32(2 * (level & 1) - 1)


def signed_means_torch(levels: Tensor, bits: int, means: Tensor, bounds: Tensor, k: int) -> Tensor:
    """The same in torch operations, on any device."""
    numbers = unpack_levels(levels, bits, k).long()
    sizes = _take(means, numbers >> 1, bounds)
    return torch.where((numbers & 1).bool(), sizes, -sizes)


def class_sizes(levels: Tensor, bits: int, bounds: Tensor, k: int) -> Tensor:
    """Return how many of each group are in each class by their packed levels: int64 `[C, S, 2^(bits-1)]`."""
    if levels.device.type != "cpu":
        return _sizes(unpack_levels(levels, bits, k) >> 1, bounds, 1 << (bits - 1))
    rows = zip(levels.numpy(), bounds.numpy(), strict=True)
    return torch.from_numpy(np.stack([_count_row(packed, bits, cuts, k) for packed, cuts in rows]))


def _count_row(packed: Bytes, bits: int, cuts: Positions, k: int) -> Positions:
    counts: Positions = np.sum(map_ranges(k, lambda a, b: _count(packed, bits, cuts, a, b)), axis=0)
    return counts


@kernel
def _count(packed: Bytes, bits: int, cuts: Positions, first: int, last: int) -> Positions:
    out = np.zeros((cuts.size - 1, 1 << (bits - 1)), np.int64)
    for group in range(len(out)):
        for i in range(max(first, cuts[group]), min(last, cuts[group + 1])):
            out[group, ((packed[i * bits >> 3] >> (i * bits & 7)) & ((1 << bits) - 1)) >> 1] += 1
    return out


def _sizes(classes: Tensor, bounds: Tensor, count: int) -> Tensor:
    return torch.stack([sums_between((classes == number).long(), bounds) for number in range(count)], dim=-1)


def _take(means: Tensor, classes: Tensor, bounds: Tensor) -> Tensor:
    """The mean of the class of each: `[C, S, count]`, `[C, k]` -> `[C, k]`."""
    groups = group_of_each(bounds, classes.shape[-1])
    return means.flatten(1).gather(-1, groups * means.shape[-1] + classes)
