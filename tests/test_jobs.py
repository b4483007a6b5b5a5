"""`fedcams run --jobs 2`: several runs at once give the same folders as one run after the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from fedcams.cli import jobs, worker
from fedcams.cli.jobs import Worker, carry_out_at_once, threads_each
from fedcams.cli.progress import Progress
from fedcams.cli.session import Settings
from fedcams.experiment import Experiment
from fedcams.runs import RunError
from forked_commands import forked_commands
from forks import Forks
from own_pieces import forgotten

FILE = """
task = "logistic(size=40)"
model = "mlp(hidden=8)"
clients = 4
sampler = "full"
rounds = 12

[[run]]
label = "FedAvg"
server = "fedavg"

[[run]]
label = "too fast"
server = "fedavg(lr=9e37)"

[[run]]
label = "FedCAMS sign"
uplink = "sign"
"""
OF_MINE = """
[[run]]
label = "of mine"
uplink = "echo"
"""
OWN = """
from dataclasses import dataclass

from fedcams.compress.identity import Identity
from fedcams.registry import register


@register("echo")
@dataclass(frozen=True)
class Echo(Identity):
    print("what a module prints does not come between the lines of a worker")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mini.toml").write_text(FILE)
    (tmp_path / "echoes.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with forgotten("echoes"):
        yield tmp_path


@pytest.fixture
def forked_workers(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests in which no worker is killed: its process need not import torch, unless it could not train then."""
    with forked_commands(forks, {"python": Path(worker.__file__)}) as commands:
        if not torch.cuda.is_available():
            monkeypatch.setattr(sys, "executable", str(commands / "python"))
        yield


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_cores_are_divided() -> None:
    assert threads_each(10**6) == 1
    assert threads_each(1) == os.cpu_count()


def test_a_worker_that_cannot_start_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    worker = Worker(Settings(), threads=1)
    with pytest.raises(RunError, match="its process ended early \\(exit code 1\\)"):
        worker.carry_out(Experiment(), folder / "x", Progress(quiet=True))
    worker.close()


def test_an_error_of_the_screen_stops_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed pipe, for example; its worker is in the middle of a run, and must not be given another one."""
    stopped = Event()

    class Busy:
        def __init__(self, *_: Any) -> None:
            self.is_alive = True

        def carry_out(self, experiment: Experiment, folder: Path, screen: Progress) -> None:
            if experiment.seed == 2:
                raise BrokenPipeError
            assert stopped.wait(5), "this run goes on"
            raise RunError("stopped")

        def stop(self, by: Any = None) -> None:
            stopped.set()

        def close(self) -> None:
            pass

    monkeypatch.setattr(jobs, "Worker", Busy)
    tasks = {tmp_path / str(seed): Experiment(seed=seed) for seed in (1, 2, 3)}
    with pytest.raises(BrokenPipeError):
        list(carry_out_at_once(tasks, Settings(), 2, Progress(quiet=True)))
