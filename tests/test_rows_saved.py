"""Rows of a checkpoint: saved next to the last ones, read only if they changed, and never from another run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedcams.errors import ResidualError
from fedcams.rows import RowStore, SavedRows, Versions, disk
from named_rows import LAYOUTS, content, files, rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the rows are saved; not made yet."""
    return tmp_path / "checkpoint" / "rows"


def filled(*rounds: tuple[list[int], float]) -> RowStore:
    """A store in memory after these rounds of (clients, value)."""
    store = RowStore.in_memory(LAYOUTS)
    for round, (clients, value) in enumerate(rounds, start=1):
        store.commit(clients, rows(*[value] * len(clients)), round)
    return store


def loaded(folder: Path, round: int, expected: Versions) -> RowStore:
    """A new process, which goes on from this checkpoint."""
    store = RowStore.in_memory(LAYOUTS)
    SavedRows(store, folder).load(round, expected)
    return store


def recorded(patch: pytest.MonkeyPatch, owner: object, name: str) -> list[tuple[object, ...]]:
    """The arguments of all calls from now on."""
    calls: list[tuple[object, ...]] = []
    real = getattr(owner, name)

    def call(*args: object) -> object:
        calls.append(args)
        return real(*args)

    patch.setattr(owner, name, call)
    return calls


def test_what_was_saved_is_loaded(folder: Path) -> None:
    store = filled(([1, 2], 5), ([2, 3], 6))
    saved = SavedRows(store, folder)
    assert not folder.exists()  # not before it is needed
    versions = saved.save()
    saved.mark(2)
    assert json.loads(json.dumps(versions)) == versions
    assert [version[:2] for version in versions] == [[1, 1], [2, 2], [3, 2]]
    assert content(loaded(folder, 2, versions)) == content(store)


def test_rows_that_did_not_change_are_neither_written_nor_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(([1, 2], 5))
    saved = SavedRows(store, folder)
    saved.save()
    saved.mark(1)
    before = os.stat(folder / "1-1.rows")
    store.commit([2], rows(6), round=2)
    opened = recorded(monkeypatch, disk, "open_file")
    gathered = recorded(monkeypatch, store, "gather")
    versions = saved.save()
    saved.mark(2)
    assert [version[:2] for version in versions] == [[1, 1], [2, 2]]
    assert opened == []
    assert sorted(gathered) == [("control", [2]), ("residual", [2])]
    assert os.stat(folder / "1-1.rows") == before


def test_a_kill_between_the_steps_leaves_the_old_checkpoint_or_the_new(folder: Path) -> None:
    store = filled(([1, 2], 5))
    saved = SavedRows(store, folder)
    first = saved.save()  # killed before the mark of the first checkpoint
    old = content(store)
    assert content(loaded(folder, 1, first)) == old
    store.commit([2, 3], rows(6, 7), round=2)
    new = content(store)
    going_on = loaded(folder, 1, first)
    going_on.commit([2, 3], rows(6, 7), round=2)
    saved = SavedRows(going_on, folder)
    second = saved.save()  # killed before the checkpoint names them: the old one counts
    shutil.copytree(folder, folder.with_name("again"))
    assert content(loaded(folder, 1, first)) == old
    folder = folder.with_name("again")  # killed after the checkpoint, before its mark: the new one counts
    assert content(loaded(folder, 2, second)) == new
    assert RowStore.on_disk(LAYOUTS, folder).snapshot_round == 2
    assert files(folder) == ["1-1.rows", "2-2.rows", "3-2.rows", "store.json"]


def another_run(folder: Path) -> None:
    """The same clients, rounds and layouts; other values."""
    shutil.rmtree(folder)
    other = SavedRows(filled(([1, 2], 7), ([2], 8)), folder)
    other.save()
    other.mark(2)


SPOILED: list[tuple[str, Callable[[Path], object]]] = [
    (r"the rows of client 1 differ.* client 2 differ", another_run),
    (r"the rows of client 2 are missing; restore", lambda f: (f / "2-2.rows").unlink()),
    (r"the rows of client 1 are missing, the rows of client 2 are missing", shutil.rmtree),
    (r"2-2\.rows: truncated", lambda f: (f / "2-2.rows").write_bytes((f / "2-2.rows").read_bytes()[:-4])),
    (r"1-1\.rows: the client is 2 instead of 1", lambda f: shutil.copy(f / "2-2.rows", f / "1-1.rows")),
]


@pytest.mark.parametrize(("message", "spoil"), SPOILED, ids=[message for message, _ in SPOILED])
def test_other_rows_than_those_of_the_checkpoint_are_refused(
    folder: Path, message: str, spoil: Callable[[Path], object]
) -> None:
    saved = SavedRows(filled(([1, 2], 5), ([2], 6)), folder)
    versions = saved.save()
    saved.mark(2)
    spoil(folder)
    store = RowStore.in_memory(LAYOUTS)
    with pytest.raises(ResidualError, match=message):
        SavedRows(store, folder).load(2, versions)
    assert store.ids() == []


def test_a_refused_folder_keeps_rows_that_a_rollback_would_drop(folder: Path) -> None:
    other = RowStore.on_disk(LAYOUTS, folder)
    other.snapshot(1)
    other.commit([1], rows(9), round=3)
    before = {name: (folder / name).read_bytes() for name in files(folder)}
    with pytest.raises(ResidualError, match="the rows of client 1 are missing"):
        loaded(folder, 1, [[1, 1, "00"]])
    with pytest.raises(ResidualError, match="the rows of client 1 are of round 3 instead of 1"):
        loaded(folder, 2, [[1, 1, "00"]])
    assert {name: (folder / name).read_bytes() for name in files(folder)} == before


def test_damaged_values_are_refused_when_they_are_loaded(folder: Path) -> None:
    saved = SavedRows(filled(([1], 5)), folder)
    versions = saved.save()
    saved.mark(1)
    data = bytearray((folder / "1-1.rows").read_bytes())
    data[-1] ^= 1
    (folder / "1-1.rows").write_bytes(data)
    with pytest.raises(ResidualError, match=r"1-1\.rows: damaged, checksum"):
        loaded(folder, 1, versions)
