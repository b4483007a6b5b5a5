"""The residuals of a checkpoint: the rows that a simulation holds in memory, once more on disk."""

from __future__ import annotations

from pathlib import Path

from fedcams.errors import ResidualError
from fedcams.residuals import ResidualStore

Versions = list[list[int]]
"""[client, round of its row], ascending: names the rows of a checkpoint."""


class SavedRows:
    """Rows in memory, for speed, and a store on disk that follows them from checkpoint to checkpoint."""

    def __init__(self, rows: ResidualStore, folder: Path) -> None:
        self._rows, self._folder = rows, folder
        self._opened: ResidualStore | None = None  # when first needed: opening makes the folder

    def save(self) -> Versions:
        """Writes the rows that changed, one by one, beside those that the snapshot keeps; returns what is there."""
        for client, round in versions(self._rows):
            if self._disk.round_of(client) != round:
                self._disk.commit([client], self._rows.gather([client]), round)
        return versions(self._disk)

    def mark(self, round: int) -> None:
        """The checkpoint of this round is complete: lets go of the rows of the one before."""
        self._disk.snapshot(round)

    def load(self, round: int, expected: Versions) -> None:
        """Brings the rows of the checkpoint of this round back into memory; refuses where one of them is missing."""
        if self._disk.snapshot_round == round:
            self._disk.rollback(round)
        else:
            self._disk.snapshot(round)  # the kill fell between the checkpoint and its mark
        if versions(self._disk) != expected:
            raise ResidualError(f"{len(expected)} rows were saved, and not all of them are there")
        for client, committed in expected:
            self._rows.commit([client], self._disk.gather([client]), committed)

    @property
    def _disk(self) -> ResidualStore:
        if self._opened is None:
            self._opened = ResidualStore.on_disk(self._rows.layout, self._folder)
        return self._opened


def versions(store: ResidualStore) -> Versions:
    """Which rows a store holds."""
    return [[client, round] for client in store.ids() if (round := store.round_of(client)) is not None]
