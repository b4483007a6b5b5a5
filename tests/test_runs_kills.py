"""Runs that are killed at every step of a checkpoint, by kill -9 or a full disk; and damaged checkpoints."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcams import durable
from fedcams.durable import sealed
from fedcams.experiment import Experiment
from fedcams.runs import Run, RunError, is_run, read_run, resume, run
from forks import Forks
from test_runs import (
    EVERYTHING,
    Stop,
    _digits_once,  # noqa: F401  (a fixture)
    _quick_sync,  # noqa: F401  (a fixture)
    everything,
    lasting,
    small,
    stop_at,
    stopped,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


# -- death at every moment ---------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: nothing the run does may follow."""


SYNCS = ("fsync", "fdatasync")
CALLS = (*SYNCS, "replace", "unlink", "ftruncate", "mkdir", "rmdir", "write")


def die_at(patch: pytest.MonkeyPatch, moment: int) -> Callable[[], bool]:
    """The process is dead before its moment-th change of the disk and in every one after; tells whether it died."""
    calls, dead = iter(range(moment)), False

    def mortal(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal dead
            if next(calls, None) is not None:
                return call(*args, **kwargs)
            if name == "write" and not dead:
                call(args[0], args[1][: len(args[1]) // 2])  # the line is half there
            dead = True
            raise Killed

        return called

    for name in CALLS:
        patch.setattr(os, name, mortal(name, getattr(os, name)))
    return lambda: dead


def go_on(experiment: Experiment, folder: Path) -> Run:
    return resume(folder, checkpoint_every=2) if is_run(folder) else run(experiment, folder, checkpoint_every=2)


def dies(experiment: Experiment, folder: Path, moment: int) -> bool:
    """Goes on until that moment; tells whether it came before the end of the run."""
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        has_died = die_at(patch, moment)
        go_on(experiment, folder)
    return has_died()


ALL_PARTS = {**EVERYTHING, "downlink": "replica(blockq)"}
MEASURED = {
    "task": "quadratic(dim=6, groups=3, size=4)", "model": "point", "partition": "natural", "theory_every": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "every"),
    [
        pytest.param({}, 1, id="FedCAMS", marks=pytest.mark.slow),
        pytest.param(ALL_PARTS, 21, id="everything"),
        pytest.param(MEASURED, 13, id="measured constants"),
        pytest.param(ALL_PARTS, 1, id="everything, at every moment", marks=pytest.mark.slow),
    ],
)
def test_death_at_every_step_and_again_while_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any], every: int
) -> None:
    check_deaths(tmp_path, monkeypatch, kind, every)


def check_deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any], every: int) -> None:
    """Die at every so many changes of the disk, again while resuming, and end as a run that never died."""
    for name in SYNCS:
        monkeypatch.setattr(os, name, lambda descriptor: None)  # it is the process that dies here, not the machine
    # Started hundreds of times, so it trains little and neither tries engines nor evaluates before its end.
    local = {"local": "sgd(lr=warmup(2, constant(0.1)), steps=1, batch=4)"}
    experiment = small(**{**kind, **local, "rounds": 5, "clients": 3, "engine": "loop", "evaluate_every": 5})
    run(experiment, tmp_path / "whole")
    folder, whole, moment = tmp_path / "run", lasting(tmp_path / "whole"), 0
    while dies(experiment, folder, moment):
        dies(experiment, folder, 7 * moment % 31)
        go_on(experiment, folder)
        assert lasting(folder) == whole, f"died at moment {moment}"
        shutil.rmtree(folder)
        moment += every
    assert moment > 100  # the run makes about this many changes to the disk


# -- kill -9 -----------------------------------------------------------------------------------------------------------

# Runs each once undisturbed, then once more for each name it reads, each time in a separate process.
RUNNERS = """
import sys, torch
from pathlib import Path

import fedcams
from fedcams.experiment import Experiment
from fedcams.runs import is_run, resume, run
from fedcams.tasks import task
from forks import fork_for_each_line

folder = Path(sys.argv[1])
experiment, loaded = Experiment.read(folder / "experiment.toml"), task("digits").load()
clients = [(loaded.train_x[i::6], loaded.train_y[i::6]) for i in range(6)]
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))

def command_line(out):
    if is_run(out):
        resume(out, checkpoint_every=2)
    else:
        run(experiment, out, checkpoint_every=2)

def own(out):
    fedcams.simulate(model, clients, (loaded.test_x, loaded.test_y), method=experiment.method, cohort=2, rounds=30,
                     out=out, prepare=lambda x: x.float() / 16, checkpoint_every=2, engine=experiment.engine,
                     theory_every=experiment.theory_every).run()

kinds = {"command line": command_line, "own": own}
for name, go_on in kinds.items():
    go_on(folder / name / "whole")
fork_for_each_line(lambda name: kinds[name](folder / name / "run"))
"""


def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, f"{path} never came to {count} lines"
        time.sleep(0.001)


@pytest.mark.skipif(torch.cuda.is_available(), reason="where torch has CUDA, a forked process cannot train")
def test_kill_9_at_any_moment_and_resumed_is_never_killed(tmp_path: Path, forks: Forks) -> None:
    """Runs by `fedcams run` and by `simulate(out=...)`."""
    kind = {**EVERYTHING, "local": "sgd(lr=warmup(2, constant(0.1)), steps=2, batch=64)", "theory_every": 10}
    (tmp_path / "experiment.toml").write_text(small(**kind, rounds=30).to_toml())
    with forks.start(RUNNERS, tmp_path) as runners:
        for kind, lines in itertools.product(("command line", "own"), (0, 1, 5, 9, 13)):
            child = runners.fork(kind)
            wait_for_lines(tmp_path / kind / "run" / "rounds.jsonl", lines)
            time.sleep(random.uniform(0, 0.03))
            os.kill(child, 9)
            assert runners.forked_code() == -9
        for kind in ("command line", "own"):
            runners.fork(kind)
            assert runners.forked_code() == 0
    for folder in (tmp_path / "command line", tmp_path / "own"):
        found, whole = lasting(folder / "run"), lasting(folder / "whole")  # rounds, the model, the optimizer's state
        found.pop("python.json", None), whole.pop("python.json", None)  # the call names the folder
        assert found == whole
        assert "theory.jsonl" in found
        assert (folder / "run" / "checkpoint" / "30.safetensors").exists()
        assert read_run(folder / "run").finished


# -- a full disk -------------------------------------------------------------------------------------------------------

# A row has 10 kB, the tensors of a checkpoint 40 kB, a line 0.4 kB. All in one process, which reads the commit once,
# whoever commits meanwhile.
LIMITS = {8_000: (r"rows/\d-\d.rows", 6), 30_000: (r"6\.safetensors", 6), 1_500: (r"(rounds|timings)\.jsonl", 4)}
LIMITED = """
import os, resource, signal, sys
from pathlib import Path
from fedcams.experiment import Experiment
from fedcams.runs import RunError, read_run, resume, run

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
os.fsync = os.fdatasync = lambda descriptor: None
folder = Path(sys.argv[1])
experiment = Experiment.read(folder / "experiment.toml")

def limit_at_round_4(limit):
    def watch(record, timing):
        if record.round == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
    return watch

run(experiment, folder / "whole")
for limit in sys.argv[2:]:
    try:
        run(experiment, folder / limit, checkpoint_every=3, watch=limit_at_round_4(limit))
    except RunError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(len(read_run(folder / limit).records), error)
        resume(folder / limit)  # there is space again
"""


def test_a_write_cut_short_by_the_system_leaves_the_last_checkpoint(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "experiment.toml").write_text(small(model="mlp(hidden=32)").to_toml())
    done = forks.run(LIMITED, tmp_path, *LIMITS)
    for (limit, (name, lines)), said in zip(LIMITS.items(), done.output.splitlines(), strict=True):
        full = rf"{lines} .*cannot write .*{name}: File too large; free space or make the folder"
        assert re.match(full, said), (said, done.errors)
        assert lasting(tmp_path / str(limit)) == lasting(tmp_path / "whole")


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no /proc")
@pytest.mark.parametrize("name", ["6.safetensors.tmp", "state.json.tmp", "rows/store.json.tmp"])
def test_no_space_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    run(small(), tmp_path / "whole")
    folder = stopped(tmp_path / "run", 4)
    write = durable._write_piece

    def full(file: io.FileIO, piece: memoryview) -> int:
        if os.readlink(f"/proc/self/fd/{file.fileno()}").endswith(f"checkpoint/{name}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, piece)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "_write_piece", full)
        said = f"cannot write .*/{re.escape(name.removesuffix('.tmp'))}: No space left on device; free space"
        with pytest.raises(RunError, match=said):
            resume(folder, checkpoint_every=3)
    resume(folder)
    assert lasting(folder) == lasting(tmp_path / "whole")


# -- damage ------------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def other_experiment(folder: Path) -> None:
    (folder / "experiment.toml").write_text(small(seed=2, rounds=9).to_toml())


def end_before_the_checkpoint(folder: Path) -> None:
    (folder / "experiment.toml").write_text(small(rounds=2).to_toml())


def other_checkpoint(folder: Path) -> None:
    other = stopped(folder.with_name("other"), 5, small(model="mlp(hidden=9)"))
    shutil.rmtree(folder / "checkpoint")
    shutil.copytree(other / "checkpoint", folder / "checkpoint")


def a_row(folder: Path) -> Path:
    return min((folder / "checkpoint" / "rows").glob("*.rows"))


ANEW = r"restore it, or delete .*/run/checkpoint and resume to run from the first round"
DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    (r"state\.json: damaged", lambda f: flip(f / "checkpoint" / "state.json", 30)),
    (r"state\.json: damaged", lambda f: cut(f / "checkpoint" / "state.json", 1)),
    (r"state\.json: damaged", lambda f: (f / "checkpoint" / "state.json").write_text("")),
    (r"state\.json: damaged", lambda f: (f / "checkpoint" / "state.json").write_text("[1]")),
    (r"3\.safetensors: damaged", lambda f: flip(f / "checkpoint" / "3.safetensors", -1)),
    (r"3\.safetensors: damaged", lambda f: flip(f / "checkpoint" / "3.safetensors", 20)),
    (r"3\.safetensors: damaged", lambda f: cut(f / "checkpoint" / "3.safetensors", 4)),
    (r"cannot read .*/3\.safetensors: No such file", lambda f: (f / "checkpoint" / "3.safetensors").unlink()),
    (r"rows: damaged \(.*checksum", lambda f: flip(a_row(f), -1)),
    (r"rows: damaged \(.*truncated", lambda f: cut(a_row(f), 4)),
    (r"rows: damaged \(.*the rows of client \d are missing", lambda f: a_row(f).unlink()),
    (r"rows: damaged \(.*the rows of client \d are missing", lambda f: shutil.rmtree(f / "checkpoint" / "rows")),
    (r"another run: seed is 1 there and 2 here", other_experiment),
    (r"its checkpoint is of round 3, after rounds=2", end_before_the_checkpoint),
    (r"another run: model is 'mlp\(hidden=9\)' there and 'mlp\(hidden=8\)' here", other_checkpoint),
]


@pytest.mark.parametrize(("message", "spoil"), DAMAGE, ids=[message for message, _ in DAMAGE])
def test_a_damaged_or_foreign_checkpoint_is_refused(
    folder: Path,
    message: str,
    spoil: Callable[[Path], object],
) -> None:
    spoil(stopped(folder, 5))
    lines = everything(folder)
    with pytest.raises(RunError, match=f"{message}.*; ({ANEW}|.*{ANEW})"):
        resume(folder)
    changed = {path for path, held in everything(folder).items() if lines.get(path) != held}
    assert all("/rows" in path for path in changed)  # opening a store may tidy up in it
    experiment = Experiment.read(folder / "experiment.toml")
    shutil.rmtree(folder / "checkpoint")  # as the message says
    assert len(resume(folder).records) == experiment.rounds


def test_a_checkpoint_of_the_version_before_is_refused_by_the_name_of_the_last_that_reads_it(folder: Path) -> None:
    path = stopped(folder, 5) / "checkpoint" / "state.json"
    held = {"round": 3, "experiment": {"rounds": 7}, "layouts": ["00" * 8, None], "tensors": 1, "residuals": []}
    path.write_bytes(sealed({"fedcams_checkpoint": 1, **held}))
    with pytest.raises(
        RunError, match=rf"written by fedcams 0\.1; version 0\.1\.0 is the last one that reads it; {ANEW}"
    ):
        resume(folder)
    path.write_bytes(sealed({"fedcams_checkpoint": 3, **held}))
    with pytest.raises(RunError, match=rf"format 3, this fedcams reads 2; {ANEW}"):
        resume(folder)
    shutil.rmtree(path.parent)  # as the message says
    assert resume(folder).finished


def test_a_model_that_has_changed_under_its_experiment_is_refused(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped(folder, 5)
    other = small(model="mlp(hidden=9)").model
    build = type(other).build
    monkeypatch.setattr(type(other), "build", lambda self, *args: build(other, *args))
    with pytest.raises(RunError, match=rf"another model: layouts are \['.*there and \['.* here; {ANEW}"):
        resume(folder)


def test_a_snapshot_newer_than_the_checkpoint_is_refused(folder: Path) -> None:
    """As if an old state.json had been restored over a new one."""
    stopped(folder, 4)
    old = shutil.copytree(folder / "checkpoint", folder.with_name("old"))
    with pytest.raises(Stop):
        resume(folder, checkpoint_every=1, watch=stop_at(5))
    for name in ("state.json", "3.safetensors"):
        shutil.copy(old / name, folder / "checkpoint" / name)
    with pytest.raises(
        RunError, match=rf"rows: damaged \(.*the rows of client \d are of round 5 instead of \d.*{ANEW}"
    ):
        resume(folder)


def test_lines_short_of_the_checkpoint_are_refused(folder: Path) -> None:
    rounds = stopped(folder, 5) / "rounds.jsonl"
    lines = rounds.read_bytes().splitlines(keepends=True)
    for kept, wrong in ((lines[:2], 3), ([lines[0], lines[2], lines[1]], 2), ([b"x\n", *lines[1:]], 1)):
        rounds.write_bytes(b"".join(kept))
        with pytest.raises(
            RunError, match=f"line {wrong} is not that of round {wrong}, but the checkpoint is of round 3"
        ):
            resume(folder)
    rounds.write_bytes(b"".join(lines))
    assert resume(folder).finished
