"""ResidualStore: the residuals of error feedback, one float32 row `[d]` for each client seen so far."""

from __future__ import annotations

import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import SupportsIndex

import torch
from torch import Tensor

from fedcams.bits.vectors import add_
from fedcams.errors import LayoutError, ResidualError
from fedcams.layout import Layout


class ResidualStore(ABC):
    """Rows `e_i [d]` by client id; a client never seen is zeros and costs nothing.

    A row carries the round of its commit, so (client, round) names one version of it. This class decides which
    versions live: the newest of every client, and for those that changed since the snapshot the one that the snapshot
    needs. An implementation only puts, reads and drops versions.

    To resume after a kill at any moment: write the checkpoint of round t first, then `snapshot(t)`, then go on. A run
    that finds its checkpoint at t calls `rollback(t)`, or `snapshot(t)` where the kill fell between the two and
    `snapshot_round` is still older.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """An empty store; `gather` puts its rows on `device`."""
        self.layout = layout
        self.device = device
        self._rounds: dict[int, int] = {}  # client -> round of its row
        self._aside: dict[int, int] = {}  # client -> round of the row that only the snapshot still needs
        self._snapshot = -1  # -1: none taken, so that a round is "after the snapshot" by one comparison

    @staticmethod
    def in_memory(layout: Layout, device: str | torch.device = "cpu") -> ResidualStore:
        """Rows in host or device memory; they end with the process."""
        from fedcams.residuals.memory import MemoryStore

        return MemoryStore(layout, torch.device(device))

    @staticmethod
    def on_disk(layout: Layout, folder: str | os.PathLike[str], spares: int = 0) -> ResidualStore:
        """Rows as files in a folder (made where missing); they outlive the process.

        `spares` is how many files of rows that are needed no more stay, to be written over by the next ones: that is
        quicker, and takes the disk of so many rows.
        """
        from fedcams.residuals.disk import DiskStore

        return DiskStore(layout, folder, spares)

    # -- what it holds -------------------------------------------------------------------------------------------

    def ids(self) -> list[int]:
        """The clients seen so far, ascending."""
        return sorted(self._rounds)

    def round_of(self, client: SupportsIndex) -> int | None:
        """The round of the client's row; None for a client never seen."""
        return self._rounds.get(_count("client", client))

    @property
    def snapshot_round(self) -> int | None:
        """The round that `rollback` can return to; None where no snapshot was taken."""
        return None if self._snapshot < 0 else self._snapshot

    @property
    def nbytes(self) -> int:
        """Bytes of all rows in memory or on disk, those set aside for the snapshot included."""
        return 4 * self.layout.d * (len(self._rounds) + len(self._aside))

    # -- rows ----------------------------------------------------------------------------------------------------

    def gather(self, ids: Iterable[SupportsIndex]) -> Tensor:
        """A fresh `[C, d]` with the rows of these clients; zeros for those never seen."""
        clients = _clients(ids)
        rows = torch.zeros(len(clients), self.layout.d, dtype=torch.float32, device=self.device)
        for client, row in zip(clients, rows, strict=True):
            if client in self._rounds:
                row.copy_(self._read(client, self._rounds[client]))
        return rows

    def add_to(self, ids: Iterable[SupportsIndex], rows: Tensor) -> None:
        """Adds the stored rows into `rows [C, d]` in place: `h = delta + e` without a second `[C, d]`.

        An error from the disk leaves `rows` with some residuals added: throw them away.
        """
        clients = _clients(ids)
        self._check_rows(clients, rows)
        for client, row in zip(clients, rows.detach(), strict=True):
            if client in self._rounds:
                self._add_row(client, self._rounds[client], row)

    def commit(self, ids: Iterable[SupportsIndex], rows: Tensor, round: SupportsIndex) -> None:
        """Stores a copy of `rows [C, d]` as the rows of these clients as of this round.

        All arguments are checked before the first row is stored; rows are stored one by one in ascending client id,
        so an error from the disk leaves those before it new and the others as they were.
        """
        clients, round = _clients(ids), _count("round", round)
        self._check_rows(clients, rows)
        self._check_versions(clients, round)
        for client, row in sorted(zip(clients, rows.detach(), strict=True), key=operator.itemgetter(0)):
            self._commit_row(client, row, round)

    def _commit_row(self, client: int, row: Tensor, round: int) -> None:
        old = self._rounds.get(client)
        if old is None or old > self._snapshot:
            self._put(client, round, row, freed=old)
        else:
            self._put(client, round, row, freed=None)
            self._aside[client] = old
        self._rounds[client] = round

    def _check_rows(self, clients: list[int], rows: Tensor) -> None:
        shape = (len(clients), self.layout.d)
        if rows.dtype != torch.float32 or tuple(rows.shape) != shape:
            raise LayoutError(f"rows: got {rows.dtype} {tuple(rows.shape)}; give torch.float32 {shape}, a row per id")

    def _check_versions(self, clients: list[int], round: int) -> None:
        if len(set(clients)) != len(clients):
            twice = next(client for client in clients if clients.count(client) > 1)
            raise ResidualError(f"ids: client {twice} stands twice in one commit; give each client one row")
        for client in clients:
            # a row not newer than the snapshot could not be told from one that the snapshot holds
            newest = max(self._rounds.get(client, -1), self._snapshot)
            if round <= newest:
                raise ResidualError(
                    f"round={round}: client {client} already stands at round {newest}, by its row or the snapshot; "
                    "commit a later round"
                )

    # -- going back ----------------------------------------------------------------------------------------------

    def snapshot(self, t: SupportsIndex) -> None:
        """Marks the rows as they are now as those of round t, in place of the snapshot before; copies no row."""
        t = _count("t", t)
        late = max(self._rounds, key=self._rounds.__getitem__, default=None)
        if late is not None and self._rounds[late] > t:
            raise ResidualError(f"t={t}: client {late} has a row of round {self._rounds[late]}; give that or a later t")
        if t < self._snapshot:
            raise ResidualError(f"t={t}: there is a newer snapshot, of round {self._snapshot}; give that or a later t")
        self._mark(t)
        aside, self._snapshot, self._aside = self._aside, t, {}
        self._drop(aside.items())

    def rollback(self, t: SupportsIndex) -> None:
        """Brings every row back to what it was at `snapshot(t)`, which stays; without any snapshot, t = 0 is empty."""
        t = _count("t", t)
        if t != max(self._snapshot, 0):
            held = "no snapshot was taken" if self._snapshot < 0 else f"the snapshot is of round {self._snapshot}"
            raise ResidualError(f"t={t}: {held}; roll back to round {max(self._snapshot, 0)}, or start an empty store")
        late = {client: round for client, round in self._rounds.items() if round > self._snapshot}
        self._drop(late.items())
        for client in late:
            del self._rounds[client]
        self._rounds |= self._aside
        self._aside = {}

    # -- what an implementation provides -------------------------------------------------------------------------

    @abstractmethod
    def _read(self, client: int, round: int) -> Tensor:
        """This version, `[d]`; may be the stored memory itself, so it is only read."""

    def _add_row(self, client: int, round: int, row: Tensor) -> None:
        """Adds this version into `row [d]`, in place."""
        add_(row, self._read(client, round).to(row.device))

    @abstractmethod
    def _put(self, client: int, round: int, row: Tensor, freed: int | None) -> None:
        """Stores a copy of `row [d]` as a new version; the client's version of round `freed` is needed no more."""

    @abstractmethod
    def _drop(self, versions: Iterable[tuple[int, int]]) -> None:
        """Forgets these versions, (client, round)."""

    @abstractmethod
    def _mark(self, t: int) -> None:
        """Makes it last, where the rows outlive the process, that the snapshot is now of round t."""


def _clients(ids: Iterable[SupportsIndex]) -> list[int]:
    return [_count("client", client) for client in ids]


def _count(name: str, value: SupportsIndex) -> int:
    """A client id or a round: what fits into eight bytes (Flower's node ids need all 64 bits)."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 2**64:
        raise ResidualError(f"{name}={value!r}: give an integer from 0 to 2**64 - 1")
    return number
