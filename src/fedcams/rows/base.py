"""RowStore: named float32 rows `[d]` for each client seen so far, with snapshot and rollback."""

from __future__ import annotations

import operator
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from fedcams.errors import LayoutError, ResidualError
from fedcams.layout import Layout
from fedcams.registry.fields import nearest

if TYPE_CHECKING:
    from torch import Tensor

    from fedcams.rows.disk import DiskRows

Versions = list[list[Any]]
"""`[client, round, digest]` per client in ascending id, as JSON stores it; the digest is hex, or None in memory."""

_NAME = re.compile(r"[a-z0-9_.-]{1,32}")


class RowStore(ABC):
    """Named rows `[d]` per client id, such as `residual` and `control`; unseen clients have zeros, which cost nothing.

    All rows of a client carry the round of their commit, so (client, round) names one version of them. This class
    decides which versions are kept: the newest of each client and, for clients that changed since the snapshot, the
    one that the snapshot needs. A subclass only stores, reads and drops versions.

    To survive a kill at any moment, write the checkpoint of round t first, then call `snapshot(t)`, then continue. A
    run that finds its checkpoint at t calls `rollback(t)`. If the kill came between the two, `snapshot_round` is still
    older, and the run calls `snapshot(t)` instead.

    Arguments:
        layouts: the layout of each row by its name.
        device: where `gather` returns rows.

    Examples:
        >>> import fedcams, torch
        >>> rows = fedcams.RowStore.in_memory({"residual": fedcams.Layout.flat(2)})  # or on_disk(layouts, folder)
        >>> rows.commit([7], {"residual": torch.tensor([[1.0, 2.0]])}, round=1)
        >>> rows.gather("residual", [3, 7])  # client 3 is new
        tensor([[0., 0.],
                [1., 2.]])
    """

    def __init__(self, layouts: Mapping[str, Layout], device: torch.device) -> None:
        """Make an empty store of rows with these names and layouts; `gather` returns them on `device`."""
        self.layouts = _checked_layouts(layouts)
        self.device = device
        self._rounds: dict[int, int] = {}  # client -> round of its rows
        self._aside: dict[int, int] = {}  # client -> round of the rows that only the snapshot still needs
        self._snapshot = -1  # -1: none taken, so that one comparison says whether a round is after the snapshot

    @staticmethod
    def in_memory(layouts: Mapping[str, Layout], device: str | torch.device = "cpu") -> RowStore:
        """Return an empty store in host or device memory; its rows are lost when the process ends.

        `layouts` gives the layout of each named row. Refuses names that are not 1 to 32 characters of a-z, 0-9, `_`,
        `.` and `-`.
        """
        from fedcams.rows.memory import MemoryRows

        return MemoryRows(layouts, torch.device(device))

    @staticmethod
    def on_disk(layouts: Mapping[str, Layout], folder: str | os.PathLike[str], spares: int = 0) -> DiskRows:
        """Return the store in a folder, which is created if missing; its rows survive the process.

        `layouts` is as for `in_memory`. `spares` is how many unneeded files are kept, so that the next rows are written
        over them: that is faster, but takes space on disk. Refuses a folder of other names or layouts, of fedcams 0.1,
        with symbolic links, or without access.
        """
        from fedcams.rows.disk import DiskRows

        return DiskRows(layouts, folder, spares)

    # -- what it holds -------------------------------------------------------------------------------------------

    def ids(self) -> list[int]:
        """Return the clients seen so far, ascending."""
        return sorted(self._rounds)

    def round_of(self, client: SupportsIndex) -> int | None:
        """Return the round of the client's rows; None for an unseen client."""
        return self._rounds.get(_uint64("client", client))

    def digest_of(self, client: SupportsIndex) -> str | None:
        """Return the digest (32 hex digits) of the client's rows on disk; None in memory or for an unseen client.

        It covers client, round, names, layouts and values. It comes from writing the rows or from the header of their
        file, so the values are not read again.
        """
        client = _uint64("client", client)
        return self._digest(client, self._rounds[client]) if client in self._rounds else None

    def versions(self) -> Versions:
        """Return `[client, round, digest]` per client in ascending id: what a checkpoint stores about its rows."""
        return self._described(self._rounds)

    def _described(self, rounds: Mapping[int, int]) -> Versions:
        return [[client, round, self._digest(client, round)] for client, round in sorted(rounds.items())]

    @property
    def snapshot_round(self) -> int | None:
        """The round to which `rollback` can return; None if there is no snapshot."""
        return None if self._snapshot < 0 else self._snapshot

    @property
    def nbytes(self) -> int:
        """Bytes of all rows in memory or on disk, including those kept for the snapshot."""
        d = sum(layout.d for layout in self.layouts.values())
        return 4 * d * (len(self._rounds) + len(self._aside))

    # -- rows ----------------------------------------------------------------------------------------------------

    def gather(self, name: str, ids: Iterable[SupportsIndex]) -> Tensor:
        """Return the rows of this name of these clients as a new `[C, d]`; zeros for unseen clients."""
        layout, clients = self._layout(name), _clients(ids)
        rows = torch.zeros(len(clients), layout.d, dtype=torch.float32, device=self.device)
        for client, row in zip(clients, rows, strict=True):
            if client in self._rounds:
                self._copy_row_(name, client, self._rounds[client], row)
        return rows

    def add_to_(self, name: str, ids: Iterable[SupportsIndex], rows: Tensor) -> None:
        """Add the stored rows of this name to `rows [C, d]` in place: `h = delta + e` without a second `[C, d]`.

        Refuses unknown names, and rows of another shape or dtype. If the disk fails, some rows were already added:
        discard `rows` then.
        """
        layout, clients = self._layout(name), _clients(ids)
        _check_rows(name, layout, clients, rows)
        for client, row in zip(clients, rows.detach(), strict=True):
            if client in self._rounds:
                self._add_row_(name, client, self._rounds[client], row)

    def commit(self, ids: Iterable[SupportsIndex], rows: Mapping[str, Tensor], round: SupportsIndex) -> None:
        """Store a copy of `rows`, name -> `[C, d]`, as the rows of these clients in this round.

        Every name is needed: all rows of a client change together or not at all. Refuses other names and shapes, a
        client that appears twice, and rounds that are not later than the client's rows and the snapshot, before
        anything is stored. Clients are stored one by one in ascending id; if the disk fails, those before the failure
        are new and the others unchanged.
        """
        clients, round = _clients(ids), _uint64("round", round)
        if rows.keys() != self.layouts.keys():
            raise ResidualError(f"rows: got the names {sorted(rows)}; give all of {list(self.layouts)} and no other")
        for name, layout in self.layouts.items():
            _check_rows(name, layout, clients, rows[name])
        self._check_versions(clients, round)
        for i, client in sorted(enumerate(clients), key=operator.itemgetter(1)):
            self._commit_client(client, {name: rows[name].detach()[i] for name in self.layouts}, round)

    def _commit_client(self, client: int, rows: Mapping[str, Tensor], round: int) -> None:
        old = self._rounds.get(client)
        if old is None or old > self._snapshot:
            self._put(client, round, rows, freed=old)
        else:
            self._put(client, round, rows, freed=None)
            self._aside[client] = old
        self._rounds[client] = round

    def _layout(self, name: str) -> Layout:
        if name not in self.layouts:
            raise ResidualError(
                f"name={name!r}: no such row{nearest(name, self.layouts)}; give one of {[*self.layouts]}"
            )
        return self.layouts[name]

    def _check_versions(self, clients: list[int], round: int) -> None:
        if len(set(clients)) != len(clients):
            twice = next(client for client in clients if clients.count(client) > 1)
            raise ResidualError(f"ids: client {twice} appears twice in one commit; give each client once")
        for client in clients:
            # rows that are not newer than the snapshot could not be distinguished from those in the snapshot
            newest = max(self._rounds.get(client, -1), self._snapshot)
            if round <= newest:
                raise ResidualError(
                    f"round={round}: client {client} is already at round {newest}, by its rows or the snapshot; "
                    "commit a later round"
                )

    # -- going back ----------------------------------------------------------------------------------------------

    def snapshot(self, t: SupportsIndex) -> None:
        """Mark the current rows as those of round t; replaces the previous snapshot and copies nothing.

        Refuses a t below the round of any row or below the previous snapshot.
        """
        t = _uint64("t", t)
        late = max(self._rounds, key=self._rounds.__getitem__, default=None)
        if late is not None and self._rounds[late] > t:
            raise ResidualError(f"t={t}: client {late} has rows of round {self._rounds[late]}; give that or a later t")
        if t < self._snapshot:
            raise ResidualError(f"t={t}: there is a newer snapshot, of round {self._snapshot}; give that or a later t")
        self._mark(t)
        aside, self._snapshot, self._aside = self._aside, t, {}
        self._drop(aside.items())

    def rollback(self, t: SupportsIndex) -> None:
        """Restore every row to what it was at `snapshot(t)`, which is kept; without one, t = 0 empties the store.

        Refuses any t other than the snapshot's.
        """
        t = _uint64("t", t)
        if t != max(self._snapshot, 0):
            held = "no snapshot was taken" if self._snapshot < 0 else f"the snapshot is of round {self._snapshot}"
            raise ResidualError(f"t={t}: {held}; roll back to round {max(self._snapshot, 0)}, or use an empty store")
        self._drop([version for version in self._rounds.items() if version[1] > self._snapshot])
        self._rounds, self._aside = self._at_snapshot(), {}

    def _at_snapshot(self) -> dict[int, int]:
        """Return client -> round of its rows, as `rollback` would leave them."""
        return {client: round for client, round in self._rounds.items() if round <= self._snapshot} | self._aside

    # -- what a subclass provides --------------------------------------------------------------------------------

    @abstractmethod
    def _copy_row_(self, name: str, client: int, round: int, row: Tensor) -> None:
        """Copy the named row of this version into `row [d]`, which is on `self.device`."""

    @abstractmethod
    def _add_row_(self, name: str, client: int, round: int, row: Tensor) -> None:
        """Add the named row of this version to `row [d]`, which may be on any device."""

    @abstractmethod
    def _digest(self, client: int, round: int) -> str | None:
        """Return the digest of this version, if it has one."""

    @abstractmethod
    def _put(self, client: int, round: int, rows: Mapping[str, Tensor], freed: int | None) -> None:
        """Store copies of `rows`, name -> `[d]`, as a new version; the one of round `freed` is no longer needed."""

    @abstractmethod
    def _drop(self, versions: Iterable[tuple[int, int]]) -> None:
        """Drop these versions, given as (client, round)."""

    @abstractmethod
    def _mark(self, t: int) -> None:
        """Record that the snapshot is now of round t, durably if rows survive the process."""


def _checked_layouts(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layouts in ascending order of their names."""
    if not layouts:
        raise ResidualError("layouts={}: a store needs at least one named row; give {name: layout}")
    for name in layouts:
        if not _NAME.fullmatch(name):
            raise ResidualError(f"layouts: {name!r} cannot name a row; use 1 to 32 characters of a-z, 0-9, _, . and -")
    return dict(sorted(layouts.items()))


def _check_rows(name: str, layout: Layout, clients: list[int], rows: Tensor) -> None:
    shape = (len(clients), layout.d)
    if rows.dtype != torch.float32 or tuple(rows.shape) != shape:
        found = f"{rows.dtype} {tuple(rows.shape)}"
        raise LayoutError(f"rows of {name!r}: got {found}; give torch.float32 {shape}, one row per id")


def _clients(ids: Iterable[SupportsIndex]) -> list[int]:
    return [_uint64("client", client) for client in ids]


def _uint64(name: str, value: SupportsIndex) -> int:
    """Return a client id or round as an int; refuses what does not fit into 64 bits. Flower's node ids use all 64."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 2**64:
        raise ResidualError(f"{name}={value!r}: give an integer from 0 to 2**64 - 1")
    return number
