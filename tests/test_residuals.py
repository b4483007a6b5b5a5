"""Residual stores: one meaning for memory, GPU and disk; and what a disk adds, up to a real kill -9."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fedcams.residuals import ResidualStore
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from fedcams.errors import LayoutError, ResidualError
from fedcams.layout import Layout
from memory import peak_memory

D = 5
LAYOUT = Layout.flat(D)
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.fixture(params=["memory", "disk", CUDA])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ResidualStore:
    """An empty store of each kind."""
    if request.param == "disk":
        return ResidualStore.on_disk(LAYOUT, tmp_path / "rows")
    return ResidualStore.in_memory(LAYOUT, "cuda" if request.param == "cuda" else "cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for a disk store, not made yet."""
    return tmp_path / "run" / "rows"


def rows(*values: float) -> Tensor:
    """`[C, D]`, row i filled with values[i]."""
    return torch.tensor(values, dtype=torch.float32).reshape(-1, 1).repeat(1, D)


def content(store: ResidualStore) -> dict[int, tuple[int | None, float]]:
    """Client -> (round, value), each row being uniform."""
    ids = store.ids()
    gathered = store.gather(ids).cpu()
    assert torch.equal(gathered, gathered[:, :1].expand_as(gathered))
    return {client: (store.round_of(client), value) for client, value in zip(ids, gathered[:, 0].tolist(), strict=True)}


def files(folder: Path) -> list[str]:
    """The names in a folder."""
    return sorted(os.listdir(folder))


# -- the shared meaning ----------------------------------------------------------------------------------------------


def test_an_unseen_client_is_zeros_and_costs_nothing(store: ResidualStore) -> None:
    update = rows(1, 2)
    assert torch.equal(store.gather([7, 7, 2**64 - 1]).cpu(), torch.zeros(3, D))
    store.add_to([3, 4], update)
    assert torch.equal(update, rows(1, 2))
    assert (store.ids(), store.round_of(7), store.nbytes, store.snapshot_round) == ([], None, 0, None)


def test_committed_rows_come_back(store: ResidualStore) -> None:
    store.commit([9, 2], rows(90, 20), round=1)
    store.commit([2], rows(21), round=4)
    assert torch.equal(store.gather([2, 5, 9]).cpu(), rows(21, 0, 90))
    assert (store.ids(), store.round_of(9), store.round_of(2)) == ([2, 9], 1, 4)
    assert store.nbytes == 2 * 4 * D


def test_a_row_keeps_every_bit(store: ResidualStore) -> None:
    odd = torch.tensor([[-0.0, 1e-45, -3.4e38, float("inf"), float("nan")]])
    store.commit([0], odd, round=0)
    assert torch.equal(store.gather([0]).cpu().view(torch.int32), odd.view(torch.int32))


def test_add_to_works_in_the_callers_buffer(store: ResidualStore) -> None:
    store.commit([1, 3], rows(10, 30), round=1)
    wide = torch.ones(3, 2 * D, requires_grad=True)
    buffer = wide.detach()[:, ::2]  # neither contiguous nor its own memory
    store.add_to([3, 2, 1], buffer)
    assert torch.equal(wide[:, ::2], rows(31, 1, 11))
    assert torch.equal(wide[:, 1::2], rows(1, 1, 1))


def test_a_commit_copies_what_it_is_given(store: ResidualStore) -> None:
    given = rows(1, 2).requires_grad_()
    store.commit([0, 1], given, round=1)
    given.detach().fill_(7)
    store.gather([0, 1]).fill_(8)
    store.add_to([0, 1], given)
    assert content(store) == {0: (1, 1.0), 1: (1, 2.0)}


def test_expanded_rows_and_tensor_ids_are_fine(store: ResidualStore) -> None:
    store.commit(torch.tensor([4, 2]), torch.ones(1, D).expand(2, D), round=1)
    assert content(store) == {2: (1, 1.0), 4: (1, 1.0)}


def test_inference_mode_leaves_no_trace(store: ResidualStore) -> None:
    with torch.inference_mode():
        store.commit([0], rows(1), round=1)
    store.commit([0], rows(2), round=2)
    with torch.inference_mode():
        store.commit([0], rows(3), round=3)
    assert content(store) == {0: (3, 3.0)}


def test_an_empty_cohort_is_fine(store: ResidualStore) -> None:
    store.commit([], torch.empty(0, D), round=1)
    store.add_to([], torch.empty(0, D))
    assert store.gather([]).shape == (0, D)
    assert store.ids() == []


REFUSED: list[tuple[type[Exception], str, Callable[[ResidualStore], object]]] = [
    (LayoutError, r"float64 \(1, 5\); give torch.float32 \(1, 5\)", lambda s: s.commit([1], rows(1).double(), 9)),
    (LayoutError, r"\(1, 4\); give torch.float32 \(1, 5\)", lambda s: s.commit([1], torch.ones(1, 4), 9)),
    (LayoutError, r"\(2, 5\); give torch.float32 \(1, 5\), a row per id", lambda s: s.commit([1], rows(1, 2), 9)),
    (LayoutError, r"\(5,\); give torch.float32 \(1, 5\)", lambda s: s.add_to([1], torch.ones(D))),
    (ResidualError, "client 4 stands twice in one commit", lambda s: s.commit([4, 1, 4], rows(1, 2, 3), 9)),
    (ResidualError, "client=-1: give an integer from 0", lambda s: s.gather([-1])),
    (ResidualError, "client=18446744073709551616", lambda s: s.round_of(2**64)),
    (ResidualError, "client='a': give an integer", lambda s: s.add_to("a", rows(1))),  # type: ignore[arg-type]
    (ResidualError, "round=-1: give an integer from 0", lambda s: s.commit([1], rows(1), -1)),
    (ResidualError, "round=2.5: give an integer", lambda s: s.commit([1], rows(1), 2.5)),  # type: ignore[arg-type]
    (ResidualError, "round=3: client 1 already stands at round 3", lambda s: s.commit([0, 1], rows(1, 2), 3)),
    (ResidualError, "round=2: client 1 already stands at round 3", lambda s: s.commit([0, 1], rows(1, 2), 2)),
    (ResidualError, "t=2: client 1 has a row of round 3; give that or a later t", lambda s: s.snapshot(2)),
    (ResidualError, "t=-1: give an integer", lambda s: s.snapshot(-1)),
    (ResidualError, "t=3: no snapshot was taken; roll back to round 0", lambda s: s.rollback(3)),
]


@pytest.mark.parametrize(("error", "message", "action"), REFUSED, ids=[message for _, message, _ in REFUSED])
def test_refusals_name_the_value_and_change_nothing(
    store: ResidualStore, error: type[Exception], message: str, action: Callable[[ResidualStore], object]
) -> None:
    store.commit([1], rows(5), round=3)
    with pytest.raises(error, match=message):
        action(store)
    assert content(store) == {1: (3, 5.0)}


# -- going back ------------------------------------------------------------------------------------------------------


def test_rollback_returns_to_the_snapshot_as_often_as_asked(store: ResidualStore) -> None:
    store.commit([1, 2], rows(10, 20), round=1)
    store.snapshot(2)
    for _ in range(2):
        store.commit([1, 3], rows(11, 31), round=3)
        store.commit([1, 3], rows(12, 32), round=4)
        assert content(store) == {1: (4, 12.0), 2: (1, 20.0), 3: (4, 32.0)}
        assert store.nbytes == 4 * 4 * D  # three rows, and that of client 1 which the snapshot needs
        store.rollback(2)
        assert content(store) == {1: (1, 10.0), 2: (1, 20.0)}
        assert (store.snapshot_round, store.nbytes) == (2, 2 * 4 * D)


def test_only_the_newest_snapshot_is_kept(store: ResidualStore) -> None:
    store.commit([1], rows(10), round=1)
    store.snapshot(1)
    store.commit([1], rows(11), round=2)
    store.snapshot(2)
    assert store.nbytes == 4 * D
    with pytest.raises(ResidualError, match="t=1: the snapshot is of round 2; roll back to round 2, or start an empty"):
        store.rollback(1)
    with pytest.raises(ResidualError, match="t=0: the snapshot is of round 2"):
        store.rollback(0)
    store.rollback(2)
    with pytest.raises(ResidualError, match="t=1: client 1 has a row of round 2"):
        store.snapshot(1)
    assert content(store) == {1: (2, 11.0)}


def test_without_a_snapshot_round_zero_is_empty(store: ResidualStore) -> None:
    store.commit([1], rows(1), round=0)
    store.commit([2], rows(1), round=1)
    store.rollback(0)
    assert (store.ids(), store.nbytes, store.snapshot_round) == ([], 0, None)
    store.commit([1], rows(1), round=0)  # the same rounds may be run again


def test_a_snapshot_of_an_empty_store(store: ResidualStore) -> None:
    store.snapshot(0)
    store.commit([1], rows(1), round=1)
    store.rollback(0)
    assert (store.ids(), store.snapshot_round) == ([], 0)


def test_rounds_do_not_run_back_behind_the_snapshot(store: ResidualStore) -> None:
    store.commit([1], rows(1), round=1)
    store.snapshot(5)
    for client in (1, 2):
        with pytest.raises(ResidualError, match=f"round=4: client {client} already stands at round 5"):
            store.commit([client], rows(1), round=4)
    with pytest.raises(ResidualError, match="t=4: there is a newer snapshot, of round 5"):
        store.snapshot(4)


def test_memory_rows_are_overwritten_in_place_unless_the_snapshot_needs_them() -> None:
    store = ResidualStore.in_memory(LAYOUT)
    store.commit([1], rows(1), round=1)
    first = store._read(1, 1)
    store.commit([1], rows(2), round=2)
    assert store._read(1, 2) is first
    store.snapshot(2)
    store.commit([1], rows(3), round=3)
    second = store._read(1, 3)
    assert second is not first
    store.commit([1], rows(4), round=4)
    assert store._read(1, 4) is second
    assert torch.equal(first, rows(2)[0])


class MemoryWalk(RuleBasedStateMachine):
    """Any sequence of calls agrees with the simplest model: a dict, copied at each snapshot."""

    def open(self) -> ResidualStore:
        """A fresh store."""
        return ResidualStore.in_memory(LAYOUT)

    @initialize()
    def start(self) -> None:
        """Nothing seen, no snapshot."""
        self.store = self.open()
        self.model: dict[int, tuple[int | None, float]] = {}
        self.saved: tuple[int, dict[int, tuple[int | None, float]]] = (0, {})
        self.round = 0
        self.value = 0

    @rule(clients=st.sets(st.integers(0, 4), max_size=3), gap=st.integers(1, 2))
    def commit(self, clients: set[int], gap: int) -> None:
        """A round of some clients, each row with a value never used before."""
        self.round += gap
        values = [self.value + i + 1.0 for i, _ in enumerate(clients)]
        self.value += len(clients)
        self.store.commit(clients, rows(*values), self.round)
        self.model |= {client: (self.round, value) for client, value in zip(clients, values, strict=True)}
        self.agree()

    @rule(gap=st.integers(0, 2))
    def snapshot(self, gap: int) -> None:
        """Marks this round or a later one."""
        self.round += gap
        self.store.snapshot(self.round)
        self.saved = (self.round, dict(self.model))
        self.agree()

    @rule()
    def rollback(self) -> None:
        """Returns to the snapshot, or to nothing."""
        self.round, saved = self.saved
        self.model = dict(saved)
        self.store.rollback(self.round)
        self.agree()

    def agree(self) -> None:
        """Rows, rounds, and no version more than needed."""
        assert content(self.store) == self.model
        changed = [client for client, row in self.saved[1].items() if self.model[client] != row]
        assert self.store.nbytes == 4 * D * (len(self.model) + len(changed))


class DiskWalk(MemoryWalk):
    """The same, where the store may be opened anew at any time, and no file stays that nobody needs."""

    spares = 0

    def open(self) -> ResidualStore:
        """A fresh store in a fresh folder."""
        self.folder = Path(tempfile.mkdtemp())
        return ResidualStore.on_disk(LAYOUT, self.folder, self.spares)

    @precondition(lambda self: hasattr(self, "store"))
    @rule()
    def reopen(self) -> None:
        """Another process goes on."""
        self.store = ResidualStore.on_disk(LAYOUT, self.folder, self.spares)
        self.agree()

    def agree(self) -> None:
        """As many row files as rows."""
        super().agree()
        kept = [name for name in files(self.folder) if not name.endswith(".spare")]
        assert len(kept) == 1 + self.store.nbytes // (4 * D)
        assert len(files(self.folder)) - len(kept) <= self.spares

    def teardown(self) -> None:
        """Removes the folder."""
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


class SparingWalk(DiskWalk):
    """The same with rows written over those that are needed no more."""

    spares = 2


TestMemoryWalk = MemoryWalk.TestCase
TestMemoryWalk.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, database=None)
TestDiskWalk = DiskWalk.TestCase
TestDiskWalk.settings = settings(max_examples=25, stateful_step_count=25, deadline=None, database=None)
TestSparingWalk = SparingWalk.TestCase
TestSparingWalk.settings = settings(max_examples=50, stateful_step_count=25, deadline=None, database=None)


def test_a_spare_of_the_same_name_is_not_lost(folder: Path) -> None:
    store = ResidualStore.on_disk(LAYOUT, folder, spares=2)
    for clients in ([0, 1], [0], [0, 1]):
        store.commit(clients, rows(*range(len(clients))), round=1)
        store.rollback(0)
    assert files(folder) == ["0.row.spare", "1.row.spare", "store.json"]


# -- on disk: files --------------------------------------------------------------------------------------------------


def test_a_reopened_folder_holds_the_same(folder: Path) -> None:
    store = ResidualStore.on_disk(LAYOUT, str(folder))
    store.commit([1, 2**64 - 1], rows(1, 2), round=3)
    store.snapshot(4)
    store.commit([1], rows(5), round=6)
    again = ResidualStore.on_disk(LAYOUT, folder)
    assert content(again) == content(store) == {1: (6, 5.0), 2**64 - 1: (3, 2.0)}
    assert again.snapshot_round == 4
    again.rollback(4)
    assert content(again) == {1: (3, 1.0), 2**64 - 1: (3, 2.0)}


def test_only_changed_rows_are_written(folder: Path) -> None:
    store = ResidualStore.on_disk(LAYOUT, folder)
    store.commit([1, 2], rows(1, 2), round=1)
    before = {name: os.stat(folder / name) for name in files(folder)}
    store.snapshot(1)
    store.commit([2], rows(3), round=2)
    store.commit([2], rows(4), round=3)
    assert files(folder) == ["1-1.row", "2-1.row", "2-3.row", "store.json"]  # 2-2.row went as soon as superseded
    store.snapshot(3)
    assert files(folder) == ["1-1.row", "2-3.row", "store.json"]
    after = os.stat(folder / "1-1.row")
    assert (after.st_ino, after.st_mtime_ns) == (before["1-1.row"].st_ino, before["1-1.row"].st_mtime_ns)


def test_spares_are_written_over(folder: Path) -> None:
    store = ResidualStore.on_disk(LAYOUT, folder, spares=1)
    store.commit([1, 2], rows(1, 2), round=1)
    first = os.stat(folder / "1-1.row").st_ino
    store.commit([1], rows(3), round=2)
    assert files(folder) == ["0.row.spare", "1-2.row", "2-1.row", "store.json"]
    store = ResidualStore.on_disk(LAYOUT, folder, spares=1)
    store.commit([2], rows(4), round=3)
    assert files(folder) == ["0.row.spare", "1-2.row", "2-3.row", "store.json"]
    assert os.stat(folder / "2-3.row").st_ino == first
    assert content(store) == content(ResidualStore.on_disk(LAYOUT, folder)) == {1: (2, 3.0), 2: (3, 4.0)}
    assert files(folder) == ["1-2.row", "2-3.row", "store.json"]  # a store that keeps no spares removes them


def test_the_format_is_the_one_documented(folder: Path) -> None:
    ResidualStore.on_disk(Layout.flat(1), folder).commit([258], torch.tensor([[1.0]]), round=3)
    assert (folder / "258-3.row").read_bytes().hex(" ", 4) == (
        "46435252 02000000"  # FCRR, version 2
        f" {Layout.flat(1).id.hex(' ', 4)}"
        " 02010000 00000000"  # client
        " 03000000 00000000"  # round
        " 01000000 00000000"  # d
        " 0000803f 00000000 0000803f 00000000 0000803f"  # the word, once the word, 1.0
    )
    assert (folder / "store.json").read_text() == (
        f'{{"fedcams_residuals": 2, "layout": "{Layout.flat(1).id.hex()}", "d": 1, "snapshot": null}}'
    )


def test_add_to_needs_the_memory_of_one_row(folder: Path) -> None:
    layout, clients = Layout.flat(100_000), range(8)
    store = ResidualStore.on_disk(layout, folder)
    update = torch.ones(8, layout.d)
    store.commit(clients, update, round=1)
    peak = peak_memory(lambda: store.add_to(clients, update))
    assert peak < 2.5 * 4 * layout.d  # the row just read, and the one before until it is let go
    assert torch.equal(update, torch.full((8, layout.d), 4.0))  # three times


def test_a_second_store_reads_and_says_when_it_is_behind(folder: Path) -> None:
    writer = ResidualStore.on_disk(LAYOUT, folder)
    writer.commit([1], rows(1), round=1)
    reader = ResidualStore.on_disk(LAYOUT, folder)
    assert content(reader) == content(writer)
    writer.commit([1], rows(2), round=2)
    with pytest.raises(ResidualError, match=r"cannot read .*1-1\.row: No such file .*; restore it, or reopen"):
        reader.gather([1])


HEADER = 56
DAMAGED: list[tuple[str, Callable[[bytes], bytes]]] = [
    (r"1-1\.row: truncated, 19 of 20 bytes of the row; restore", lambda b: b[:-1]),
    (r"1-1\.row: truncated, 0 of 20 bytes of the row", lambda b: b[:HEADER]),
    (r"1-1\.row: truncated, 55 of 56 bytes of header", lambda b: b[: HEADER - 1]),
    (r"1-1\.row: truncated, 0 of 56 bytes of header", lambda b: b""),
    (r"1-1\.row: something follows after the 20 bytes", lambda b: b + b"\0"),
    (r"1-1\.row: damaged, checksum \w{32} instead of \w{32}", lambda b: b[:-1] + bytes([b[-1] ^ 1])),
    (r"1-1\.row: damaged, checksum", lambda b: b[:40] + bytes(16) + b[HEADER:]),
    (r"1-1\.row: damaged, checksum", lambda b: b[:HEADER] + bytes(8) + b[HEADER + 8 :]),
    (r"1-1\.row: the magic is b'PK..' instead of b'FCRR'", lambda b: b"PK.." + b[4:]),
    (r"1-1\.row: the format version is 1 instead of 2", lambda b: b[:4] + b"\1" + b[5:]),
    (r"1-1\.row: the layout id is b'foreign!' instead of", lambda b: b[:8] + b"foreign!" + b[16:]),
    (r"1-1\.row: the client is 2 instead of 1", lambda b: b[:16] + b"\2" + b[17:]),
    (r"1-1\.row: the round is 2 instead of 1", lambda b: b[:24] + b"\2" + b[25:]),
    (r"1-1\.row: the d is 6 instead of 5", lambda b: b[:32] + b"\6" + b[33:]),
]


@pytest.mark.parametrize(("message", "damage"), DAMAGED, ids=[message for message, _ in DAMAGED])
def test_a_bad_row_file_is_refused(folder: Path, message: str, damage: Callable[[bytes], bytes]) -> None:
    store = ResidualStore.on_disk(LAYOUT, folder)
    store.commit([1, 2], rows(1, 2), round=1)
    path, update = folder / "1-1.row", rows(5, 6)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ResidualError, match=message):
        store.add_to([1, 2], update)
    assert torch.equal(store.gather([2]), rows(2))  # the others are still there


def store_becomes_a_folder(folder: Path) -> None:
    """Not even a file."""
    (folder / "store.json").unlink()
    (folder / "store.json").mkdir()


BAD_FOLDERS: list[tuple[str, Callable[[Path], object]]] = [
    (r"store\.json: damaged \(JSONDecodeError", lambda f: (f / "store.json").write_bytes(b"{")),
    (r"store\.json: damaged \(UnicodeDecodeError", lambda f: (f / "store.json").write_bytes(b"\xff\xff\xff")),
    (r"store\.json: damaged \(KeyError", lambda f: (f / "store.json").write_text("{}")),
    (r"store\.json: damaged \(TypeError", lambda f: (f / "store.json").write_text("[]")),
    (r"store\.json is missing but there are rows; restore it", lambda f: (f / "store.json").unlink()),
    (r"01-1\.row: not named <client>-<round>\.row; move it", lambda f: (f / "01-1.row").touch()),
    (r"cannot read .*store\.json: Is a directory", store_becomes_a_folder),
]


@pytest.mark.parametrize(("message", "spoil"), BAD_FOLDERS, ids=[message for message, _ in BAD_FOLDERS])
def test_a_bad_folder_is_refused_at_opening(folder: Path, message: str, spoil: Callable[[Path], object]) -> None:
    ResidualStore.on_disk(LAYOUT, folder).commit([1], rows(1), round=1)
    spoil(folder)
    with pytest.raises(ResidualError, match=message):
        ResidualStore.on_disk(LAYOUT, folder)
    assert (folder / "1-1.row").exists()


def test_a_folder_of_another_layout_is_refused_untouched(folder: Path) -> None:
    ResidualStore.on_disk(Layout.flat(7), folder)
    (folder / "1-1.row.tmp").touch()
    with pytest.raises(ResidualError, match=r"'d': 7}, not of {.*'d': 5}; use its own model, or give an empty folder"):
        ResidualStore.on_disk(LAYOUT, folder)
    assert files(folder) == ["1-1.row.tmp", "store.json"]


def test_opening_removes_what_a_kill_left_and_nothing_else(folder: Path) -> None:
    store = ResidualStore.on_disk(LAYOUT, folder)
    store.commit([1], rows(1), round=1)
    for name in ("1-2.row.tmp", "store.json.tmp", "notes.txt", "other.tmp"):
        (folder / name).write_bytes(b"half")
    shutil.copy(folder / "1-1.row", folder / "1-0.row")  # superseded, its removal was cut short
    assert content(ResidualStore.on_disk(LAYOUT, folder)) == {1: (1, 1.0)}
    assert files(folder) == ["1-1.row", "notes.txt", "other.tmp", "store.json"]


# -- on disk: failures of the system -----------------------------------------------------------------------------------


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "rows"):
        with pytest.raises(ResidualError, match=f"cannot open the folder {folder}: .*; free space or make the folder"):
            ResidualStore.on_disk(LAYOUT, folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused_and_stays_readable(folder: Path) -> None:
    store = ResidualStore.on_disk(LAYOUT, folder)
    store.commit([1], rows(1), round=1)
    folder.chmod(0o500)
    try:
        with pytest.raises(ResidualError, match=r"cannot write .*1-2\.row: Permission denied"):
            store.commit([1], rows(2), round=2)
        assert content(ResidualStore.on_disk(LAYOUT, folder)) == {1: (1, 1.0)}
    finally:
        folder.chmod(0o700)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_leaves_the_old_row(folder: Path) -> None:
    store = ResidualStore.on_disk(LAYOUT, folder)
    store.commit([1, 2, 3], rows(1, 2, 3), round=1)
    (folder / "2-2.row.tmp").symlink_to("/dev/full")
    with pytest.raises(ResidualError, match=r"cannot write .*2-2\.row: No space left on device; free space"):
        store.commit([3, 2, 1], rows(30, 20, 10), round=2)
    assert content(store) == {1: (2, 10.0), 2: (1, 2.0), 3: (1, 3.0)}  # ascending, each row whole
    assert files(folder) == ["1-2.row", "2-1.row", "3-1.row", "store.json"]
    store.commit([2, 3], rows(20, 30), round=2)  # once there is space again
    assert content(ResidualStore.on_disk(LAYOUT, folder)) == content(store)


def python(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own; the script finds its arguments in sys.argv."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


LIMITED = """
import resource, signal, sys, torch
from fedcams.errors import ResidualError
from fedcams.layout import Layout
from fedcams.residuals import ResidualStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = ResidualStore.on_disk(Layout.flat(100_000), sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
try:
    store.commit([1], torch.full((1, 100_000), 2.0), 2)
except ResidualError as error:
    print(error)
"""


def test_a_write_cut_short_by_the_system_leaves_the_old_row(folder: Path) -> None:
    layout = Layout.flat(100_000)
    ResidualStore.on_disk(layout, folder).commit([1], torch.ones(1, layout.d), round=1)
    output, errors = python(LIMITED, folder).communicate(timeout=60)
    assert "1-2.row: File too large; free space or make the folder writable" in output, errors
    assert files(folder) == ["1-1.row", "store.json"]
    store = ResidualStore.on_disk(layout, folder)
    assert store.round_of(1) == 1
    assert torch.equal(store.gather([1]), torch.ones(1, layout.d))


# -- on disk: kills --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: nothing the store does may follow."""


def die_at(patch: pytest.MonkeyPatch, moment: int) -> None:
    """The process is dead before its moment-th sync, rename or removal, and in every one after."""
    calls = iter(range(moment))

    def mortal(call: Callable[..., None]) -> Callable[..., None]:
        def called(*args: object, **kwargs: object) -> None:
            if next(calls, None) is None:
                raise Killed
            call(*args, **kwargs)

        return called

    for name in ("fsync", "fdatasync", "replace", "unlink"):
        patch.setattr(os, name, mortal(getattr(os, name)))


STEPS: list[Callable[[ResidualStore], None]] = [
    lambda s: s.commit([1], rows(10), round=1),
    lambda s: s.commit([2], rows(21), round=2),
    lambda s: s.snapshot(2),
    lambda s: s.commit([1, 2], rows(12, 22), round=3),  # over rows that the snapshot needs
    lambda s: s.commit([1, 2], rows(13, 23), round=4),  # over rows that it does not
    lambda s: s.snapshot(4),
    lambda s: s.commit([2, 3], rows(24, 34), round=5),
    lambda s: s.rollback(4),
]


@pytest.mark.parametrize("spares", [0, 2])
def test_death_at_every_step_leaves_old_or_new(folder: Path, monkeypatch: pytest.MonkeyPatch, spares: int) -> None:
    model = ResidualStore.in_memory(LAYOUT)
    states = [content(model)]
    for step in STEPS:
        step(model)
        states.append(content(model))
    saved = {0: states[0], 2: states[2], 4: states[5]}
    done, moment = 0, 0
    while done < len(STEPS):
        shutil.rmtree(folder, ignore_errors=True)
        store, done = ResidualStore.on_disk(LAYOUT, folder, spares), 0
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            die_at(patch, moment)
            for step in STEPS:
                step(store)
                done += 1
        before, after = states[done], states[min(done + 1, len(STEPS))]
        store = ResidualStore.on_disk(LAYOUT, folder, spares)
        found = content(store)
        assert all(found.get(client) in (before.get(client), after.get(client)) for client in {*before, *after, *found})
        t = store.snapshot_round or 0
        store.rollback(t)
        assert content(store) == saved[t]
        assert len([name for name in files(folder) if not name.endswith(".spare")]) == 1 + len(store.ids())
        moment += 1
    assert moment > 40  # the steps make about this many system calls


# Imports once, then makes one writer for each line it reads, by fork: ten kills cost one import of torch.
WRITERS = """
import os, sys, torch
from fedcams.bits.checksum import sums
from fedcams.layout import Layout
from fedcams.residuals import ResidualStore

sums(torch.zeros(1).numpy())  # loads the kernel

def write(folder, d):
    store = ResidualStore.on_disk(Layout.flat(d), folder, spares=2)
    t = store.snapshot_round or 0
    while True:
        t += 1
        clients = [c for c in range(4) if t % (c + 1) == 0]
        values = torch.tensor([c * 1000.0 + t for c in clients])
        store.commit(clients, values[:, None].expand(-1, d), t)
        if t % 3 == 0:
            store.snapshot(t)

for line in sys.stdin:
    child = os.fork()
    if not child:
        write(sys.argv[1], int(sys.argv[2]))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


@pytest.fixture
def writers(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The process that makes writers."""
    with python(WRITERS, folder, 20_000) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def kill_a_writer(writers: subprocess.Popen[str], after: float) -> None:
    """Starts a writer, lets it write for a while and kills it with SIGKILL."""
    assert writers.stdin is not None
    assert writers.stdout is not None
    writers.stdin.write("go\n")
    writers.stdin.flush()
    child = int(writers.stdout.readline())
    time.sleep(after)
    os.kill(child, 9)
    assert writers.stdout.readline() == "gone\n"


def check_values(store: ResidualStore) -> None:
    """Every row is whole, and the one that its round says."""
    for client, row in zip(store.ids(), store.gather(store.ids()), strict=True):
        assert torch.equal(row, torch.full_like(row, client * 1000.0 + (store.round_of(client) or 0)))


def test_kill_9_leaves_old_or_new(folder: Path, writers: subprocess.Popen[str]) -> None:
    """Client c writes c * 1000 + t in every round t that c + 1 divides; every third round is a snapshot."""
    t = 0
    for _ in range(12):
        kill_a_writer(writers, after=random.uniform(0.03, 0.3))
        store = ResidualStore.on_disk(Layout.flat(20_000), folder)
        check_values(store)
        t = store.snapshot_round or 0
        store.rollback(t)
        check_values(store)
        assert {c: store.round_of(c) or 0 for c in range(4)} == {c: t - t % (c + 1) for c in range(4)}
        assert len(files(folder)) == 1 + len(store.ids())
    assert t > 0, "no writer ever came to a snapshot"


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_rows_of_a_gpu_update_in_a_host_store(folder: Path, where: str) -> None:
    store = ResidualStore.on_disk(LAYOUT, folder) if where == "disk" else ResidualStore.in_memory(LAYOUT)
    store.commit([1, 2], rows(1, 2).cuda(), round=1)
    update = rows(10, 20, 30).cuda()
    store.add_to([1, 2, 3], update)
    assert torch.equal(update.cpu(), rows(11, 22, 30))
