"""When each coordinate of a vector last changed."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcams.bits.parallel import kernel, map_ranges

Times = NDArray[np.int32]
Positions = NDArray[np.int64]
CHUNK = 4096


def note_changes(times: Tensor, before: Tensor, after: Tensor, now: int) -> Tensor:
    """`times [d]`, int32, with `now` wherever the bits of the two vectors `[d]` differ; in new memory."""
    if times.device.type != "cpu":
        return torch.where(before.view(torch.int32) != after.view(torch.int32), now, times)
    out = np.empty_like(old := times.numpy())
    words = before.numpy().view(np.int32), after.numpy().view(np.int32)
    map_ranges(out.size, lambda a, b: _note_(old[a:b], words[0][a:b], words[1][a:b], np.int32(now), out[a:b]))
    return torch.from_numpy(out)


@kernel
def _note_(old: Times, before: Times, after: Times, now: np.int32, out: Times) -> None:
    for i in range(out.size):
        out[i] = now if before[i] != after[i] else old[i]


def changed_since(times: Tensor, then: int) -> Tensor:
    """The positions `[k]`, ascending, of what changed after that time."""
    if times.device.type != "cpu":
        return (times > then).nonzero().squeeze(-1)
    array, later = times.numpy(), np.int32(then)
    ranges = map_ranges(array.size, lambda a, b: (a, b, int(_count(array[a:b], later))))
    out = np.empty(sum(count for _, _, count in ranges), np.int64)
    places = itertools.accumulate((count for _, _, count in ranges), initial=0)
    work = dict(zip([a for a, _, _ in ranges], places, strict=False))
    map_ranges(array.size, lambda a, b: _fill_(array[a:b], later, a, out[work[a] :]))
    return torch.from_numpy(out)


@kernel
def _count(times: Times, then: np.int32) -> int:
    count = 0
    for i in range(times.size):
        count += int(times[i] > then)
    return count


@kernel
def _fill_(times: Times, then: np.int32, base: int, out: Positions) -> None:
    """By chunks, so that only the last place of a chunk may be written to in vain, and never one of another thread."""
    places = np.empty(CHUNK + 1, np.int64)
    at = 0
    for start in range(0, times.size, CHUNK):
        chunk = times[start : start + CHUNK]
        found = 0
        for i in range(chunk.size):
            places[found] = base + start + i
            found += int(chunk[i] > then)
        out[at : at + found] = places[:found]
        at += found
