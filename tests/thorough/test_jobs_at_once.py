"""Several runs at once, as in `test_jobs`: workers that are killed, and a whole sweep."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from command_line import fedcams
from fedcams.runs import read_run
from forks import Forks
from test_cli import FEDCAMS
from test_jobs import (
    FILE,
    OF_MINE,
    lines_of,
)
from test_jobs import folder as folder
from test_jobs import forked_workers as forked_workers


def children(pid: int) -> list[int]:
    """The processes that any thread of a process has started."""
    return [int(child) for tasks in Path(f"/proc/{pid}/task").glob("*/children") for child in tasks.read_text().split()]


@pytest.mark.usefixtures("forked_workers")
def test_runs_at_once_are_those_in_turn_and_one_that_fails_stops_no_other(folder: Path) -> None:
    (folder / "mini.toml").write_text(FILE + OF_MINE)
    arguments = ("--import", "echoes", "run", "mini.toml", "--track", "csv", "--no-report")
    in_turn = fedcams(*arguments)
    at_once = fedcams(*arguments, "--out", "at-once", "--jobs", "2")
    for result in (in_turn, at_once):
        assert result.exit_code == 2
        assert "too fast, seed 1: diverged, " in result.stdout
        assert re.match(r"error: 1 of 4 runs failed: too fast, seed 1 \(.*\)\n$", result.stderr)
    names = ("fedavg-s1", "fedcams-sign-s1", "of-mine-s1")
    for name in names:
        assert read_run(folder / "at-once" / name).finished
        for file in ("experiment.toml", "rounds.jsonl", "partition.json"):
            assert (folder / "at-once" / name / file).read_bytes() == (folder / "runs/mini" / name / file).read_bytes()
        assert lines_of(folder / "at-once" / name / "rounds.csv") == 13
    said = [line for line in at_once.stdout.splitlines() if ": round 12/12" in line]
    assert sorted(line.partition(",")[0] for line in said) == ["FedAvg", "FedCAMS sign", "of mine"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the workers")
def test_workers_that_are_killed_or_stopped_leave_runs_that_go_on(folder: Path, forks: Forks) -> None:
    """Two runs at once: the process of one is killed, then Ctrl-C stops the other. Only their parent is forked."""
    whole = ("run", "mini.toml", "--only", "FedAvg", "--only", "FedCAMS sign", "-s", "rounds=3000")
    both = [folder / "runs/mini" / name / "rounds.jsonl" for name in ("fedavg-s1", "fedcams-sign-s1")]
    with forks.start(FEDCAMS, *whole, "--jobs", "2", "--no-report", cwd=folder) as parent:
        while parent.running() and min(map(lines_of, both)) < 20:
            time.sleep(0.01)
        workers = children(parent.pid)
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        killed = next(line for line in parent.stdout if "SIGKILL" in line)
        assert re.match(r"Fed.*, seed 1: failed, its process ended early \(SIGKILL\); run the same command", killed)
        os.kill(parent.pid, signal.SIGINT)
        done = parent.done()
    assert done.code == 130
    assert done.errors == "stopped; run the same command again to continue from the last checkpoint\n"
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert all(20 <= len(read_run(path.parent).records) < 3000 for path in both)


def test_a_run_that_fails_ends_a_sweep_at_once(folder: Path, forks: Forks) -> None:
    """The first run is refused, and those that train beside it are stopped."""
    (folder / "runs/mini/fedavg-s1").mkdir(parents=True)
    (folder / "runs/mini/fedavg-s1/rounds.jsonl").touch()
    (folder / "mini.toml").write_text(FILE.replace("9e37", "0.5"))
    done = forks.run(FEDCAMS, "sweep", "mini.toml", "-s", "rounds=3000", "--jobs", "2", cwd=folder)
    assert done.code == 2
    assert re.fullmatch(r"error: runs/mini/fedavg-s1 already holds a run .*\n", done.errors)
    assert not any(read_run(path.parent).finished for path in folder.glob("runs/mini/*/experiment.toml"))


@pytest.mark.usefixtures("forked_workers")
def test_a_sweep_at_once_ranks_what_a_sweep_in_turn_does(folder: Path) -> None:
    text = FILE.replace('"fedavg(lr=9e37)"', '"fedavg(lr={lr})"\ngrid = { lr = [1, 9e37] }')
    (folder / "mini.toml").write_text(text.partition('[[run]]\nlabel = "FedCAMS sign"')[0])
    for more in ((), ("--jobs", "2", "--out", "at-once")):
        assert fedcams("sweep", "mini.toml", *more).exit_code == 0
    for file in ("leaderboard.md", "leaderboard.csv"):
        assert (folder / "at-once" / file).read_bytes() == (folder / "runs/mini" / file).read_bytes()
    assert "diverged" in (folder / "at-once/leaderboard.md").read_text()
