"""Messages that carry named streams: the usual pair in a fixed frame, any other set after a table of names."""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Collection, Mapping, Sequence

from fedcams.errors import BadStreamCount, BadStreamName, NonCanonical, Truncated, UnorderedStreams
from fedcams.wire.frames import (
    CHECKSUM,
    VERSION,
    Frame,
    Head,
    Start,
    check_parts,
    cut,
    magic_of,
    packed_start,
    read_head,
    with_checksum,
)

LENGTH = struct.Struct("<Q")
MAX_STREAMS, MAX_NAME = 16, 32
NAME = re.compile(rf"[a-z0-9_-]{{1,{MAX_NAME}}}")


class StreamFrame:
    """One kind of message that carries named streams.

    The sets {main} and {main, extra} travel in a `Frame` of two blobs with the magic `short`; an empty second blob
    means that there is no `extra`. Every other set travels with the magic `long`, followed by: version (1 byte), head,
    number of streams (1); for each stream, in ascending order of names, the length of its name (1), the name and the
    length of its payload (8); the payloads in the same order; crc32 (4).
    """

    def __init__(self, short: bytes, long: bytes, head: str, main: str, extra: str) -> None:
        self.short = Frame(short, head, blobs=2)
        self.magic, self.head = long, struct.Struct(f"<4sB{head}B")
        self.main, self.extra = main, extra

    @property
    def magics(self) -> tuple[bytes, bytes]:
        """The two magics with which messages of this kind start."""
        return self.short.magic, self.magic

    def size(self, sizes: Mapping[str, int]) -> int:
        """Return the length of a message with payloads of these lengths, by name; refuses like `check_streams`."""
        check_streams(sizes, self.main)
        if self._is_short(sizes):
            return self.short.overhead + sum(sizes.values())
        table = sum(1 + len(name) + LENGTH.size for name in sizes)
        return self.head.size + table + sum(sizes.values()) + CHECKSUM.size

    def parts(self, head: Head, streams: Mapping[str, bytes], known: Mapping[str, int]) -> list[bytes]:
        """Return the message in parts; no payload is copied.

        `streams` must be in order, as `in_order` returns them. `known` maps names to checksums; those payloads are not
        read.
        """
        if self._is_short(streams):
            names = self.main, self.extra
            blobs = [streams.get(name, b"") for name in names]
            return self.short.parts(head, *blobs, known={i: known[n] for i, n in enumerate(names) if n in known})
        start = self.head.pack(self.magic, VERSION, *head, len(streams))
        table = [bytes([len(name)]) + name.encode() + LENGTH.pack(len(streams[name])) for name in streams]
        known_at = {i: known[name] for i, name in enumerate(streams) if name in known}
        return with_checksum(b"".join([start, *table]), list(streams.values()), known_at)

    def unpack(self, data: bytes) -> tuple[Head, dict[str, bytes]]:
        """Return the head and the streams of a message; a WireError says what is wrong with it."""
        if not self._is_long(data[:4]):
            head, blobs = self.short.unpack(data)
            return head, self._named(blobs)
        start = self._start(data)
        blobs = cut(data, start)
        self._check(start)
        return start.head, dict(zip(start.names, blobs, strict=True))

    def unpack_parts(self, parts: Sequence[bytes]) -> tuple[Head, dict[str, bytes], dict[str, int]]:
        """Return the head, the streams and the payloads' checksums of a message in parts.

        There are no checksums if the message had to be joined first. A WireError says what is wrong with it.
        """
        if not self._is_long(magic_of(parts)):
            head, blobs, checksums = self.short.unpack_parts(parts)
            return head, self._named(blobs), dict(zip((self.main, self.extra), checksums or (), strict=False))
        if (start := packed_start(self._start, parts)) is None:
            return *self.unpack(b"".join(parts)), {}
        found = check_parts(parts)
        self._check(start)
        streams = dict(zip(start.names, parts[1:-1], strict=True))
        return start.head, streams, dict(zip(start.names, found, strict=True))

    def _is_long(self, magic: bytes) -> bool:
        """Return whether data that starts like this has a table; data that could be either is read as short."""
        return self.magic.startswith(magic) and not self.short.magic.startswith(magic)

    def _is_short(self, names: Collection[str]) -> bool:
        return self.main in names and not set(names) - {self.main, self.extra}

    def _named(self, blobs: list[bytes]) -> dict[str, bytes]:
        main, extra = blobs
        return {self.main: main} | ({self.extra: extra} if extra else {})

    def _start(self, data: bytes) -> Start:
        *head, count = read_head(data, self.magic, self.head)
        _check_count(count)
        names, lengths, at = [], [], self.head.size
        for _ in range(count):
            name, length, at = _read_entry(data, at)
            names.append(name)
            lengths.append(length)
        return Start(tuple(head), tuple(names), lengths, at)

    def _check(self, start: Start) -> None:
        """Refuse names out of order, and sets of streams that must be encoded in the short form or not at all."""
        for before, name in itertools.pairwise(start.names):
            if name <= before:
                raise UnorderedStreams(f"the stream {name!r} follows {before!r}; names must ascend, each once")
        check_streams(dict(zip(start.names, start.lengths, strict=True)), self.main)
        if self._is_short(start.names):
            found, short = ", ".join(start.names), self.short.magic.decode()
            raise NonCanonical(f"the streams {found} under {self.magic.decode()}; this set needs the magic {short}")


def in_order(streams: Mapping[str, bytes], main: str) -> dict[str, bytes]:
    """Return the streams in ascending order of names; refuses what `check_streams` refuses."""
    check_streams({name: len(payload) for name, payload in streams.items()}, main)
    return {name: streams[name] for name in sorted(streams)}


def check_streams(sizes: Mapping[str, int], main: str) -> None:
    """Refuse a set of streams, name -> bytes, that no message can carry: too many, an invalid name, an empty payload.

    Only the payload of `main` may be empty.
    """
    _check_count(len(sizes))
    for name, size in sizes.items():
        if not NAME.fullmatch(name):
            raise BadStreamName(f"a stream named {name!r}; allowed: 1 to {MAX_NAME} characters of a-z, 0-9, _ and -")
        if size == 0 and name != main:
            raise NonCanonical(f"the stream {name!r} is empty; leave it out")


def _check_count(count: int) -> None:
    if not 1 <= count <= MAX_STREAMS:
        raise BadStreamCount(f"a message of {count} streams; allowed: 1 to {MAX_STREAMS}")


def _read_entry(data: bytes, at: int) -> tuple[str, int, int]:
    """Return one entry of the table of streams: name, length of the payload, and where the next entry starts."""
    if at >= len(data):
        raise Truncated(f"{len(data)} bytes; the table of streams is cut off")
    if not 1 <= (size := data[at]) <= MAX_NAME:
        raise BadStreamName(f"the name of a stream has {size} bytes; allowed: 1 to {MAX_NAME}")
    end = at + 1 + size
    if len(data) < end + LENGTH.size:
        raise Truncated(f"{len(data)} bytes; the table of streams takes at least {end + LENGTH.size}")
    return data[at + 1 : end].decode("latin-1"), LENGTH.unpack_from(data, end)[0], end + LENGTH.size
