"""What runs and clients write: nothing outside their folders, nothing that others can read; edits are detected."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from fedcams.durable import private_folder, write_whole
from fedcams.experiment.sweep import write_leaderboard
from fedcams.flower.checkpoint import read_ledger
from fedcams.report import report
from fedcams.report.page import ReportError
from fedcams.runs import RunError, resume, run
from fedcams.simulation import RoundRecord
from flower_apps import experiment, federation, quick
from flower_apps import run as run_federation
from test_runs import lasting, small, stopped

__all__ = ["quick"]  # a fixture for these tests too


# -- links -------------------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


LINKS = ["rounds.jsonl", "environment.json.tmp", "checkpoint", "checkpoint/rows", "checkpoint/state.json.tmp"]


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("finished", [False, True], ids=["unfinished", "finished"])
def test_resume_refuses_links_and_touches_nothing_outside(tmp_path: Path, name: str, finished: bool) -> None:
    folder = tmp_path / "run"
    if finished:
        run(small(), folder)
    else:
        stopped(folder, 4)
    outside, link = tmp_path / "outside", folder / name
    if link.exists():
        link.rename(outside)
    elif name.endswith(("checkpoint", "rows")):
        outside.mkdir()
    else:
        outside.write_bytes(b"precious")
    link.symlink_to(outside)
    before = contents(tmp_path)
    with pytest.raises(RunError, match=r"is a symbolic link, and nothing outside of .* is written or deleted; remove"):
        resume(folder)
    assert contents(tmp_path) == before


def test_a_folder_may_be_reached_by_a_link_and_hold_other_links(tmp_path: Path) -> None:
    """What matters is what we write in it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    stopped(tmp_path / "run", 4)
    (tmp_path / "disk" / "notes").symlink_to(tmp_path)
    resume(tmp_path / "run")
    run(small(), tmp_path / "whole")
    assert lasting(tmp_path / "run") == lasting(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_writing_never_goes_through_a_link(tmp_path: Path, kind: str) -> None:
    precious, path, spare = tmp_path / "precious", tmp_path / "file", tmp_path / "spare"
    precious.write_bytes(b"precious")
    for name in ("file.tmp", "file", "spare"):
        if kind == "hard":
            os.link(precious, tmp_path / name)
        else:
            (tmp_path / name).symlink_to(precious)
    write_whole(path, b"new", over=spare)
    assert precious.read_bytes() == b"precious"
    assert path.read_bytes() == b"new"
    assert not path.is_symlink()


def test_a_backup_of_hard_links_stays_what_it_was(tmp_path: Path) -> None:
    """Going on in the folder changes nothing in the backup, and going on in the backup nothing in the folder."""
    folder = stopped(tmp_path / "run", 4)
    shutil.copytree(folder, tmp_path / "backup", copy_function=os.link)
    before = contents(tmp_path / "backup")
    resume(folder)
    assert contents(tmp_path / "backup") == before
    finished = contents(folder)
    resume(tmp_path / "backup")
    assert contents(folder) == finished
    assert lasting(folder) == lasting(tmp_path / "backup")


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_reports_and_leaderboards_replace_links_and_do_not_follow_them(tmp_path: Path, kind: str) -> None:
    """A report is written into the folder of its run unless you name another."""
    run(small(rounds=1), tmp_path / "run")
    out, precious = tmp_path / "run" / "report", tmp_path / "precious"
    out.mkdir()
    precious.write_bytes(b"precious")
    names = "index.html", "summary.md", "summary.csv", "rounds.csv", "leaderboard.md", "leaderboard.csv"
    for name in names:
        (os.link if kind == "hard" else os.symlink)(precious, out / name)
    report([tmp_path / "run"], out)
    write_leaderboard([], out)
    assert precious.read_bytes() == b"precious"
    assert not any((out / name).is_symlink() or b"precious" in (out / name).read_bytes() for name in names)


def test_a_linked_folder_for_a_report_is_refused(tmp_path: Path) -> None:
    run(small(rounds=1), tmp_path / "run")
    (tmp_path / "outside").mkdir()
    (tmp_path / "run" / "report").symlink_to(tmp_path / "outside")
    with pytest.raises(
        ReportError, match=r"cannot write to .*report: report is a symbolic link, which is not followed"
    ):
        report([tmp_path / "run"], tmp_path / "run" / "report")
    assert contents(tmp_path / "outside") == {}


def plant(link: Path, outside: Path) -> dict[str, bytes]:
    """Put a link to another folder in the place of one of ours; return what is there."""
    outside.mkdir()
    (outside / "precious.safetensors").write_bytes(b"precious")
    link.rename(link.with_name("before"))
    link.symlink_to(outside)
    return contents(outside)


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint/rows"])
def test_a_link_that_is_planted_during_a_run_is_refused_too(tmp_path: Path, name: str) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    before: dict[str, bytes] = {}

    def watch(record: RoundRecord, timing: dict[str, Any]) -> None:
        if record.round == 2:
            before.update(plant(folder / name, outside))

    with pytest.raises(RunError, match=r"is a symbolic link, and nothing outside of .* is written or deleted; remove"):
        run(small(), folder, checkpoint_every=1, watch=watch)
    assert contents(outside) == before != {}


@pytest.mark.parametrize("name", ["replies", "replicas"])
def test_a_link_that_is_planted_during_a_federation_is_refused_too(tmp_path: Path, name: str) -> None:
    what, outside = experiment(rounds=3, downlink="replica(blockq(bits=2))"), tmp_path / "outside"

    def fault(node: int, message: Message, reply: Message | None) -> Message | None:
        if message.metadata.group_id == "2" and not outside.exists():
            plant(tmp_path / "checkpoint" / name, outside)
        return reply

    with pytest.raises(RunError, match="is a symbolic link"):
        run_federation(*federation(tmp_path, what, fault), 3)
    assert contents(outside) == {"precious.safetensors": b"precious"}


@pytest.mark.parametrize("name", ["state.json", "ledger.jsonl", "replies", "replicas", "run.json.tmp"])
def test_a_federations_server_refuses_links_too(tmp_path: Path, name: str) -> None:
    what = experiment(rounds=2, downlink="replica(blockq(bits=2))")
    run_federation(*federation(tmp_path, what), 2)
    link, outside = tmp_path / "checkpoint" / name, tmp_path / "outside"
    if link.exists():
        link.rename(outside)
    else:
        outside.write_bytes(b"precious")
    link.symlink_to(outside)
    before = contents(tmp_path)
    with pytest.raises(RunError, match="is a symbolic link"):
        run_federation(*federation(tmp_path, what), 3)
    assert contents(tmp_path) == before


# -- who may read them -------------------------------------------------------------------------------------------------


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def modes(folder: Path) -> set[int]:
    """The modes of a folder and everything in it."""
    return {stat.S_IMODE(path.lstat().st_mode) for path in [folder, *folder.rglob("*")]}


def test_checkpoints_are_their_owners_alone(tmp_path: Path, umask: int) -> None:
    folder = stopped(tmp_path / "run", 4)
    assert modes(folder / "checkpoint") == {0o700, 0o600}
    for name in ("experiment.toml", "rounds.jsonl"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o666 & ~umask, "what describes a run may be shared"


def test_state_of_servers_and_clients_is_their_owners_alone(tmp_path: Path, umask: int) -> None:
    what = experiment(rounds=2, downlink="replica(blockq(bits=2))")
    seen = set[int]()

    def look(node: int, message: Message, reply: Message | None) -> Message | None:
        seen.update(modes(tmp_path / "all"))
        return reply

    run_federation(*federation(tmp_path / "all", what, look), 2)
    assert seen == modes(tmp_path / "all") == {0o700, 0o600}


def test_a_folder_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(0o755)
    private_folder(tmp_path / "mine")
    private_folder(tmp_path / "mine" / "a" / "b")
    assert [stat.S_IMODE((tmp_path / "mine" / name).stat().st_mode) for name in ("", "a", "a/b")] == [
        0o755,
        0o700,
        0o700,
    ]


# -- edited files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finished", [False, True], ids=["unfinished", "finished"])
def test_an_edited_line_is_noticed(tmp_path: Path, finished: bool) -> None:
    folder = tmp_path / "run"
    if finished:
        run(small(), folder)
    else:
        stopped(folder, 4)
    path = folder / "rounds.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"wire_up": ', '"wire_up": 9', 1))
    with pytest.raises(
        RunError, match=r"rounds.jsonl: changed, its lines up to round \d are not those of the checkpoint; re"
    ):
        resume(folder)
    path.write_text(text)
    resume(folder)


def test_every_changed_byte_of_a_servers_files_is_refused(tmp_path: Path) -> None:
    """With a sentence, not a traceback; the ledger is what a report is made of."""
    what = experiment(rounds=2)
    run_federation(*federation(tmp_path, what), 2)
    for name in ("run.json", "state.json", "ledger.jsonl"):
        path = tmp_path / "checkpoint" / name
        good = path.read_bytes()
        for at in range(0, len(good), max(1, len(good) // 7)):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with pytest.raises(RunError, match=rf"{name}: (damaged|changed|another run|format)"):
                run_federation(*federation(tmp_path, what), 3)
        path.write_bytes(good)
    assert len(read_ledger(tmp_path / "checkpoint")) == 2
