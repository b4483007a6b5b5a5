"""Frames: a fixed head and a few byte strings (blobs) in one message with a checksum."""

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
    """What precedes the blobs: the values of the head, the names and lengths of the blobs, and its own size."""

    head: Head
    names: tuple[str, ...]
    lengths: list[int]
    size: int


class Frame:
    """One kind of message: magic (4 bytes), version (1), head, the length (8) of each blob, the blobs, crc32 (4).

    `head` is a `struct` format without byte order, `blobs` the number of blobs.
    """

    def __init__(self, magic: bytes, head: str, blobs: int) -> None:
        self.magic = magic
        self.head = struct.Struct(f"<4sB{head}{blobs}Q")
        self.blobs = blobs

    @property
    def overhead(self) -> int:
        """The bytes of a message without its blobs."""
        return self.head.size + CHECKSUM.size

    def pack(self, head: Head, *blobs: bytes | Sequence[bytes]) -> bytes:
        """Return the message as bytes; a blob may be given in pieces, which saves a copy."""
        whole = [[blob] if isinstance(blob, bytes) else blob for blob in blobs]
        start = self.head.pack(self.magic, VERSION, *head, *(sum(map(len, blob)) for blob in whole))
        pieces = [start, *itertools.chain.from_iterable(whole)]
        return b"".join([*pieces, CHECKSUM.pack(crc32_of(pieces))])

    def parts(self, head: Head, *blobs: bytes, known: Mapping[int, int] | None = None) -> list[bytes]:
        """Return the message as a list of head, blobs and checksum; joined, they equal `pack`. No blob is copied.

        `known` maps the index of a blob to its checksum; those blobs are not read.
        """
        start = self.head.pack(self.magic, VERSION, *head, *map(len, blobs))
        return with_checksum(start, blobs, known or {})

    def unpack(self, data: bytes) -> tuple[Head, list[bytes]]:
        """Return the head and the blobs of a message; a WireError says what is wrong with it."""
        start = self._start(data)
        return start.head, cut(data, start)

    def unpack_parts(self, parts: Sequence[bytes]) -> tuple[Head, list[bytes], list[int] | None]:
        """Return the head, the blobs and their checksums of a message in parts; a WireError says what is wrong with it.

        If the message is cut as `parts` cuts it, no blob is copied. Otherwise it is joined first, and the checksums are
        None.
        """
        if (start := packed_start(self._start, parts)) is None:
            return *self.unpack(b"".join(parts)), None  # raises an error if anything is wrong with it
        return start.head, list(parts[1:-1]), check_parts(parts)

    def _start(self, data: bytes) -> Start:
        values = read_head(data, self.magic, self.head)
        count = len(values) - self.blobs
        return Start(values[:count], (), list(values[count:]), self.head.size)


def read_head(data: bytes, magic: bytes, head: struct.Struct) -> Head:
    """Return the values of the head after magic and version; refuses another magic or version, and short data."""
    if data[:4] != magic[: len(data)]:
        raise BadMagic(f"a message of this kind starts with {magic!r}, this data with {data[:4]!r}")
    if len(data) < head.size:
        raise Truncated(f"{len(data)} bytes; this message has at least {head.size + CHECKSUM.size}")
    if data[4] != VERSION:
        raise UnknownVersion(f"version {data[4]}; this reader knows version {VERSION}, update fedcams")
    return head.unpack_from(data)[2:]


def with_checksum(start: bytes, blobs: Sequence[bytes], known: Mapping[int, int]) -> list[bytes]:
    """Return start, blobs and their checksum as parts; `known` maps the index of a blob to its checksum."""
    checksum = crc32(start)
    for i, blob in enumerate(blobs):
        checksum = joined(checksum, known[i], len(blob)) if i in known else crc32(blob, checksum)
    return [start, *blobs, CHECKSUM.pack(checksum)]


def cut(data: bytes, start: Start) -> list[bytes]:
    """Return the blobs of a whole message; refuses a wrong length or checksum."""
    expected = start.size + sum(start.lengths) + CHECKSUM.size
    if len(data) != expected:
        wrong = Truncated if len(data) < expected else TrailingBytes
        raise wrong(f"{len(data)} bytes; the header says {expected}")
    if crc32(memoryview(data)[: -CHECKSUM.size]) != CHECKSUM.unpack(data[-CHECKSUM.size :])[0]:
        raise ChecksumMismatch("the checksum does not match: the bytes were changed in transit")
    ends = list(itertools.accumulate(start.lengths, initial=start.size))
    return [data[a:b] for a, b in itertools.pairwise(ends)]


def magic_of(parts: Sequence[bytes]) -> bytes:
    """Return the first four bytes of a message in parts, wherever it is cut."""
    return b"".join(part[:4] for part in parts)[:4]


def packed_start(read: Callable[[bytes], Start], parts: Sequence[bytes]) -> Start | None:
    """Return what `read` finds in the first part if the message is cut into start, blobs and checksum; else None."""
    if parts:
        with contextlib.suppress(WireError):
            start = read(parts[0])
            if [len(part) for part in parts] == [start.size, *start.lengths, CHECKSUM.size]:
                return start
    return None


def check_parts(parts: Sequence[bytes]) -> list[int]:
    """Return the checksums of the blobs of a message in parts; refuses a wrong checksum of the message."""
    start, *blobs, end = parts
    checksum, found = crc32(start), [crc32(blob) for blob in blobs]
    for blob, one in zip(blobs, found, strict=True):
        checksum = joined(checksum, one, len(blob))
    if checksum != CHECKSUM.unpack(end)[0]:
        raise ChecksumMismatch("the checksum does not match: the bytes were changed in transit")
    return found
