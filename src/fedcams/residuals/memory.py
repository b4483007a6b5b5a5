"""Residual rows in host or device memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor

from fedcams.layout import Layout
from fedcams.residuals.base import ResidualStore


@final
class MemoryStore(ResidualStore):
    """One tensor `[d]` for each version, allocated on first use.

    A commit overwrites the row it supersedes; only a row that the snapshot needs is left alone and a new one allocated
    (copy on write), so a snapshot costs memory for the rows that changed after it and no more.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """An empty store."""
        super().__init__(layout, device)
        self._rows: dict[tuple[int, int], Tensor] = {}

    def _read(self, client: int, round: int) -> Tensor:
        return self._rows[client, round]

    def _put(self, client: int, round: int, row: Tensor, freed: int | None) -> None:
        target = self._allocate() if freed is None else self._rows[client, freed]
        target.copy_(row)
        self._rows[client, round] = target
        if freed is not None:
            del self._rows[client, freed]

    def _allocate(self) -> Tensor:
        with torch.inference_mode(False):  # a tensor born in inference mode could not be overwritten outside of it
            return torch.empty(self.layout.d, dtype=torch.float32, device=self.device)

    def _drop(self, versions: Iterable[tuple[int, int]]) -> None:
        for version in versions:
            del self._rows[version]

    def _mark(self, t: int) -> None:
        """Nothing lasts longer than the process."""
