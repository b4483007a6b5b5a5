"""Named rows in host or device memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, final

import torch

from fedcams.bits.vectors import add_
from fedcams.layout import Layout
from fedcams.rows.base import RowStore

if TYPE_CHECKING:
    from torch import Tensor


@final
class MemoryRows(RowStore):
    """One tensor `[d]` per name and version, allocated on first use; made by `RowStore.in_memory`.

    A commit overwrites the rows that it replaces, unless the snapshot needs them: then it allocates new ones (copy on
    write). So a snapshot costs memory only for the clients that change after it.
    """

    def __init__(self, layouts: Mapping[str, Layout], device: torch.device) -> None:
        super().__init__(layouts, device)
        self._rows: dict[tuple[int, int], dict[str, Tensor]] = {}

    def _copy_row_(self, name: str, client: int, round: int, row: Tensor) -> None:
        row.copy_(self._rows[client, round][name])

    def _add_row_(self, name: str, client: int, round: int, row: Tensor) -> None:
        add_(row, self._rows[client, round][name].to(row.device))

    def _digest(self, client: int, round: int) -> None:
        """Return None: rows in memory cannot be mistaken for those of another run."""

    def _put(self, client: int, round: int, rows: Mapping[str, Tensor], freed: int | None) -> None:
        targets = self._allocate() if freed is None else self._rows[client, freed]
        for name, target in targets.items():
            target.copy_(rows[name])
        self._rows[client, round] = targets
        if freed is not None:
            del self._rows[client, freed]

    def _allocate(self) -> dict[str, Tensor]:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be overwritten outside of it
            return {
                name: torch.empty(layout.d, dtype=torch.float32, device=self.device)
                for name, layout in self.layouts.items()
            }

    def _drop(self, versions: Iterable[tuple[int, int]]) -> None:
        for version in versions:
            del self._rows[version]

    def _mark(self, t: int) -> None:
        """Do nothing: rows in memory do not survive the process."""
