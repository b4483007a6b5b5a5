"""Frames: a fixed head and a few byte strings (blobs) as one checked message."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedcams.bits.checksum import crc32, crc32_of, joined
from fedcams.errors import BadMagic, ChecksumMismatch, TrailingBytes, Truncated, UnknownVersion, WireError

VERSION = 1
CHECKSUM = struct.Struct("<I")

Head = tuple[Any, ...]


class Start(NamedTuple):
    """What stands before the blobs: the values of the head, names and lengths of the blobs, and its own size."""

    head: Head
    names: tuple[str, ...]
    lengths: list[int]
    size: int


class Frame:
    """One kind of message: magic (4), version (1), the head, the length (8) of each blob, the blobs, crc32 (4)."""

    def __init__(self, magic: bytes, head: str, blobs: int) -> None:
        self.magic = magic
        self.head = struct.Struct(f"<4sB{head}{blobs}Q")
        self.blobs = blobs

    @property
    def overhead(self) -> int:
        """Bytes of a message beside its blobs."""
        return self.head.size + CHECKSUM.size

    def pack(self, head: Head, *blobs: bytes | Sequence[bytes]) -> bytes:
        """Return the message as bytes; a blob may be given in pieces, which saves a copy of it."""
        whole = [[blob] if isinstance(blob, bytes) else blob for blob in blobs]
        start = self.head.pack(self.magic, VERSION, *head, *(sum(map(len, blob)) for blob in whole))
        pieces = [start, *itertools.chain.from_iterable(whole)]
        return b"".join([*pieces, CHECKSUM.pack(crc32_of(pieces))])

    def parts(self, head: Head, *blobs: bytes, known: Mapping[int, int] | None = None) -> list[bytes]:
        """Return the message as head, blobs and checksum: joined they are `pack`, and no blob is copied.

        `known` gives the checksums of blobs by their index, where known: those blobs are not read.
        """
        start = self.head.pack(self.magic, VERSION, *head, *map(len, blobs))
        return with_checksum(start, blobs, known or {})

    def unpack(self, data: bytes) -> tuple[Head, list[bytes]]:
        """Return head and blobs; raises the WireError that says what is wrong."""
        start = self._start(data)
        return start.head, cut(data, start)

    def unpack_parts(self, parts: Sequence[bytes]) -> tuple[Head, list[bytes], list[int] | None]:
        """Return head, blobs and the checksums of the blobs, given a message in parts.

        Blobs of a message that is cut as `parts` cuts it are not copied. A message cut elsewhere is joined first, and
        the checksums are None.
        """
        if (start := packed_start(self._start, parts)) is None:
            return *self.unpack(b"".join(parts)), None  # which says what is wrong with it, if anything is
        return start.head, list(parts[1:-1]), check_parts(parts)

    def _start(self, data: bytes) -> Start:
        values = read_head(data, self.magic, self.head)
        count = len(values) - self.blobs
        return Start(values[:count], (), list(values[count:]), self.head.size)


def read_head(data: bytes, magic: bytes, head: struct.Struct) -> Head:
    """The values of the head after magic and version."""
    if data[:4] != magic[: len(data)]:
        raise BadMagic(f"this message starts with {magic!r}, these data with {data[:4]!r}")
    if len(data) < head.size:
        raise Truncated(f"{len(data)} bytes; this message has at least {head.size + CHECKSUM.size}")
    if data[4] != VERSION:
        raise UnknownVersion(f"version {data[4]}; this reader knows version {VERSION}, update fedcams")
    return head.unpack_from(data)[2:]


def with_checksum(start: bytes, blobs: Sequence[bytes], known: Mapping[int, int]) -> list[bytes]:
    """Start, blobs and checksum."""
    checksum = crc32(start)
    for i, blob in enumerate(blobs):
        checksum = joined(checksum, known[i], len(blob)) if i in known else crc32(blob, checksum)
    return [start, *blobs, CHECKSUM.pack(checksum)]


def cut(data: bytes, start: Start) -> list[bytes]:
    """The blobs of a whole message, once its length and checksum are right."""
    expected = start.size + sum(start.lengths) + CHECKSUM.size
    if len(data) != expected:
        wrong = Truncated if len(data) < expected else TrailingBytes
        raise wrong(f"{len(data)} bytes; the head announces {expected}")
    if crc32(memoryview(data)[: -CHECKSUM.size]) != CHECKSUM.unpack(data[-CHECKSUM.size :])[0]:
        raise ChecksumMismatch("the checksum does not match: the bytes were changed on the way")
    ends = list(itertools.accumulate(start.lengths, initial=start.size))
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def magic_of(parts: Sequence[bytes]) -> bytes:
    """The first four bytes of a message in parts, however it is cut."""
    return b"".join(part[:4] for part in parts)[:4]


def packed_start(read: Callable[[bytes], Start], parts: Sequence[bytes]) -> Start | None:
    """What the first part says, if the message is cut into start, blobs and checksum."""
    if parts:
        with contextlib.suppress(WireError):
            start = read(parts[0])
            if [len(part) for part in parts] == [start.size, *start.lengths, CHECKSUM.size]:
                return start
    return None


def check_parts(parts: Sequence[bytes]) -> list[int]:
    """The checksums of the blobs, once that of the message is right."""
    start, *blobs, end = parts
    checksum, found = crc32(start), [crc32(blob) for blob in blobs]
    for blob, one in zip(blobs, found, strict=True):
        checksum = joined(checksum, one, len(blob))
    if checksum != CHECKSUM.unpack(end)[0]:
        raise ChecksumMismatch("the checksum does not match: the bytes were changed on the way")
    return found
