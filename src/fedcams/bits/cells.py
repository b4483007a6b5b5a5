"""Signs of kept coordinates, closer to their entropy: within a cell they mostly agree.

A *cell* spans the dimensions of a tensor after the second, such as the 3x3 weights between two channels of a
convolution. In matrices and vectors a cell is one coordinate. Where several coordinates of a cell are kept, the first
sign *leads* and the others *follow*. A leading sign takes one bit. For the signs that follow, only the places where a
sign differs from the one before it are listed, counted among all that follow and coded as gaps (`fedcams.bits.rice`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcams.bits.packing import packed_size
from fedcams.bits.parallel import kernel, map_ranges
from fedcams.bits.rice import rice_decode, rice_encode, rice_size
from fedcams.errors import BadChangeCount, BadPadding, Truncated

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int64]


class Cells(NamedTuple):
    """Where each tensor starts in the vector, int64 `[T + 1]`, the last entry being d; and its cells' size `[T]`."""

    offsets: Positions
    sizes: Positions

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]]) -> Cells:
        """Return the cells of tensors of these shapes, laid end to end."""
        sizes = [int(np.prod(shape[2:], dtype=np.int64)) for shape in shapes]
        lengths = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        return cls(np.cumsum([0, *lengths], dtype=np.int64), np.array(sizes, np.int64))

    @property
    def single(self) -> bool:
        """Whether every cell is a single coordinate, so that no sign follows another."""
        return bool((self.sizes <= 1).all())


def signs_encode(signs: Bytes, positions: Positions, cells: Cells) -> Bytes:
    """Encode packed signs, one bit for each of the ascending positions."""
    leading, changes, followers = _split(signs, positions, cells)
    if not followers:
        return leading
    count = np.frombuffer(changes.size.to_bytes(_count_size(followers), "little"), np.uint8)
    return np.concatenate([leading, count, rice_encode(changes, followers)])


def signs_size(signs: Bytes, positions: Positions, cells: Cells) -> int:
    """Return the exact length of the code in bytes, without writing it."""
    leading, changes, followers = _split(signs, positions, cells)
    return leading.size + (_count_size(followers) + rice_size(changes, followers) if followers else 0)


def signs_decode(data: Bytes, positions: Positions, cells: Cells) -> tuple[Bytes, int]:
    """Read the packed signs of these positions from the start of `data`; return them and the bytes they took.

    Refuses data that ends early, more changes than there are signs that follow, and padding that is not zero.
    """
    follows, followers = _find_followers(positions, cells)
    leaders = positions.size - followers
    start = packed_size(leaders) + (_count_size(followers) if followers else 0)
    if start > data.size:
        raise Truncated(f"{leaders} leading signs need at least {start} bytes, {data.size} are left")
    leading = data[: packed_size(leaders)]
    if leaders % 8 and leading[-1] >> leaders % 8:
        raise BadPadding(f"the bits after the last of {leaders} leading signs are not zero")
    if not followers:
        return leading.copy(), start
    count = int.from_bytes(data[leading.size : start].tobytes(), "little")
    if count > followers:
        raise BadChangeCount(f"{count} changes among {followers} signs that follow; allowed: 0 to {followers}")
    changes, used = rice_decode(data[start:], count, followers)
    return _join(leading, changes, follows, followers), start + used


def _count_size(followers: int) -> int:
    """Return how many bytes hold the number of changes, which is at most `followers`."""
    return packed_size(followers.bit_length())


def _unpacked(signs: Bytes, count: int) -> Bytes:
    return np.unpackbits(signs, count=count, bitorder="little")


# -- which signs follow --------------------------------------------------------------------------------------------


def _find_followers(positions: Positions, cells: Cells) -> tuple[Bytes, int]:
    """Return 1 for each position in the cell of the one before, else 0: uint8 `[k]`; and how many there are."""
    out = np.zeros(positions.size, np.uint8)
    if cells.single:
        return out, 0
    bounds = np.searchsorted(positions, cells.offsets)
    counts = map_ranges(out.size, lambda a, b: int(_follow_(positions, bounds, *cells, a, out[a:b])))
    return out, sum(counts)


@kernel
def _follow_(
    positions: Positions, bounds: Positions, offsets: Positions, sizes: Positions, first: int, out: Bytes
) -> int:
    """Do the same for the positions from `first` on; return how many follow. Quotients are exact below 2^50."""
    count = 0
    for tensor in range(sizes.size):
        a, b = max(first, bounds[tensor]), min(first + out.size, bounds[tensor + 1])
        if a >= b:
            continue
        start, scale = offsets[tensor] - 0.5, 1.0 / sizes[tensor]
        before = int((positions[a - 1] - start) * scale) if a > bounds[tensor] else -1
        for i in range(a, b):
            cell = int((positions[i] - start) * scale)
            out[i - first] = cell == before
            count += int(cell == before)
            before = cell
    return count


# -- leading signs and changes -------------------------------------------------------------------------------------


def _split(signs: Bytes, positions: Positions, cells: Cells) -> tuple[Bytes, Positions, int]:
    """Return the leading signs, packed; where, among the followers, a sign changes; and the number of followers."""
    if cells.single:
        return signs, np.empty(0, np.int64), 0
    bounds, unpacked = np.searchsorted(positions, cells.offsets), _unpacked(signs, positions.size)
    parts = map_ranges(positions.size, lambda a, b: _split_range(unpacked, positions, bounds, *cells, a, b))
    before = list(itertools.accumulate((followers for _, _, followers in parts), initial=0))
    changes = [found + start for (_, found, _), start in zip(parts, before, strict=False)]
    leading = np.packbits(np.concatenate([part for part, _, _ in parts]), bitorder="little")
    return leading, np.concatenate(changes), before[-1]


@kernel
def _split_range(
    signs: Bytes, positions: Positions, bounds: Positions, offsets: Positions, sizes: Positions, first: int, last: int
) -> tuple[Bytes, Positions, int]:
    """Split the signs from `first` to `last`, without branches, which would be unpredictable."""
    follows = np.zeros(last - first, np.uint8)
    followers = _follow_(positions, bounds, offsets, sizes, first, follows)
    leading, changes = np.empty(follows.size - followers + 1, np.uint8), np.empty(followers + 1, np.int64)
    before = int(signs[max(first - 1, 0)])
    leader, follower, found = 0, 0, 0
    for i in range(follows.size):
        sign, follow = int(signs[first + i]), int(follows[i])
        leading[leader] = sign
        changes[found] = follower
        leader, follower, found = leader + 1 - follow, follower + follow, found + (follow & (sign ^ before))
        before = sign
    return leading[:leader], changes[:found], followers


def _join(leading: Bytes, changes: Positions, follows: Bytes, followers: int) -> Bytes:
    """Return all signs, packed: the inverse of `_split`."""
    out, changed = np.empty(follows.size, np.uint8), np.zeros(followers + 1, np.uint8)
    changed[changes] = 1
    _join_(np.append(_unpacked(leading, follows.size - followers), np.uint8(0)), changed, follows, out)
    return np.packbits(out, bitorder="little")


@kernel
def _join_(leading: Bytes, changed: Bytes, follows: Bytes, out: Bytes) -> None:
    """Join without branches: the masks -1 and 0 choose between the changed sign and the next leading one."""
    sign, leader, follower = 0, 0, 0
    for i in range(follows.size):
        follow = int(follows[i])
        sign = ((sign ^ int(changed[follower])) & -follow) | (int(leading[leader]) & (follow - 1))
        leader, follower = leader + 1 - follow, follower + follow
        out[i] = sign
