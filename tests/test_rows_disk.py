"""Named rows on disk: the format, damage, links, failures of the system, and real kills."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedcams import durable
from fedcams.errors import ResidualError
from fedcams.layout import Layout
from fedcams.rows import RowStore
from forks import Forked, Forks
from memory import peak_memory
from named_rows import LAYOUTS, MEMORY_DISK, D, content, files, rows

CONTROL, RESIDUAL = LAYOUTS["control"], LAYOUTS["residual"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for a store, not made yet."""
    return tmp_path / "run" / "rows"


def test_a_reopened_folder_holds_the_same(folder: Path) -> None:
    store = RowStore.on_disk(LAYOUTS, str(folder))
    store.commit([1, 2**64 - 1], rows(1, 2), round=3)
    store.snapshot(4)
    store.commit([1], rows(5), round=6)
    again = RowStore.on_disk(LAYOUTS, folder)
    assert content(again) == content(store) == {1: (6, 5.0), 2**64 - 1: (3, 2.0)}
    assert again.snapshot_round == 4
    assert again.versions() == store.versions()
    again.rollback(4)
    assert content(again) == {1: (3, 1.0), 2**64 - 1: (3, 2.0)}


def test_only_changed_rows_are_written(folder: Path) -> None:
    store = RowStore.on_disk(LAYOUTS, folder)
    store.commit([1, 2], rows(1, 2), round=1)
    before = os.stat(folder / "1-1.rows")
    store.snapshot(1)
    store.commit([2], rows(3), round=2)
    store.commit([2], rows(4), round=3)
    assert files(folder) == ["1-1.rows", "2-1.rows", "2-3.rows", "store.json"]  # 2-2.rows went when it was replaced
    store.snapshot(3)
    assert files(folder) == ["1-1.rows", "2-3.rows", "store.json"]
    after = os.stat(folder / "1-1.rows")
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_spares_are_written_over(folder: Path) -> None:
    store = RowStore.on_disk(LAYOUTS, folder, spares=1)
    store.commit([1, 2], rows(1, 2), round=1)
    first = os.stat(folder / "1-1.rows").st_ino
    store.commit([1], rows(3), round=2)
    assert files(folder) == ["0.rows.spare", "1-2.rows", "2-1.rows", "store.json"]
    store = RowStore.on_disk(LAYOUTS, folder, spares=1)
    store.commit([2], rows(4), round=3)
    assert files(folder) == ["0.rows.spare", "1-2.rows", "2-3.rows", "store.json"]
    assert os.stat(folder / "2-3.rows").st_ino == first
    assert content(store) == content(RowStore.on_disk(LAYOUTS, folder)) == {1: (2, 3.0), 2: (3, 4.0)}
    assert files(folder) == ["1-2.rows", "2-3.rows", "store.json"]  # a store that keeps no spares removes them


def test_a_spare_of_the_same_name_is_not_lost(folder: Path) -> None:
    store = RowStore.on_disk(LAYOUTS, folder, spares=2)
    for clients in ([0, 1], [0], [0, 1]):
        store.commit(clients, rows(*range(len(clients))), round=1)
        store.rollback(0)
    assert files(folder) == ["0.rows.spare", "1.rows.spare", "store.json"]


def test_the_format_is_the_one_documented(folder: Path) -> None:
    layouts = {"b": Layout.flat(1), "a.1": Layout.flat(2)}
    store = RowStore.on_disk(layouts, folder)
    store.commit([258], {"b": torch.tensor([[1.0]]), "a.1": torch.tensor([[2.0, 1.0]])}, round=3)
    covered = bytes.fromhex(
        "02010000 00000000"  # client
        " 03000000 00000000"  # round
        " 02000000 00000000"  # number of rows
        f"{b'a.1'.hex()}{'00' * 29} {Layout.flat(2).id.hex()} 02000000 00000000"  # the first by name, its layout, d
        " 0000807f 00000000 000000bf 00000000"  # 0x40000000 + 0x3f800000; 0x40000000 + 2 * 0x3f800000
        f"{b'b'.hex()}{'00' * 31} {Layout.flat(1).id.hex()} 01000000 00000000"
        " 0000803f 00000000 0000803f 00000000"
    )
    digest = hashlib.blake2b(covered, digest_size=16, person=b"fedcams.rows").digest()
    values = bytes.fromhex("00000040 0000803f 0000803f")
    assert (folder / "258-3.rows").read_bytes() == b"FCRR\3\0\0\0" + digest + covered + values
    assert store.digest_of(258) == digest.hex()
    assert json.loads((folder / "store.json").read_bytes()) == {
        "fedcams_rows": 3,
        "rows": {"a.1": {"layout": Layout.flat(2).id.hex(), "d": 2}, "b": {"layout": Layout.flat(1).id.hex(), "d": 1}},
        "snapshot": None,
    }


def test_add_to_needs_the_memory_of_one_row(folder: Path) -> None:
    layouts, clients = {"residual": Layout.flat(100_000), "control": Layout.flat(100_000)}, range(8)
    store = RowStore.on_disk(layouts, folder)
    update = torch.ones(8, 100_000)
    store.commit(clients, {"residual": update, "control": update}, round=1)
    peak = peak_memory(lambda: store.add_to_("control", clients, update))
    assert peak < 2.5 * 4 * 100_000  # the row just read, and the one before until it is freed
    assert torch.equal(update, torch.full((8, 100_000), 4.0))  # three times


def test_rows_longer_than_a_piece_are_read_in_ranges_on_several_threads(folder: Path) -> None:
    d, threads = 600_001, torch.get_num_threads()
    store = RowStore.on_disk({"a": Layout.flat(3), "b": Layout.flat(d)}, folder)
    row = torch.arange(d, dtype=torch.float32)[None]
    store.commit([1], {"a": torch.ones(1, 3), "b": row}, round=1)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(store.gather("b", [1]), row)
            update = row.clone()
            store.add_to_("b", [1], update)
            assert torch.equal(update, 2 * row)
    finally:
        torch.set_num_threads(threads)


def test_a_second_store_reads_and_says_when_it_is_behind(folder: Path) -> None:
    writer = RowStore.on_disk(LAYOUTS, folder)
    writer.commit([1], rows(1), round=1)
    reader = RowStore.on_disk(LAYOUTS, folder)
    assert content(reader) == content(writer)
    writer.rollback(0)
    writer.commit([1], rows(2), round=1)
    with pytest.raises(
        ResidualError, match=r"1-1\.rows: not the rows that were written, digest \w{32} instead of \w{32}"
    ):
        reader.gather("residual", [1])
    writer.commit([1], rows(2), round=2)
    with pytest.raises(ResidualError, match=r"cannot read .*1-1\.rows: No such file .*; restore it, or reopen"):
        reader.gather("residual", [1])


# -- digests ---------------------------------------------------------------------------------------------------------


def test_a_digest_is_known_without_reading_the_values_again(folder: Path) -> None:
    store = RowStore.on_disk(LAYOUTS, folder)
    store.commit([1, 2], rows(1, 2), round=1)
    versions = store.versions()
    data = bytearray((folder / "1-1.rows").read_bytes())
    data[-1] ^= 1  # reading the values would be refused
    (folder / "1-1.rows").write_bytes(data)
    again = RowStore.on_disk(LAYOUTS, folder)
    assert again.versions() == versions == [[1, 1, store.digest_of(1)], [2, 1, store.digest_of(2)]]
    again.verify(versions)
    with pytest.raises(ResidualError, match="damaged, checksum"):
        again.gather("residual", [1])
    shutil.rmtree(folder)
    assert store.versions() == versions  # known from writing


def test_a_digest_stands_for_client_round_names_and_every_value(folder: Path) -> None:
    store = RowStore.on_disk(LAYOUTS, folder)
    store.commit([1, 2], rows(1, 1), round=1)
    digests = {store.digest_of(1), store.digest_of(2)}
    store.commit([1], rows(1), round=2)
    digests.add(store.digest_of(1))
    for round, at in enumerate(range(D), start=3):
        store.rollback(0)
        changed = rows(1)
        changed["residual"][0, at] += 1
        store.commit([1], changed, round=2)
        digests.add(store.digest_of(1))
        assert len(digests) == round + 1
    swapped = RowStore.on_disk({"residual": CONTROL, "control": RESIDUAL}, folder.with_name("swapped"))
    swapped.commit([1], {"residual": rows(1)["control"], "control": rows(1)["residual"]}, round=1)
    assert swapped.digest_of(1) not in digests


def test_the_same_rows_have_the_same_digest_wherever_they_are(folder: Path) -> None:
    first, second = (RowStore.on_disk(LAYOUTS, folder / name, spares=1) for name in "ab")
    first.commit([1], rows(7), round=1)
    for store in (first, second):
        store.commit([1], rows(8), round=2)
    assert first.versions() == second.versions()


def test_verify_names_what_differs(folder: Path) -> None:
    store = RowStore.on_disk(LAYOUTS, folder)
    store.commit([1, 2, 3], rows(1, 2, 3), round=1)
    first, second, third = store.versions()
    store.verify([third, first, second])
    cases = [
        ([first, second], "there are rows of client 3, but none were saved"),
        ([first, second, third, [4, 1, "00"]], "the rows of client 4 are missing"),
        ([first, [2, 5, second[2]], third], "the rows of client 2 are of round 1 instead of 5"),
        ([first, [2, 1, third[2]], third], f"the rows of client 2 differ, digest {second[2]} instead of"),
        ([], "client 1, .*client 2, .*client 3, but none were saved; restore the rows that were saved"),
        ([[client, 1, ""] for client in range(4, 9)], "and 5 more; restore"),
    ]
    for expected, message in cases:
        with pytest.raises(ResidualError, match=f"{folder}: .*{message}"):
            store.verify(expected)


def test_rows_of_another_run_with_the_same_layouts_are_refused(folder: Path) -> None:
    ours, other = (RowStore.on_disk(LAYOUTS, folder / name) for name in ("ours", "other"))
    ours.commit([1], rows(1), round=1)
    other.commit([1], rows(2), round=1)
    shutil.copy(other.folder / "1-1.rows", ours.folder / "1-1.rows")
    with pytest.raises(ResidualError, match=r"1-1\.rows: not the rows that were written, digest"):
        ours.gather("residual", [1])
    with pytest.raises(ResidualError, match="the rows of client 1 differ"):
        RowStore.on_disk(LAYOUTS, ours.folder).verify(ours.versions())


def test_verify_at_the_snapshot_tells_what_rollback_will_leave(folder: Path) -> None:
    store = RowStore.on_disk(LAYOUTS, folder)
    store.commit([1, 2], rows(1, 2), round=1)
    store.snapshot(1)
    expected = store.versions()
    store.commit([1, 3], rows(5, 6), round=2)
    before = files(folder)
    store.verify(expected, at_snapshot=True)
    with pytest.raises(ResidualError, match="client 1 are of round 2 instead of 1"):
        store.verify(expected)
    assert files(folder) == before
    store.rollback(1)
    store.verify(expected)


# -- damage ----------------------------------------------------------------------------------------------------------

HEADER = 48 + 2 * 64
VALUES = 4 * (3 + D)


def signed(covered: bytes) -> bytes:
    """A header that is whole, whatever it says."""
    return b"FCRR\3\0\0\0" + hashlib.blake2b(covered, digest_size=16, person=b"fedcams.rows").digest() + covered


def edited(at: int, new: bytes) -> Callable[[bytes], bytes]:
    """Somebody wrote another header, with its digest."""
    return lambda b: signed((b[:at] + new + b[at + len(new) :])[24:HEADER]) + b[HEADER:]


DAMAGED: list[tuple[str, Callable[[bytes], bytes]]] = [
    (f"truncated, {VALUES - 1} of {VALUES} bytes of rows; restore", lambda b: b[:-1]),
    (f"truncated, 0 of {VALUES} bytes of rows", lambda b: b[:HEADER]),
    (f"truncated, {HEADER - 1} of {HEADER} bytes of header", lambda b: b[: HEADER - 1]),
    (f"truncated, 0 of {HEADER} bytes of header", lambda b: b""),
    (f"extra bytes follow the {VALUES} bytes", lambda b: b + b"\0"),
    (r"damaged, checksum \w{32} of 'residual' instead of \w{32}", lambda b: b[:-1] + bytes([b[-1] ^ 1])),
    (r"damaged, checksum \w{32} of 'control' instead", lambda b: b[:HEADER] + bytes(8) + b[HEADER + 8 :]),
    (r"damaged header, its digest is \w{32} instead of 0{32}", lambda b: b[:8] + bytes(16) + b[24:]),
    (r"damaged header, its digest is", lambda b: b[: HEADER - 1] + bytes([b[HEADER - 1] ^ 1]) + b[HEADER:]),
    (r"damaged header, its digest is", lambda b: b[:24] + b"\2" + b[25:]),
    (r"the magic is b'PK..' instead of b'FCRR'", lambda b: b"PK.." + b[4:]),
    (r"the format version is 2 instead of 3", lambda b: b[:4] + b"\2" + b[5:]),
    (r"the number of rows is 1 instead of 2", edited(40, b"\1")),
    (r"the client is 2 instead of 1", edited(24, b"\2")),
    (r"the round is 2 instead of 1", edited(32, b"\2")),
    (r"the name of a row is b'kontrol' instead of b'control'", edited(48, b"k")),
    (r"the layout id of 'control' is '666f726569676e21' instead of", edited(80, b"foreign!")),
    (r"the d of 'control' is 6 instead of 3", edited(88, b"\6")),
    (r"the d of 'residual' is 6 instead of 5", edited(88 + 64, b"\6")),
    (r"not the rows that were written, digest ", edited(96, b"\6")),
]


def add_all(store: RowStore, clients: list[int], update: dict[str, Tensor]) -> None:
    """Adds the rows of every name."""
    for name, part in update.items():
        store.add_to_(name, clients, part)


@pytest.mark.parametrize(("message", "damage"), DAMAGED, ids=[message for message, _ in DAMAGED])
def test_a_bad_file_is_refused(folder: Path, message: str, damage: Callable[[bytes], bytes]) -> None:
    store = RowStore.on_disk(LAYOUTS, folder)
    store.commit([1, 2], rows(1, 2), round=1)
    path, update = folder / "1-1.rows", rows(5, 6)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ResidualError, match=rf"1-1\.rows: {message}"):
        add_all(store, [1, 2], update)
    with pytest.raises(ResidualError):  # another process does not know the digest
        content(RowStore.on_disk(LAYOUTS, folder))
    assert torch.equal(store.gather("residual", [2]), rows(2)["residual"])  # the others are still there


def test_a_file_renamed_to_another_client_or_round_is_refused(folder: Path) -> None:
    RowStore.on_disk(LAYOUTS, folder).commit([1], rows(1), round=1)
    for name, message in (("2-1.rows", "the client is 1 instead of 2"), ("1-7.rows", "the round is 1 instead of 7")):
        shutil.copy(folder / "1-1.rows", folder / name)
        with pytest.raises(ResidualError, match=message):
            RowStore.on_disk(LAYOUTS, folder).versions()
        (folder / name).replace(folder / "1-1.rows")


def store_becomes_a_folder(folder: Path) -> None:
    """Not even a file."""
    (folder / "store.json").unlink()
    (folder / "store.json").mkdir()


def bad_snapshot(folder: Path) -> None:
    """A round that is none."""
    path = folder / "store.json"
    path.write_text(path.read_text().replace("null", "-7"))


BAD_FOLDERS: list[tuple[str, Callable[[Path], object]]] = [
    (r"store\.json: damaged \(JSONDecodeError", lambda f: (f / "store.json").write_bytes(b"{")),
    (r"store\.json: damaged \(UnicodeDecodeError", lambda f: (f / "store.json").write_bytes(b"\xff\xff\xff")),
    (r"store\.json: damaged \(KeyError", lambda f: (f / "store.json").write_text("{}")),
    (r"store\.json: damaged \(TypeError", lambda f: (f / "store.json").write_text("[1]")),
    (r"store\.json: damaged \(ValueError\('snapshot=-7'\)\)", bad_snapshot),
    (r"store\.json is missing, but there are rows; restore it", lambda f: (f / "store.json").unlink()),
    (r"01-1\.rows: not named <client>-<round>\.rows; move it", lambda f: (f / "01-1.rows").touch()),
    (r"18446744073709551616\.rows: not named", lambda f: (f / f"1-{2**64}.rows").touch()),
    (r"cannot read .*store\.json: Is a directory", store_becomes_a_folder),
]


@pytest.mark.parametrize(("message", "spoil"), BAD_FOLDERS, ids=[message for message, _ in BAD_FOLDERS])
def test_a_bad_folder_is_refused_at_opening(folder: Path, message: str, spoil: Callable[[Path], object]) -> None:
    RowStore.on_disk(LAYOUTS, folder).commit([1], rows(1), round=1)
    spoil(folder)
    with pytest.raises(ResidualError, match=message):
        RowStore.on_disk(LAYOUTS, folder)
    assert (folder / "1-1.rows").exists()


@pytest.mark.parametrize(
    "other", [{**LAYOUTS, "control": Layout.flat(7)}, {"residual": RESIDUAL}, {**LAYOUTS, "more": RESIDUAL}]
)
def test_a_folder_of_other_rows_is_refused_untouched(folder: Path, other: dict[str, Layout]) -> None:
    RowStore.on_disk(other, folder)
    (folder / "1-1.rows.tmp").touch()
    message = r"a store of {.*}, not of {.*'d': 3.*'d': 5}}}; use it with its own model and method, or give an empty"
    with pytest.raises(ResidualError, match=message):
        RowStore.on_disk(LAYOUTS, folder)
    assert files(folder) == ["1-1.rows.tmp", "store.json"]


OLD_STORES: list[dict[str, str]] = [
    {"store.json": '{"fedcams_residuals": 1, "layout": "00", "d": 5, "snapshot": null}'},
    {"store.json": '{"fedcams_residuals": 2, "layout": "00", "d": 5, "snapshot": 3}', "1-1.row": "FCRR"},
    {"1-1.row": "FCRR"},
    {"0.row.spare": "FCRR"},
]


@pytest.mark.parametrize("names", OLD_STORES, ids=["version 1", "version 2", "rows only", "a spare only"])
def test_a_folder_of_version_0_1_is_refused_untouched(folder: Path, names: dict[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in names.items():
        (folder / name).write_text(text)
    message = (
        f"{folder} was written by fedcams 0.1; version 0.1.0 is the last one that reads it; "
        "finish that run with 0.1.0, or give an empty folder"
    )
    with pytest.raises(ResidualError) as refused:
        RowStore.on_disk(LAYOUTS, folder)
    assert str(refused.value) == message
    assert {name: (folder / name).read_text() for name in files(folder)} == names


def test_opening_removes_what_a_kill_left_and_nothing_else(folder: Path) -> None:
    store = RowStore.on_disk(LAYOUTS, folder)
    store.commit([1], rows(1), round=1)
    for name in ("1-2.rows.tmp", "store.json.tmp", "notes.txt", "other.tmp"):
        (folder / name).write_bytes(b"half")
    shutil.copy(folder / "1-1.rows", folder / "1-0.rows")  # replaced, its removal was cut short
    assert content(RowStore.on_disk(LAYOUTS, folder)) == {1: (1, 1.0)}
    assert files(folder) == ["1-1.rows", "notes.txt", "other.tmp", "store.json"]


# -- links: nothing outside of the folder is written or deleted --------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A file of someone else, which must not change."""
    path = tmp_path / "outside"
    path.write_bytes(b"precious" * 100)
    yield path
    assert path.read_bytes() == b"precious" * 100


NAMES = ["store.json", "store.json.tmp", "1-1.rows", "1-0.rows", "1-2.rows.tmp", "0.rows.spare", "notes.txt"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dangling", [False, True])
def test_opening_refuses_symbolic_links(folder: Path, outside: Path, name: str, dangling: bool) -> None:
    RowStore.on_disk(LAYOUTS, folder).commit([1], rows(1), round=1)
    (folder / name).unlink(missing_ok=True)
    target = outside.with_name("nothing") if dangling else outside
    (folder / name).symlink_to(target)
    before = files(folder)
    with pytest.raises(ResidualError, match=rf"{name} is a symbolic link, and a store writes .*; remove the link"):
        RowStore.on_disk(LAYOUTS, folder, spares=1)
    assert files(folder) == before
    assert target.exists() != dangling


def test_links_that_appear_later_are_not_followed(folder: Path, outside: Path) -> None:
    store = RowStore.on_disk(LAYOUTS, folder, spares=1)
    store.commit([1, 2], rows(1, 2), round=1)
    store.commit([1], rows(3), round=2)
    spare = folder / "0.rows.spare"
    spare.unlink()
    spare.symlink_to(outside)
    store.commit([2], rows(4), round=2)  # does not write over the spare
    for name, action in (
        ("3-3.rows.tmp", lambda: store.commit([3], rows(5), round=3)),
        ("store.json.tmp", lambda: store.snapshot(3)),
    ):
        (folder / name).symlink_to(outside)
        with pytest.raises(ResidualError, match=f"{name} is a symbolic link"):
            action()
        (folder / name).unlink()
    (folder / "1-2.rows").unlink()
    (folder / "1-2.rows").symlink_to(outside)
    with pytest.raises(ResidualError, match=r"cannot read .*1-2\.rows"):
        store.gather("residual", [1])
    store.rollback(0)  # the link becomes a spare
    assert (folder / "0.rows.spare").is_symlink()
    store.commit([1], rows(6), round=1)  # and goes, the file outside does not
    assert content(RowStore.on_disk(LAYOUTS, folder)) == {1: (1, 6.0)}


def test_a_file_that_a_backup_shares_is_not_written_over(folder: Path) -> None:
    store = RowStore.on_disk(LAYOUTS, folder, spares=1)
    store.commit([1], rows(1), round=1)
    backup = folder.with_name("backup")
    shutil.copytree(folder, backup, copy_function=os.link)
    for round in (2, 3, 4):
        store.commit([1], rows(round), round=round)
    assert content(RowStore.on_disk(LAYOUTS, backup)) == {1: (1, 1.0)}
    assert content(RowStore.on_disk(LAYOUTS, folder)) == {1: (4, 4.0)}


def test_the_folder_itself_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    RowStore.on_disk(LAYOUTS, tmp_path / "run" / "rows").commit([1], rows(1), round=1)
    assert content(RowStore.on_disk(LAYOUTS, tmp_path / "disk" / "rows")) == {1: (1, 1.0)}


# -- failures of the system --------------------------------------------------------------------------------------------


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "rows"):
        with pytest.raises(ResidualError, match=f"cannot open the folder {folder}: .*; free space or make the folder"):
            RowStore.on_disk(LAYOUTS, folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused_and_stays_readable(folder: Path) -> None:
    store = RowStore.on_disk(LAYOUTS, folder)
    store.commit([1], rows(1), round=1)
    folder.chmod(0o500)
    try:
        with pytest.raises(ResidualError, match=r"cannot write .*1-2\.rows: Permission denied"):
            store.commit([1], rows(2), round=2)
        assert content(RowStore.on_disk(LAYOUTS, folder)) == {1: (1, 1.0)}
    finally:
        folder.chmod(0o700)


def fail_at(patch: pytest.MonkeyPatch, call: str, turn: int, code: int) -> None:
    """Makes one function of `fedcams.durable` fail when it is called for the turn-th time, once its work is done."""
    turns, real = iter(range(turn - 1)), getattr(durable, call)

    def failing(*args: object) -> object:
        result = real(*args)
        if next(turns, None) is None:
            raise OSError(code, os.strerror(code))
        return result

    patch.setattr(durable, call, failing)


@pytest.mark.parametrize(
    ("call", "turn", "code"),
    [("_write_piece", 6, errno.ENOSPC), ("_sync", 2, errno.EIO), ("sync_folder", 2, errno.EIO)],
)
@pytest.mark.parametrize("spares", [0, 2])
def test_a_failure_in_the_middle_of_a_commit_leaves_all_old_rows_of_that_client(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, turn: int, code: int, spares: int
) -> None:
    """A file is written in three pieces, header and two rows, then synced, renamed, and the folder is synced."""
    store = RowStore.on_disk(LAYOUTS, folder, spares)
    store.commit([1, 2, 3], rows(1, 2, 3), round=1)
    store.snapshot(1)
    with monkeypatch.context() as patch:
        fail_at(patch, call, turn, code)
        with pytest.raises(ResidualError, match=rf"cannot write .*2-2\.rows: {os.strerror(code)}; free space"):
            store.commit([3, 2, 1], rows(30, 20, 10), round=2)
    half = {1: (2, 10.0), 2: (1, 2.0), 3: (1, 3.0)}  # ascending, the rows of each client together
    assert content(store) == content(RowStore.on_disk(LAYOUTS, folder, spares)) == half
    assert files(folder) == ["1-1.rows", "1-2.rows", "2-1.rows", "3-1.rows", "store.json"]
    store.rollback(1)
    assert content(RowStore.on_disk(LAYOUTS, folder, spares)) == {1: (1, 1.0), 2: (1, 2.0), 3: (1, 3.0)}
    store.commit([1, 2, 3], rows(10, 20, 30), round=2)  # there is space again
    assert content(RowStore.on_disk(LAYOUTS, folder, spares)) == content(store)


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to let files grow beyond this; Python ignores the signal that comes with it."""
    _, hard = soft_and_hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_and_hard)


def test_a_write_cut_short_by_the_system_leaves_the_old_rows(folder: Path) -> None:
    layouts = {"residual": Layout.flat(100_000), "control": Layout.flat(100_000)}
    store, ones = RowStore.on_disk(layouts, folder), torch.ones(1, 100_000)
    store.commit([1], {"residual": ones, "control": ones}, round=1)
    for size in (200_000, 600_000):  # in the middle of the first row, and of the second
        message = r"1-2\.rows: File too large; free space or make the folder writable"
        with largest_file(size), pytest.raises(ResidualError, match=message):
            store.commit([1], {"residual": 2 * ones, "control": 2 * ones}, round=2)
        assert files(folder) == ["1-1.rows", "store.json"]
        again = RowStore.on_disk(layouts, folder)
        assert again.round_of(1) == 1
        assert all(torch.equal(again.gather(name, [1]), ones) for name in layouts)


# -- kills -------------------------------------------------------------------------------------------------------------


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


STEPS: list[Callable[[RowStore], None]] = [
    lambda s: s.commit([1], rows(10), round=1),
    lambda s: s.commit([2], rows(21), round=2),
    lambda s: s.snapshot(2),
    lambda s: s.commit([1, 2], rows(12, 22), round=3),  # over rows that the snapshot needs
    lambda s: s.commit([1, 2], rows(13, 23), round=4),  # over rows that it does not
    lambda s: s.snapshot(4),
    lambda s: s.commit([2, 3], rows(24, 34), round=5),
    lambda s: s.rollback(4),
]


@pytest.fixture
def quick_folder(folder: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder in memory, if there is such a disk: the moments of death are calls, whatever the disk does in them."""
    if os.path.isdir(MEMORY_DISK):
        folder = Path(MEMORY_DISK, f"fedcams-{os.getpid()}-{request.node.name}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("spares", [0, 2])
def test_death_at_every_step_leaves_old_or_new(
    quick_folder: Path, monkeypatch: pytest.MonkeyPatch, spares: int
) -> None:
    folder, model = quick_folder, RowStore.in_memory(LAYOUTS)
    states = [content(model)]
    for step in STEPS:
        step(model)
        states.append(content(model))
    saved = {0: states[0], 2: states[2], 4: states[5]}
    done, moment = 0, 0
    while done < len(STEPS):
        shutil.rmtree(folder, ignore_errors=True)
        store, done = RowStore.on_disk(LAYOUTS, folder, spares), 0
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            die_at(patch, moment)
            for step in STEPS:
                step(store)
                done += 1
        before, after = states[done], states[min(done + 1, len(STEPS))]
        store = RowStore.on_disk(LAYOUTS, folder, spares)
        found = content(store)  # which also checks that the rows of a client are of the same commit
        assert all(found.get(client) in (before.get(client), after.get(client)) for client in {*before, *after, *found})
        t = store.snapshot_round or 0
        store.rollback(t)
        assert content(store) == saved[t]
        assert len([name for name in files(folder) if not name.endswith(".spare")]) == 1 + len(store.ids())
        moment += 1
    assert moment > 40  # the steps make about this many system calls


WRITERS = """
import sys, torch
from fedcams.bits.checksum import sums
from fedcams.layout import Layout
from fedcams.rows import RowStore
from forks import fork_for_each_line

sums(torch.zeros(1).numpy())  # loads the kernel

def write(folder, d=20000):
    store = RowStore.on_disk({"residual": Layout.flat(d), "control": Layout.flat(d // 2)}, folder, spares=2)
    t = store.snapshot_round or 0
    while True:
        t += 1
        clients = [c for c in range(4) if t % (c + 1) == 0]
        values = torch.tensor([c * 1000.0 + t for c in clients])[:, None]
        store.commit(clients, {"residual": values.expand(-1, d), "control": -values.expand(-1, d // 2)}, t)
        if t % 3 == 0:
            store.snapshot(t)

fork_for_each_line(write)
"""


def kill_a_writer(writers: Forked, folder: Path, after: float) -> None:
    """Starts a writer, lets it write for a while and kills it with SIGKILL."""
    child = writers.fork(str(folder))
    time.sleep(after)
    os.kill(child, 9)
    assert writers.forked_code() == -9


def check_values(store: RowStore) -> None:
    """Both rows of every client are whole, and the ones that their round says."""
    for client in store.ids():
        value = client * 1000.0 + (store.round_of(client) or 0)
        for name, sign in (("residual", 1), ("control", -1)):
            row = store.gather(name, [client])
            assert torch.equal(row, torch.full_like(row, sign * value))


def test_kill_9_leaves_old_or_new(folder: Path, forks: Forks) -> None:
    """Client c writes c * 1000 + t in every round t that c + 1 divides; every third round is a snapshot."""
    layouts = {"residual": Layout.flat(20_000), "control": Layout.flat(10_000)}
    rounds, kills = [0], 0
    with forks.start(WRITERS) as writers:
        while kills < 12 or (rounds[-1] == 0 and kills < 100):
            kills += 1
            kill_a_writer(writers, folder, after=random.uniform(0.01, 0.15))
            store = RowStore.on_disk(layouts, folder)
            check_values(store)
            store.versions()  # every header is whole
            t = store.snapshot_round or 0
            store.rollback(t)
            check_values(store)
            assert {c: store.round_of(c) or 0 for c in range(4)} == {c: t - t % (c + 1) for c in range(4)}
            assert len(files(folder)) == 1 + len(store.ids())
            rounds.append(t)
    assert rounds == sorted(rounds)
    assert rounds[-1] > 0, "no writer ever came to a snapshot"
