"""The rows of a checkpoint: kept in memory with a copy on disk, or on disk only."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from fedcams.errors import ResidualError
from fedcams.rows.base import RowStore, Versions
from fedcams.rows.disk import DiskRows

if TYPE_CHECKING:
    from torch import Tensor


class SavedRows:
    """Rows in memory, for speed, and a store on disk that is updated at every checkpoint.

    To survive a kill at any moment: call `save()`, write the checkpoint with the list that it returned, then call
    `mark(round)`. A run that continues calls `load(round, list)` with the list in its checkpoint.
    """

    def __init__(self, rows: RowStore, folder: str | os.PathLike[str]) -> None:
        """Save the store `rows` in a folder, which is opened or created when it is first needed."""
        self._rows, self._folder = rows, Path(folder)

    def save(self) -> Versions:
        """Write the rows that changed, keeping those of the last checkpoint; return `[client, round, digest]` of all.

        Rows that did not change are neither read nor written.
        """
        for client, round, _ in self._rows.versions():
            if self._disk.round_of(client) != round:
                self._disk.commit([client], _of_client(self._rows, client), round)
        return self._disk.versions()

    def mark(self, round: int) -> None:
        """Record that the checkpoint of this round is complete; the rows of the previous one are dropped."""
        self._disk.snapshot(round)

    def load(self, round: int, expected: Versions) -> None:
        """Copy the rows of this round's checkpoint into memory.

        `expected` is what `save` returned for it. Refuses rows that are missing, of another round or of another run,
        before anything on disk changes, and damaged values when it reads them.
        """
        _return_to(self._disk, round, expected)
        for client, committed, _ in expected:
            self._rows.commit([client], _of_client(self._disk, client), committed)

    def clear(self) -> None:
        """Remove the copy, for a run that starts at its first round."""
        if self._folder.is_dir() and not self._folder.is_symlink():
            shutil.rmtree(self._folder)
            self.__dict__.pop("_disk", None)

    @functools.cached_property
    def _disk(self) -> DiskRows:
        return RowStore.on_disk(self._rows.layouts, self._folder)


class DirectRows:
    """Rows that are kept on disk only: the same methods as `SavedRows`, without a copy in memory."""

    def __init__(self, rows: RowStore) -> None:
        """Use the store `rows`; refuses one that is not on disk."""
        if not isinstance(rows, DiskRows):
            raise ResidualError(f"{type(rows).__name__} is not on disk; give RowStore.on_disk, or use SavedRows")
        self._disk = rows

    def save(self) -> Versions:
        """Return `[client, round, digest]` of all rows, which are on disk already."""
        return self._disk.versions()

    def mark(self, round: int) -> None:
        """Record that the checkpoint of this round is complete; the rows of the previous one are dropped."""
        self._disk.snapshot(round)

    def load(self, round: int, expected: Versions) -> None:
        """Restore the rows of this round's checkpoint; refuses what `SavedRows.load` refuses."""
        _return_to(self._disk, round, expected)

    def clear(self) -> None:
        """Empty the store, for a run that starts at its first round."""
        self._disk.clear()


def _return_to(disk: DiskRows, round: int, expected: Versions) -> None:
    complete = disk.snapshot_round == round  # otherwise a kill came between the checkpoint and its mark
    disk.verify(expected, at_snapshot=complete)
    if complete:
        disk.rollback(round)
    else:
        disk.snapshot(round)


def _of_client(store: RowStore, client: int) -> dict[str, Tensor]:
    return {name: store.gather(name, [client]) for name in store.layouts}
