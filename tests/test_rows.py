"""Named rows: memory, GPU and disk behave alike, compared with the simplest model of a store."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from fedcams.errors import LayoutError, ResidualError
from fedcams.layout import Layout
from fedcams.rows import RowStore
from fedcams.rows.disk import DiskRows
from fedcams.rows.memory import MemoryRows
from named_rows import LAYOUTS, MEMORY_DISK, NBYTES, Content, D, content, files, rows

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.fixture(params=["memory", "disk", CUDA])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RowStore:
    """An empty store of each kind."""
    if request.param == "disk":
        return RowStore.on_disk(LAYOUTS, tmp_path / "rows")
    return RowStore.in_memory(LAYOUTS, "cuda" if request.param == "cuda" else "cpu")


def test_an_unseen_client_is_zeros_and_costs_nothing(store: RowStore) -> None:
    update = rows(1, 2)
    assert torch.equal(store.gather("residual", [7, 7, 2**64 - 1]).cpu(), torch.zeros(3, D))
    for name, given in update.items():
        store.add_to_(name, [3, 4], given)
        assert torch.equal(given, rows(1, 2)[name])
    assert (store.ids(), store.round_of(7), store.digest_of(7), store.versions()) == ([], None, None, [])
    assert (store.nbytes, store.snapshot_round) == (0, None)


def test_committed_rows_come_back_by_name(store: RowStore) -> None:
    store.commit([9, 2], rows(90, 20), round=1)
    store.commit([2], rows(21), round=4)
    for name, expected in rows(21, 0, 90).items():
        assert torch.equal(store.gather(name, [2, 5, 9]).cpu(), expected)
    assert (store.ids(), store.round_of(9), store.round_of(2)) == ([2, 9], 1, 4)
    assert [version[:2] for version in store.versions()] == [[2, 4], [9, 1]]
    assert store.nbytes == 2 * NBYTES


def test_the_order_in_which_names_are_given_does_not_matter(tmp_path: Path) -> None:
    backwards = dict(reversed(LAYOUTS.items()))
    for store in (RowStore.in_memory(backwards), RowStore.on_disk(backwards, tmp_path)):
        store.commit([1], dict(reversed(rows(1).items())), round=1)
        assert content(store) == {1: (1, 1.0)}
    assert content(RowStore.on_disk(LAYOUTS, tmp_path)) == {1: (1, 1.0)}


def test_rows_keep_every_bit(store: RowStore) -> None:
    odd = torch.tensor([[-0.0, 1e-45, -3.4e38, float("inf"), float("nan")]])
    store.commit([0], {"residual": odd, "control": odd[:, 2:]}, round=0)
    assert torch.equal(store.gather("residual", [0]).cpu().view(torch.int32), odd.view(torch.int32))
    assert torch.equal(store.gather("control", [0]).cpu().view(torch.int32), odd[:, 2:].contiguous().view(torch.int32))


def test_add_to_works_in_the_callers_buffer(store: RowStore) -> None:
    store.commit([1, 3], rows(10, 30), round=1)
    wide = torch.ones(3, 2 * D, requires_grad=True)
    buffer = wide.detach()[:, ::2]  # neither contiguous nor its own memory
    store.add_to_("residual", [3, 2, 1], buffer)
    assert torch.equal(wide[:, ::2], rows(31, 1, 11)["residual"])
    assert torch.equal(wide[:, 1::2], rows(1, 1, 1)["residual"])


def test_a_commit_copies_what_it_is_given(store: RowStore) -> None:
    given = {name: part.requires_grad_() for name, part in rows(1, 2).items()}
    store.commit([0, 1], given, round=1)
    for name, part in given.items():
        part.detach().fill_(7)
        store.gather(name, [0, 1]).fill_(8)
        store.add_to_(name, [0, 1], part)
    assert content(store) == {0: (1, 1.0), 1: (1, 2.0)}


def test_expanded_rows_and_tensor_ids_are_fine(store: RowStore) -> None:
    expanded = {name: part.expand(2, -1) for name, part in rows(1).items()}
    store.commit(torch.tensor([4, 2]), expanded, round=1)
    assert content(store) == {2: (1, 1.0), 4: (1, 1.0)}


def test_inference_mode_leaves_no_trace(store: RowStore) -> None:
    with torch.inference_mode():
        store.commit([0], rows(1), round=1)
    store.commit([0], rows(2), round=2)
    with torch.inference_mode():
        store.commit([0], rows(3), round=3)
    assert content(store) == {0: (3, 3.0)}


def test_an_empty_cohort_is_fine(store: RowStore) -> None:
    empty = {name: torch.empty(0, layout.d) for name, layout in LAYOUTS.items()}
    store.commit([], empty, round=1)
    store.add_to_("residual", [], empty["residual"])
    assert store.gather("residual", []).shape == (0, D)
    assert store.ids() == []


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: part for key, part in rows(1).items() if key != name}


REFUSED: list[tuple[type[Exception], str, Callable[[RowStore], object]]] = [
    (
        LayoutError,
        r"rows of 'residual': got torch.float64 \(1, 5\); give torch.float32 \(1, 5\)",
        lambda s: s.commit([1], {**rows(1), "residual": rows(1)["residual"].double()}, 9),
    ),
    (
        LayoutError,
        r"rows of 'control': got torch.float32 \(1, 4\); give torch.float32 \(1, 3\)",
        lambda s: s.commit([1], {**rows(1), "control": torch.ones(1, 4)}, 9),
    ),
    (LayoutError, r"\(2, 3\); give torch.float32 \(1, 3\), one row per id", lambda s: s.commit([1], rows(1, 2), 9)),
    (LayoutError, r"\(5,\); give torch.float32 \(1, 5\)", lambda s: s.add_to_("residual", [1], torch.ones(D))),
    (ResidualError, r"rows: got the names \['residual'\]; give all of", lambda s: s.commit([1], without("control"), 9)),
    (
        ResidualError,
        r"rows: got .*'other'.*; give all of \['control', 'residual'\] and no other",
        lambda s: s.commit([1], {**rows(1), "other": torch.ones(1, 2)}, 9),
    ),
    (ResidualError, "name='residuals': no such row.*; give one of", lambda s: s.gather("residuals", [1])),
    (ResidualError, "name='x': no such row.*; give one of", lambda s: s.add_to_("x", [1], torch.ones(1, D))),
    (ResidualError, "client 4 appears twice in one commit", lambda s: s.commit([4, 1, 4], rows(1, 2, 3), 9)),
    (ResidualError, "client=-1: give an integer from 0", lambda s: s.gather("control", [-1])),
    (ResidualError, "client=18446744073709551616", lambda s: s.round_of(2**64)),
    (ResidualError, "client=-2: give an integer", lambda s: s.digest_of(-2)),
    (ResidualError, "client='a': give", lambda s: s.add_to_("residual", "a", torch.ones(1, D))),  # type: ignore[arg-type]
    (ResidualError, "round=-1: give an integer from 0", lambda s: s.commit([1], rows(1), -1)),
    (ResidualError, "round=2.5: give an integer", lambda s: s.commit([1], rows(1), 2.5)),  # type: ignore[arg-type]
    (ResidualError, "round=3: client 1 is already at round 3", lambda s: s.commit([0, 1], rows(1, 2), 3)),
    (ResidualError, "round=2: client 1 is already at round 3", lambda s: s.commit([0, 1], rows(1, 2), 2)),
    (ResidualError, "t=2: client 1 has rows of round 3; give that or a later t", lambda s: s.snapshot(2)),
    (ResidualError, "t=-1: give an integer", lambda s: s.snapshot(-1)),
    (ResidualError, "t=3: no snapshot was taken; roll back to round 0", lambda s: s.rollback(3)),
]


@pytest.mark.parametrize(("error", "message", "action"), REFUSED, ids=[message for _, message, _ in REFUSED])
def test_refusals_name_the_value_and_change_nothing(
    store: RowStore, error: type[Exception], message: str, action: Callable[[RowStore], object]
) -> None:
    store.commit([1], rows(5), round=3)
    with pytest.raises(error, match=message):
        action(store)
    assert content(store) == {1: (3, 5.0)}


@pytest.mark.parametrize("name", ["", "Residual", "a b", "é", "a/b", "x" * 33, "a\n"])
def test_bad_names_of_rows_are_refused(tmp_path: Path, name: str) -> None:
    for make in (RowStore.in_memory, lambda layouts: RowStore.on_disk(layouts, tmp_path / "rows")):
        with pytest.raises(ResidualError, match="cannot name a row; use 1 to 32 characters of a-z, 0-9"):
            make({name: Layout.flat(1)})
    assert not (tmp_path / "rows").exists()


def test_a_store_without_rows_is_refused() -> None:
    with pytest.raises(ResidualError, match=r"layouts=\{\}: a store needs at least one named row"):
        RowStore.in_memory({})


# -- going back ------------------------------------------------------------------------------------------------------


def test_rollback_returns_to_the_snapshot_as_often_as_called(store: RowStore) -> None:
    store.commit([1, 2], rows(10, 20), round=1)
    store.snapshot(2)
    for _ in range(2):
        store.commit([1, 3], rows(11, 31), round=3)
        store.commit([1, 3], rows(12, 32), round=4)
        assert content(store) == {1: (4, 12.0), 2: (1, 20.0), 3: (4, 32.0)}
        assert store.nbytes == 4 * NBYTES  # three clients, and the rows of client 1 which the snapshot needs
        store.rollback(2)
        assert content(store) == {1: (1, 10.0), 2: (1, 20.0)}
        assert (store.snapshot_round, store.nbytes) == (2, 2 * NBYTES)


def test_only_the_newest_snapshot_is_kept(store: RowStore) -> None:
    store.commit([1], rows(10), round=1)
    store.snapshot(1)
    store.commit([1], rows(11), round=2)
    store.snapshot(2)
    assert store.nbytes == NBYTES
    with pytest.raises(ResidualError, match="t=1: the snapshot is of round 2; roll back to round 2, or use an empty"):
        store.rollback(1)
    with pytest.raises(ResidualError, match="t=0: the snapshot is of round 2"):
        store.rollback(0)
    store.rollback(2)
    with pytest.raises(ResidualError, match="t=1: client 1 has rows of round 2"):
        store.snapshot(1)
    assert content(store) == {1: (2, 11.0)}


def test_without_a_snapshot_round_zero_is_empty(store: RowStore) -> None:
    store.commit([1], rows(1), round=0)
    store.commit([2], rows(1), round=1)
    store.rollback(0)
    assert (store.ids(), store.nbytes, store.snapshot_round) == ([], 0, None)
    store.commit([1], rows(1), round=0)  # the same rounds may be run again


def test_a_snapshot_of_an_empty_store(store: RowStore) -> None:
    store.snapshot(0)
    store.commit([1], rows(1), round=1)
    store.rollback(0)
    assert (store.ids(), store.snapshot_round) == ([], 0)


def test_rounds_do_not_go_back_behind_the_snapshot(store: RowStore) -> None:
    store.commit([1], rows(1), round=1)
    store.snapshot(5)
    for client in (1, 2):
        with pytest.raises(ResidualError, match=f"round=4: client {client} is already at round 5"):
            store.commit([client], rows(1), round=4)
    with pytest.raises(ResidualError, match="t=4: there is a newer snapshot, of round 5"):
        store.snapshot(4)


def test_memory_rows_are_overwritten_in_place_unless_the_snapshot_needs_them() -> None:
    store = RowStore.in_memory(LAYOUTS)
    assert isinstance(store, MemoryRows)
    store.commit([1], rows(1), round=1)
    first = store._rows[1, 1]["control"]
    store.commit([1], rows(2), round=2)
    assert store._rows[1, 2]["control"] is first
    store.snapshot(2)
    store.commit([1], rows(3), round=3)
    second = store._rows[1, 3]["control"]
    assert second is not first
    store.commit([1], rows(4), round=4)
    assert store._rows[1, 4]["control"] is second
    assert torch.equal(first, rows(2)["control"][0])


class MemoryWalk(RuleBasedStateMachine):
    """Any sequence of calls agrees with the simplest model: a dict, copied at each snapshot."""

    def open(self, spares: int) -> RowStore:
        """A new store; in memory there are no spare files."""
        return RowStore.in_memory(LAYOUTS)

    @initialize(spares=st.sampled_from([0, 2]))
    def start(self, spares: int) -> None:
        """Nothing seen, no snapshot."""
        self.store = self.open(spares)
        self.model: Content = {}
        self.saved: tuple[int, Content] = (0, {})
        self.round = 0
        self.value = 0

    @rule(clients=st.sets(st.integers(0, 4), max_size=3), gap=st.integers(1, 2))
    def commit(self, clients: set[int], gap: int) -> None:
        """A round of some clients, each with a value never used before."""
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
        assert self.store.nbytes == NBYTES * (len(self.model) + len(changed))


class DiskWalk(MemoryWalk):
    """The same, where the store may be reopened at any time, and no unneeded file stays."""

    def open(self, spares: int) -> RowStore:
        """A new store in a new folder, that may keep spare files and write over them."""
        self.spares = spares
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY_DISK if os.path.isdir(MEMORY_DISK) else None))
        return RowStore.on_disk(LAYOUTS, self.folder, self.spares)

    @rule()
    def reopen(self) -> None:
        """Another process goes on: it finds the same digests in the files."""
        versions = self.store.versions()
        self.store = RowStore.on_disk(LAYOUTS, self.folder, self.spares)
        assert self.store.versions() == versions
        self.agree()

    def agree(self) -> None:
        """As many files as versions, and digests of no others."""
        super().agree()
        assert isinstance(self.store, DiskRows)
        assert len(self.store._digests) <= self.store.nbytes // NBYTES
        kept = [name for name in files(self.folder) if not name.endswith(".spare")]
        assert len(kept) == 1 + self.store.nbytes // NBYTES
        assert len(files(self.folder)) - len(kept) <= self.spares

    def teardown(self) -> None:
        """Removes the folder."""
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


TestMemoryWalk = MemoryWalk.TestCase
TestMemoryWalk.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, database=None)
TestDiskWalk = DiskWalk.TestCase
TestDiskWalk.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, database=None)


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_rows_of_a_gpu_update_in_a_host_store(tmp_path: Path, where: str) -> None:
    store = RowStore.on_disk(LAYOUTS, tmp_path) if where == "disk" else RowStore.in_memory(LAYOUTS)
    store.commit([1, 2], {name: part.cuda() for name, part in rows(1, 2).items()}, round=1)
    update = rows(10, 20, 30)["residual"].cuda()
    store.add_to_("residual", [1, 2, 3], update)
    assert torch.equal(update.cpu(), rows(11, 22, 30)["residual"])
