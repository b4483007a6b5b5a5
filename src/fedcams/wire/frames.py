"""Frames: a fixed head and a few byte strings as one checked message."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

from fedcams.bits.checksum import crc32, crc32_of, joined
from fedcams.errors import BadMagic, ChecksumMismatch, TrailingBytes, Truncated, UnknownVersion

VERSION = 1
CHECKSUM = struct.Struct("<I")


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

    def pack(self, head: tuple[Any, ...], *blobs: bytes | Sequence[bytes]) -> bytes:
        """The message; a blob may be given in pieces, which saves a copy of it."""
        whole = [[blob] if isinstance(blob, bytes) else blob for blob in blobs]
        start = self.head.pack(self.magic, VERSION, *head, *(sum(map(len, blob)) for blob in whole))
        pieces = [start, *itertools.chain.from_iterable(whole)]
        return b"".join([*pieces, CHECKSUM.pack(crc32_of(pieces))])

    def parts(self, head: tuple[Any, ...], *blobs: bytes, first: int | None = None) -> list[bytes]:
        """The message as head, blobs and checksum: laid end to end they are `pack`, and no blob is copied.

        `first` is the checksum of the first blob, where that is known: it need not be read then.
        """
        start = self.head.pack(self.magic, VERSION, *head, *map(len, blobs))
        first = crc32(blobs[0]) if first is None else first
        return [start, *blobs, CHECKSUM.pack(crc32_of(blobs[1:], joined(crc32(start), first, len(blobs[0]))))]

    def unpack(self, data: bytes) -> tuple[tuple[Any, ...], list[bytes]]:
        """Head and blobs, or the WireError that says what is wrong."""
        lengths = self._check(data)
        _, _, *head = self.head.unpack_from(data)
        blobs, at = [], self.head.size
        for length in lengths:
            blobs.append(data[at : at + length])
            at += length
        return tuple(head[: len(head) - self.blobs]), blobs

    def unpack_parts(self, parts: Sequence[bytes]) -> tuple[tuple[Any, ...], list[bytes], int | None]:
        """The same for the parts of a message, the blobs as they are; however else it is cut, it is copied once.

        The third is the checksum of the first blob, where it was found on the way.
        """
        if not self._is_cut_as_packed(parts):
            return *self.unpack(b"".join(parts)), None  # which says what is wrong with it, if anything is
        start, *blobs, end = parts
        first = crc32(blobs[0])
        if crc32_of(blobs[1:], joined(crc32(start), first, len(blobs[0]))) != CHECKSUM.unpack(end)[0]:
            raise ChecksumMismatch("the checksum does not match: the bytes were changed on the way")
        _, _, *head = self.head.unpack(start)
        return tuple(head[: len(head) - self.blobs]), list(blobs), first

    def _is_cut_as_packed(self, parts: Sequence[bytes]) -> bool:
        sizes = [len(part) for part in parts]
        if len(sizes) != self.blobs + 2 or sizes[0] != self.head.size:
            return False
        if parts[0][:5] != self.magic + bytes([VERSION]):
            return False
        return sizes[1:] == [*self.head.unpack(parts[0])[-self.blobs :], CHECKSUM.size]

    def _check(self, data: bytes) -> list[int]:
        """The lengths of the blobs, once everything is known to fit together."""
        if data[:4] != self.magic[: len(data)]:
            raise BadMagic(f"this message starts with {self.magic!r}, these data with {data[:4]!r}")
        if len(data) < self.overhead:
            raise Truncated(f"{len(data)} bytes; this message has at least {self.overhead}")
        if data[4] != VERSION:
            raise UnknownVersion(f"version {data[4]}; this reader knows version {VERSION}, update fedcams")
        lengths = list(self.head.unpack_from(data)[-self.blobs :])
        expected = self.overhead + sum(lengths)
        if len(data) != expected:
            wrong = Truncated if len(data) < expected else TrailingBytes
            raise wrong(f"{len(data)} bytes; the head announces {expected}")
        (checksum,) = CHECKSUM.unpack(data[-CHECKSUM.size :])
        if crc32(memoryview(data)[: -CHECKSUM.size]) != checksum:
            raise ChecksumMismatch("the checksum does not match: the bytes were changed on the way")
        return lengths
