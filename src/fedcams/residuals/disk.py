"""Residual rows as files: a killed process leaves the old row or the new one, never half of one.

A folder holds `store.json` (format version, layout, round of the snapshot) and one file `<client>-<round>.row` for each
version of a row, both numbers decimal and unpadded. A row file is never changed; it is, little-endian:

    0   4 bytes   magic "FCRR"
    4   uint32    format version, 2
    8   8 bytes   layout id
    16  uint64    client
    24  uint64    round
    32  uint64    d
    40  2 uint64  checksum of what follows, see `fedcams.bits.checksum`
    56  float32   the row, d values; the file ends here

Every file is written under its name + `.tmp`, synced, renamed, and its folder synced. A store may keep a few files of
rows that are needed no more, as `<number>.row.spare`, to write the next ones over them.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import operator
import os
import re
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcams.bits.checksum import Sums, range_sums, sums, whole
from fedcams.bits.parallel import map_ranges
from fedcams.bits.vectors import add_
from fedcams.durable import os_errors, sync_folder, write_whole
from fedcams.errors import ResidualError
from fedcams.layout import Layout
from fedcams.residuals.base import ResidualStore

_HEADER = struct.Struct("<4sI8sQQQQQ")
_MAGIC, _VERSION = b"FCRR", 2
_NAME = re.compile(r"(0|[1-9][0-9]*)-(0|[1-9][0-9]*)\.row")
_STORE = "store.json"
_PIECE = 2**18  # values that a thread reads at a time: they stay in its cache
_FIELDS = ("magic", "format version", "layout id", "client", "round", "d")
_RESTORE = "restore the file, or delete it and reopen to go on without it"
_ANEW = "give an empty folder"
Piece = NDArray[np.float32]
_os_errors = functools.partial(os_errors, ResidualError)


@final
class DiskStore(ResidualStore):
    """One immutable file for each version; adding a row takes the memory of a small piece of it.

    One process writes a folder, and opening counts as writing: it removes what a killed process left behind. There is
    no lock. A second store on the same folder in that process may read until the first one commits.
    """

    def __init__(self, layout: Layout, folder: str | os.PathLike[str], spares: int = 0) -> None:
        """Opens the folder, or makes it; refuses one of another layout."""
        super().__init__(layout, torch.device("cpu"))
        self.folder, self.spares = Path(folder), spares
        self._identity = {"fedcams_residuals": _VERSION, "layout": layout.id.hex(), "d": layout.d}
        with _os_errors("open the folder", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            names = [path.name for path in self.folder.iterdir()]
        self._open_mark(names)  # first, so that a foreign folder is refused before anything in it is touched
        self._remove(name for name in names if name.endswith((".row.tmp", f"{_STORE}.tmp")))
        self._open_rows(name for name in names if name.endswith(".row"))
        found = [name for name in names if name.endswith(".row.spare")]
        self._spare = found[:spares]
        self._remove(found[spares:])

    # -- opening -------------------------------------------------------------------------------------------------

    def _open_mark(self, names: list[str]) -> None:
        if _STORE in names:
            self._read_mark(self.folder / _STORE)
        elif any(name.endswith(".row") for name in names):
            raise ResidualError(f"{self.folder / _STORE} is missing but there are rows; restore it, or {_ANEW}")
        else:
            self._mark(None)

    def _read_mark(self, path: Path) -> None:
        try:
            with _os_errors("read", path, "make it readable"):
                mark = json.loads(path.read_bytes())
            found = {field: mark[field] for field in self._identity}
            self._snapshot = -1 if mark["snapshot"] is None else operator.index(mark["snapshot"])
        except (ValueError, TypeError, KeyError) as error:
            raise ResidualError(f"{path}: damaged ({error!r}); restore it, or {_ANEW}") from error
        if found != self._identity:
            raise ResidualError(f"{path}: a store of {found}, not of {self._identity}; use its own model, or {_ANEW}")

    def _open_rows(self, names: Iterable[str]) -> None:
        """Finds the versions that live; a kill may have left others, which go."""
        stale = []
        for client, rounds in _versions(self.folder, names).items():
            *older, newest = sorted(rounds)
            self._rounds[client] = newest
            kept = max((round for round in older if round <= self._snapshot < newest), default=None)
            if kept is not None:
                self._aside[client] = kept
            stale += [_name(client, round) for round in older if round != kept]
        self._remove(stale)

    # -- what the base asks for ----------------------------------------------------------------------------------

    def _read(self, client: int, round: int) -> Tensor:
        row = np.empty(self.layout.d, np.float32)

        def copy(start: int, piece: Piece) -> None:
            row[start : start + len(piece)] = piece

        self._visit(client, round, copy)
        return torch.from_numpy(row)

    def _add_row(self, client: int, round: int, row: Tensor) -> None:
        def add_piece(start: int, piece: Piece) -> None:
            source = torch.from_numpy(piece.astype(np.float32, copy=False))
            add_(row[start : start + len(piece)], source.to(row.device), threads=1)

        self._visit(client, round, add_piece)

    def _visit(self, client: int, round: int, use: Callable[[int, Piece], None]) -> None:
        """Calls `use(start, values)` for every piece of the row, on several threads; damage is noticed at the end."""
        path, total = self.folder / _name(client, round), 4 * self.layout.d
        with _os_errors("read", path, "restore it, or reopen if another store wrote"), path.open("rb", 0) as file:
            expected = self._check_header(path, file.read(_HEADER.size), client, round)
            size = os.fstat(file.fileno()).st_size - _HEADER.size
            if size < total:
                raise ResidualError(f"{path}: truncated, {size} of {total} bytes of the row; {_RESTORE}")
            if size > total:
                raise ResidualError(f"{path}: something follows after the {total} bytes of the row; {_RESTORE}")
            found = whole(map_ranges(self.layout.d, lambda a, b: _visit_range(file.fileno(), a, b, use)))
        if found != expected:
            raise ResidualError(f"{path}: damaged, checksum {_hex(found)} instead of {_hex(expected)}; {_RESTORE}")

    def _check_header(self, path: Path, header: bytes, client: int, round: int) -> Sums:
        """Refuses a header that is not the one expected here; returns the checksum it gives."""
        if len(header) < _HEADER.size:
            raise ResidualError(f"{path}: truncated, {len(header)} of {_HEADER.size} bytes of header; {_RESTORE}")
        *found, first, second = _HEADER.unpack(header)
        expected = (_MAGIC, _VERSION, self.layout.id, client, round, self.layout.d)
        for field, value, right in zip(_FIELDS, found, expected, strict=True):
            if value != right:
                raise ResidualError(f"{path}: the {field} is {value!r} instead of {right!r}; {_RESTORE}")
        return first, second

    def _put(self, client: int, round: int, row: Tensor, freed: int | None) -> None:
        data = row.cpu().contiguous().numpy().astype("<f4", copy=False)
        about = (_MAGIC, _VERSION, self.layout.id, client, round, self.layout.d)
        path, over = self.folder / _name(client, round), self.folder / self._spare.pop() if self._spare else None
        with _os_errors("write", path):
            write_whole(path, _HEADER.pack(*about, *sums(data)), data.data, over=over)
        if freed is not None:
            self._free([_name(client, freed)])  # not synced: should it come back, the next opening removes it

    def _drop(self, versions: Iterable[tuple[int, int]]) -> None:
        self._free(_name(*version) for version in versions)
        with _os_errors("sync", self.folder):
            sync_folder(self.folder)  # a rolled-back row that came back would pass for the newest

    def _mark(self, t: int | None) -> None:
        path = self.folder / _STORE
        with _os_errors("write", path):
            write_whole(path, json.dumps({**self._identity, "snapshot": t}).encode())

    def _free(self, names: Iterable[str]) -> None:
        """Nobody needs these rows any more. After a failure of the machine one may be back, but never the newest."""
        for name in names:
            if len(self._spare) < self.spares:
                spare = next(free for i in itertools.count() if (free := f"{i}.row.spare") not in self._spare)
                with _os_errors("rename", self.folder / name):
                    (self.folder / name).replace(self.folder / spare)
                self._spare.append(spare)
            else:
                self._remove([name])

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with _os_errors("remove", self.folder / name):
                (self.folder / name).unlink(missing_ok=True)


def _visit_range(descriptor: int, first: int, last: int, use: Callable[[int, Piece], None]) -> Sums:
    """The values of one range, in one small memory; their checksum."""
    memory, found = np.empty(min(_PIECE, last - first), dtype="<f4"), []
    for start in range(first, last, _PIECE):
        piece = memory[: last - start]
        view = piece.data.cast("B")
        if os.preadv(descriptor, [view], _HEADER.size + 4 * start) < len(view):
            raise OSError(errno.EIO, "the file became shorter while it was read")
        found.append(range_sums(piece.view(np.uint32), start))
        use(start, piece)
    return whole(found)


def _hex(checksum: Sums) -> str:
    return "".join(f"{part:016x}" for part in checksum)


def _name(client: int, round: int) -> str:
    return f"{client}-{round}.row"


def _versions(folder: Path, names: Iterable[str]) -> dict[int, list[int]]:
    """Client -> rounds, from the names of row files."""
    versions: dict[int, list[int]] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ResidualError(f"{folder / name}: not named <client>-<round>.row; move it out of the folder")
        versions.setdefault(int(match[1]), []).append(int(match[2]))
    return versions
