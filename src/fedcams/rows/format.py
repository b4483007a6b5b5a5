"""The file format of one client's named rows: its name, its header, and its checks.

`<client>-<round>.rows`, both numbers decimal and unpadded, holds all rows of the client. It is, little-endian:

    0        4 bytes   magic "FCRR"
    4        uint32    format version, 3 (1 and 2 were the files of fedcams 0.1, which held one row)
    8        16 bytes  digest: BLAKE2b, personalised "fedcams.rows", of everything from 24 to the end of the header
    24       uint64    client
    32       uint64    round
    40       uint64    n, the number of rows
    48       n entries of 64 bytes, in ascending order of their names:
             32 bytes  name, ASCII, padded with zeros
             8 bytes   layout id
             uint64    d
             2 uint64  checksum of the row's values, see `fedcams.bits.checksum`
    48+64n   float32   the values of each row, in the order of the entries; the file ends after the last

The header contains the checksums of the values, so its digest identifies the whole file and can be read without the
values, and one row can be read and checked without the others.
"""

from __future__ import annotations

import errno
import hashlib
import io
import itertools
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcams.bits.checksum import Sums, range_sums, whole
from fedcams.errors import ResidualError
from fedcams.layout import Layout

MAGIC, VERSION = b"FCRR", 3
RESTORE = "restore the file, or delete it and reopen to continue without it"

Piece = NDArray[np.float32]
_PIECE = 2**18  # values that a thread reads at a time; they fit into its cache
_NAME = re.compile(r"(0|[1-9][0-9]*)-(0|[1-9][0-9]*)\.rows")
_START = struct.Struct("<4sI16s")
_ABOUT = struct.Struct("<QQQ")
_ENTRY = struct.Struct("<32s8sQQQ")


@dataclass(frozen=True)
class Header:
    """The contents of a row file's header: the digest in hex, and the checksum of each named row."""

    digest: str
    checksums: Mapping[str, Sums]

    def check_values(self, path: Path, name: str, found: Sums) -> None:
        """Refuse the row `name` of the file at `path` if the checksum `found` of its values is not the header's."""
        if found != self.checksums[name]:
            right = _hex(self.checksums[name])
            raise ResidualError(f"{path}: damaged, checksum {_hex(found)} of {name!r} instead of {right}; {RESTORE}")


class RowFormat:
    """Writes and checks the headers of row files that hold rows with these names and layouts."""

    def __init__(self, layouts: Mapping[str, Layout]) -> None:
        """Compute where each row is stored in a file, given the layouts in ascending order of their names."""
        self.layouts = layouts
        self.header_size = _START.size + _ABOUT.size + _ENTRY.size * len(layouts)
        ends = itertools.accumulate((4 * layout.d for layout in layouts.values()), initial=self.header_size)
        *starts, self.file_size = ends
        self.offsets = dict(zip(layouts, starts, strict=True))

    def pack(self, client: int, round: int, checksums: Sequence[Sums]) -> tuple[bytes, str]:
        """Return the header of this version and its digest in hex; `checksums` are those of the rows, in order."""
        entries = [
            _ENTRY.pack(name.encode(), layout.id, layout.d, *checksum)
            for (name, layout), checksum in zip(self.layouts.items(), checksums, strict=True)
        ]
        covered = b"".join([_ABOUT.pack(client, round, len(entries)), *entries])
        digest = _digest(covered)
        return _START.pack(MAGIC, VERSION, digest) + covered, digest.hex()

    def unpack(self, path: Path, data: bytes, size: int, client: int, round: int) -> Header:
        """Return the header in `data`, from the file at `path`, which has `size` bytes and should hold this version.

        Refuses a file that is damaged, truncated, or of another client, round, names or layouts, naming the difference.
        """
        if len(data) < self.header_size:
            raise ResidualError(f"{path}: truncated, {len(data)} of {self.header_size} bytes of header; {RESTORE}")
        magic, version, digest = _START.unpack_from(data)
        covered = data[_START.size :]
        found = _ABOUT.unpack_from(covered)
        entries = list(_ENTRY.iter_unpack(covered[_ABOUT.size :]))
        _refuse_difference(path, [("magic", magic, MAGIC), ("format version", version, VERSION)])
        _refuse_difference(path, [("number of rows", found[2], len(self.layouts))])
        if _digest(covered) != digest:
            right = _digest(covered).hex()
            raise ResidualError(f"{path}: damaged header, its digest is {right} instead of {digest.hex()}; {RESTORE}")
        _refuse_difference(path, [("client", found[0], client), ("round", found[1], round)])
        _refuse_difference(path, self._differences(entries))
        self._check_size(path, size)
        checksums = {name: (entry[3], entry[4]) for name, entry in zip(self.layouts, entries, strict=True)}
        return Header(digest.hex(), checksums)

    def _differences(self, entries: list[tuple[bytes, bytes, int, int, int]]) -> Iterator[tuple[str, object, object]]:
        for (name, layout), entry in zip(self.layouts.items(), entries, strict=True):
            yield "name of a row", entry[0].rstrip(b"\0"), name.encode()
            yield f"layout id of {name!r}", entry[1].hex(), layout.id.hex()
            yield f"d of {name!r}", entry[2], layout.d

    def _check_size(self, path: Path, size: int) -> None:
        found, right = size - self.header_size, self.file_size - self.header_size
        if found < right:
            raise ResidualError(f"{path}: truncated, {found} of {right} bytes of rows; {RESTORE}")
        if found > right:
            raise ResidualError(f"{path}: extra bytes follow the {right} bytes of rows; {RESTORE}")


def file_name(client: int, round: int) -> str:
    """Return the name of the file that holds this version."""
    return f"{client}-{round}.rows"


def version_of(path: Path) -> tuple[int, int]:
    """Return (client, round) from the name of a row file; refuses a file that is not named like one."""
    match = _NAME.fullmatch(path.name)
    version = (-1, -1) if match is None else (int(match[1]), int(match[2]))
    if not 0 <= min(version) <= max(version) < 2**64:
        raise ResidualError(f"{path}: not named <client>-<round>.rows; move it out of the folder")
    return version


def open_file(path: Path) -> io.FileIO:
    """Open a row file for reading, unbuffered; refuses a symbolic link."""
    return open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW))


def read_range(descriptor: int, offset: int, first: int, last: int, use: Callable[[int, Piece], None]) -> Sums:
    """Read the values from `first` up to `last` of the row at `offset` in a file; return their checksum.

    Calls `use(start, values)` for each piece; the next piece is read into the same memory.
    """
    memory, found = np.empty(min(_PIECE, last - first), dtype="<f4"), []
    for start in range(first, last, _PIECE):
        piece = memory[: last - start]
        view = piece.data.cast("B")
        if os.preadv(descriptor, [view], offset + 4 * start) < len(view):
            raise OSError(errno.EIO, "the file became shorter while it was read")
        found.append(range_sums(piece.view(np.uint32), start))
        use(start, piece)
    return whole(found)


def _digest(covered: bytes) -> bytes:
    return hashlib.blake2b(covered, digest_size=16, person=b"fedcams.rows").digest()


def _refuse_difference(path: Path, facts: Iterable[tuple[str, object, object]]) -> None:
    for field, value, right in facts:
        if value != right:
            raise ResidualError(f"{path}: the {field} is {value!r} instead of {right!r}; {RESTORE}")


def _hex(checksum: Sums) -> str:
    return "".join(f"{part:016x}" for part in checksum)
