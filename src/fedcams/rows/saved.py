"""The rows of a checkpoint: those that a run holds in memory, and a copy on disk."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

from torch import Tensor

from fedcams.errors import ResidualError
from fedcams.rows.base import RowStore, Versions
from fedcams.rows.disk import DiskRows


class SavedRows:
    """Rows in memory, for speed, and a store on disk that follows them from checkpoint to checkpoint.

    The order that survives a kill at any moment: `save()`; write the checkpoint with the list that it returned;
    `mark(round)`. A run that goes on calls `load(round, list)` with what its checkpoint says.
    """

    def __init__(self, rows: RowStore, folder: str | os.PathLike[str]) -> None:
        """Takes the store to save and the folder for the copy, which is opened or made when it is first needed."""
        self._rows, self._folder = rows, Path(folder)

    def save(self) -> Versions:
        """Writes the rows that changed, beside those of the last checkpoint; returns `[client, round, digest]` of all.

        Rows that did not change are neither read nor written.
        """
        for client, round, _ in self._rows.versions():
            if self._disk.round_of(client) != round:
                self._disk.commit([client], _of_client(self._rows, client), round)
        return self._disk.versions()

    def mark(self, round: int) -> None:
        """Says that the checkpoint of this round is complete: the rows of the one before are dropped."""
        self._disk.snapshot(round)

    def load(self, round: int, expected: Versions) -> None:
        """Copies the rows of the checkpoint of this round into memory.

        `expected` is what `save` returned for it. Refuses, before anything on disk changes, rows that are missing, of
        another round or of another run; and damaged values when it reads them.
        """
        _return_to(self._disk, round, expected)
        for client, committed, _ in expected:
            self._rows.commit([client], _of_client(self._disk, client), committed)

    def clear(self) -> None:
        """Removes the copy, for a run that starts at its first round."""
        if self._folder.is_dir() and not self._folder.is_symlink():
            shutil.rmtree(self._folder)
            self.__dict__.pop("_disk", None)

    @functools.cached_property
    def _disk(self) -> DiskRows:
        return RowStore.on_disk(self._rows.layouts, self._folder)


class DirectRows:
    """Rows that live on disk themselves: the same steps as `SavedRows`, without a copy in memory."""

    def __init__(self, rows: RowStore) -> None:
        """Takes the store, which must be one on disk."""
        if not isinstance(rows, DiskRows):
            raise ResidualError(f"{type(rows).__name__} ends with the process; give RowStore.on_disk, or SavedRows")
        self._disk = rows

    def save(self) -> Versions:
        """Returns `[client, round, digest]` of all rows, which are on disk already."""
        return self._disk.versions()

    def mark(self, round: int) -> None:
        """Says that the checkpoint of this round is complete: the rows of the one before are dropped."""
        self._disk.snapshot(round)

    def load(self, round: int, expected: Versions) -> None:
        """Brings back the rows of the checkpoint of this round; refuses what `SavedRows.load` refuses."""
        _return_to(self._disk, round, expected)

    def clear(self) -> None:
        """Empties the store, for a run that starts at its first round."""
        self._disk.clear()


def _return_to(disk: DiskRows, round: int, expected: Versions) -> None:
    complete = disk.snapshot_round == round  # else the kill fell between the checkpoint and its mark
    disk.verify(expected, at_snapshot=complete)
    if complete:
        disk.rollback(round)
    else:
        disk.snapshot(round)


def _of_client(store: RowStore, client: int) -> dict[str, Tensor]:
    return {name: store.gather(name, [client]) for name in store.layouts}
