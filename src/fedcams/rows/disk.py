"""Named rows as files: a killed process leaves either all old rows of a client or all new ones.

A folder holds `store.json` (format version, names and layouts, round of the snapshot) and one file per version of a
client's rows (see `fedcams.rows.format`). Such a file never changes: it is written under its name + `.tmp`, synced and
renamed, and then the folder is synced. A store may keep a few files that are no longer needed, as
`<number>.rows.spare`, and write the next rows over them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np
import torch

from fedcams.bits.checksum import sums, whole
from fedcams.bits.parallel import map_ranges
from fedcams.bits.vectors import add_
from fedcams.durable import is_own, os_errors, private_folder, sync_folder, write_whole
from fedcams.errors import ResidualError
from fedcams.layout import Layout
from fedcams.rows.base import RowStore, Versions
from fedcams.rows.format import RESTORE, VERSION, Header, Piece, RowFormat, file_name, open_file, read_range, version_of

if TYPE_CHECKING:
    from torch import Tensor

_STORE = "store.json"
_EMPTY = "give an empty folder"
_NAMED = 3  # differences that one message names
_os_errors = functools.partial(os_errors, ResidualError)


@final
class DiskRows(RowStore):
    """One file per client and version; opened by `RowStore.on_disk`. Adding a row takes little memory.

    Only one process may write to a folder, and opening counts as writing: it removes what a killed process left behind.
    There is no lock. A second store on the same folder may read until the first one commits.
    """

    def __init__(self, layouts: Mapping[str, Layout], folder: str | os.PathLike[str], spares: int = 0) -> None:
        super().__init__(layouts, torch.device("cpu"))
        self.folder, self.spares = Path(folder), spares
        self._format = RowFormat(self.layouts)
        self._digests: dict[tuple[int, int], str] = {}  # (client, round) -> digest, as far as known
        names = self._list()
        self._open_mark(names)  # first, so that a foreign folder is refused before anything in it is touched
        self._remove(name for name in names if name.endswith((".rows.tmp", f"{_STORE}.tmp")))
        self._open_versions(name for name in names if name.endswith(".rows"))
        found = [name for name in names if name.endswith(".rows.spare")]
        self._spare = found[:spares]
        self._remove(found[spares:])

    # -- opening -------------------------------------------------------------------------------------------------

    def _list(self) -> list[str]:
        """Return the names in the folder, which is created if missing; refuses symbolic links and files of 0.1."""
        with _os_errors("open the folder", self.folder):
            private_folder(self.folder)
            with os.scandir(self.folder) as entries:
                links = {entry.name: entry.is_symlink() for entry in entries}
        link = next((name for name, is_link in links.items() if is_link), None)
        if link is not None:
            raise ResidualError(_link(self.folder / link))
        if any(name.endswith((".row", ".row.tmp", ".row.spare")) for name in links):
            raise ResidualError(_written_by_0_1(self.folder))
        return list(links)

    def _open_mark(self, names: list[str]) -> None:
        if _STORE in names:
            self._read_mark(self.folder / _STORE)
        elif any(name.endswith(".rows") for name in names):
            raise ResidualError(f"{self.folder / _STORE} is missing, but there are rows; restore it, or {_EMPTY}")
        else:
            self._mark(None)

    def _read_mark(self, path: Path) -> None:
        with _os_errors("read", path, "make it readable"):
            data = path.read_bytes()
        try:
            mark = dict(json.loads(data))
            if "fedcams_residuals" in mark:
                raise ResidualError(_written_by_0_1(self.folder))
            found = {field: mark[field] for field in self._identity}
            self._snapshot = -1 if mark["snapshot"] is None else operator.index(mark["snapshot"])
            if not -1 <= self._snapshot < 2**64:
                raise ValueError(f"snapshot={self._snapshot}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ResidualError(f"{path}: damaged ({error!r}); restore it, or {_EMPTY}") from error
        if found != self._identity:
            difference = f"a store of {found}, not of {self._identity}"
            raise ResidualError(f"{path}: {difference}; use it with its own model and method, or {_EMPTY}")

    @functools.cached_property
    def _identity(self) -> dict[str, object]:
        rows = {name: {"layout": layout.id.hex(), "d": layout.d} for name, layout in self.layouts.items()}
        return {"fedcams_rows": VERSION, "rows": rows}

    def _open_versions(self, names: Iterable[str]) -> None:
        """Find the versions to keep, and remove others that a kill may have left."""
        versions: dict[int, list[int]] = {}
        for client, round in (version_of(self.folder / name) for name in names):
            versions.setdefault(client, []).append(round)
        for client, rounds in versions.items():
            *older, newest = sorted(rounds)
            self._rounds[client] = newest
            kept = max((round for round in older if round <= self._snapshot < newest), default=None)
            if kept is not None:
                self._aside[client] = kept
            self._remove(file_name(client, round) for round in older if round != kept)

    # -- what a checkpoint says about its rows ---------------------------------------------------------------------

    def verify(self, expected: Versions, at_snapshot: bool = False) -> None:
        """Compare the rows with `expected`, a list of `[client, round, digest]` that `versions` once returned.

        `at_snapshot` compares them as `rollback` would leave them, without changing them. Refuses rows that are
        missing, not expected, or of another round or digest, such as another run's, naming the client and the folder.
        Reads only the headers of files; values are checked when they are read.
        """
        found = self._described(self._at_snapshot() if at_snapshot else self._rounds)
        ours, theirs = ({client: (round, digest) for client, round, digest in rows} for rows in (found, expected))
        different = [_difference(c, ours.get(c), theirs.get(c)) for c in sorted({*ours, *theirs})]
        wrong = [text for text in different if text]
        if wrong:
            more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
            raise ResidualError(f"{self.folder}: {', '.join(wrong[:_NAMED])}{more}; restore the rows that were saved")

    def _digest(self, client: int, round: int) -> str:
        if (client, round) not in self._digests:
            with self._opened(client, round):  # which stores the digest
                pass
        return self._digests[client, round]

    # -- reading -------------------------------------------------------------------------------------------------

    def _copy_row_(self, name: str, client: int, round: int, row: Tensor) -> None:
        target = row.numpy()

        def copy_piece(start: int, piece: Piece) -> None:
            target[start : start + len(piece)] = piece

        self._visit(name, client, round, copy_piece)

    def _add_row_(self, name: str, client: int, round: int, row: Tensor) -> None:
        def add_piece(start: int, piece: Piece) -> None:
            source = torch.from_numpy(piece.astype(np.float32, copy=False))
            add_(row[start : start + len(piece)], source.to(row.device), threads=1)

        self._visit(name, client, round, add_piece)

    def _visit(self, name: str, client: int, round: int, use: Callable[[int, Piece], None]) -> None:
        """Call `use(start, values)` for each piece of the row, on several threads; damage is detected at the end."""
        d, offset = self.layouts[name].d, self._format.offsets[name]
        with self._opened(client, round) as (descriptor, header):
            found = whole(map_ranges(d, lambda a, b: read_range(descriptor, offset, a, b, use)))
        header.check_values(self.folder / file_name(client, round), name, found)

    @contextlib.contextmanager
    def _opened(self, client: int, round: int) -> Iterator[tuple[int, Header]]:
        """Open the file of this version and check its header, including its digest if that is known."""
        path = self.folder / file_name(client, round)
        with _os_errors("read", path, "restore it, or reopen if another store wrote"), open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = self._format.unpack(path, file.read(self._format.header_size), size, client, round)
            known = self._digests.setdefault((client, round), header.digest)
            if header.digest != known:
                raise ResidualError(
                    f"{path}: not the rows that were written, digest {header.digest} instead of {known}; {RESTORE}"
                )
            yield file.fileno(), header

    # -- writing -------------------------------------------------------------------------------------------------

    def _put(self, client: int, round: int, rows: Mapping[str, Tensor], freed: int | None) -> None:
        values = [rows[name].cpu().contiguous().numpy().astype("<f4", copy=False) for name in self.layouts]
        header, digest = self._format.pack(client, round, [sums(row) for row in values])
        name = file_name(client, round)
        try:
            self._write(name, header, *(row.data for row in values), over=self._take_spare())
        except ResidualError:
            with contextlib.suppress(ResidualError):
                self._remove([name])  # complete but perhaps not durable: it must not count as the newest version later
            raise
        self._digests[client, round] = digest
        if freed is not None:
            self._free([(client, freed)])  # not synced: if a crash brings it back, the next opening removes it

    def _drop(self, versions: Iterable[tuple[int, int]]) -> None:
        self._free(versions)
        with _os_errors("sync", self.folder):
            sync_folder(self.folder)  # otherwise a crash could bring back rolled-back rows, which would count as newest

    def clear(self) -> None:
        """Remove all rows and the snapshot."""
        self._drop([*self._rounds.items(), *self._aside.items()])
        self._rounds, self._aside, self._snapshot = {}, {}, -1
        self._mark(None)

    def _mark(self, t: int | None) -> None:
        self._write(_STORE, json.dumps({**self._identity, "snapshot": t}).encode())

    def _write(self, name: str, *parts: bytes | memoryview, over: Path | None = None) -> None:
        path = self.folder / name
        with _os_errors("write", path):
            if (temporary := path.with_name(f"{name}.tmp")).is_symlink():
                raise ResidualError(_link(temporary))
            write_whole(path, *parts, over=over)

    # -- files that are no longer needed -------------------------------------------------------------------------

    def _take_spare(self) -> Path | None:
        """Return an unneeded file to write over that nothing outside the folder shares; None if there is none."""
        while self._spare:
            path = self.folder / self._spare.pop()
            with _os_errors("read", path):
                if is_own(path):
                    return path
            self._remove([path.name])
        return None

    def _free(self, versions: Iterable[tuple[int, int]]) -> None:
        """Turn files into spares or remove them. A crash of the machine may bring one back, but never as the newest."""
        for version in versions:
            name = file_name(*version)
            self._digests.pop(version, None)
            if len(self._spare) < self.spares:
                spare = next(free for i in itertools.count() if (free := f"{i}.rows.spare") not in self._spare)
                with _os_errors("rename", self.folder / name), contextlib.suppress(FileNotFoundError):
                    (self.folder / name).replace(self.folder / spare)
                    self._spare.append(spare)
            else:
                self._remove([name])

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with _os_errors("remove", self.folder / name):
                (self.folder / name).unlink(missing_ok=True)


def _difference(client: int, ours: tuple[int, str] | None, theirs: tuple[int, str] | None) -> str:
    """Return how the rows of a client differ from those expected; an empty string if they do not."""
    if ours == theirs:
        return ""
    if ours is None:
        return f"the rows of client {client} are missing"
    if theirs is None:
        return f"there are rows of client {client}, but none were saved"
    if ours[0] != theirs[0]:
        return f"the rows of client {client} are of round {ours[0]} instead of {theirs[0]}"
    return f"the rows of client {client} differ, digest {ours[1]} instead of {theirs[1]}"


def _link(path: Path) -> str:
    return f"{path} is a symbolic link, and a store writes and deletes nothing outside its folder; remove the link"


def _written_by_0_1(folder: Path) -> str:
    fix = f"finish that run with 0.1.0, or {_EMPTY}"
    return f"{folder} was written by fedcams 0.1; version 0.1.0 is the last one that reads it; {fix}"
