"""Stores with two named rows per client, whose contents show whether both come from the same commit."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from fedcams.layout import Layout
from fedcams.rows import RowStore

D = 5
LAYOUTS = {"residual": Layout.flat(D), "control": Layout.flat(3)}
NBYTES = 4 * (D + 3)
"""Bytes of the rows of one client."""

MEMORY_DISK = "/dev/shm"
"""A file system in memory, if there is one: for tests that make many files and do not pull the plug."""

Content = dict[int, tuple[int | None, float]]


def rows(*values: float) -> dict[str, Tensor]:
    """Name -> `[C, d]`; the rows of client i are filled with values[i], and in `control` with its negative."""
    column = torch.tensor(values, dtype=torch.float32).reshape(-1, 1)
    return {"residual": column.repeat(1, D), "control": -column.repeat(1, 3)}


def content(store: RowStore) -> Content:
    """Client -> (round, value); fails if the two rows of a client are not of the same commit."""
    ids = store.ids()
    residual, control = (store.gather(name, ids).cpu() for name in ("residual", "control"))
    assert torch.equal(residual, residual[:, :1].expand_as(residual))
    assert torch.equal(control, -residual[:, :1].expand_as(control))
    return {client: (store.round_of(client), value) for client, value in zip(ids, residual[:, 0].tolist(), strict=True)}


def files(folder: Path) -> list[str]:
    """The names in a folder."""
    return sorted(os.listdir(folder))
