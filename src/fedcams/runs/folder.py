"""A run's folder: what it holds, and how it is read back.

experiment.toml   everything that defines the run; written last when a run is made, so its presence makes the run
rounds.jsonl      one RoundRecord a line, no clock in it: two runs can be compared byte for byte
timings.jsonl     one object a line: round, seconds, phases (seconds each), peak_memory, peak_device_memory (bytes)
environment.json  versions, machine, device, commit; under "resumed" those of later sittings where they differ
partition.json    {"histogram": [[examples of client i with label j]]}
python.json       only of a run that was started from Python: the call, and what it must agree with to go on
stopped.json      only of a run that was stopped early on purpose: the round and why; it counts as finished
checkpoint/       where the run can go on; may be deleted once the run is finished
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcams.durable import os_errors
from fedcams.errors import FedcamsError
from fedcams.experiment import Experiment
from fedcams.simulation import RoundRecord

EXPERIMENT, ROUNDS, TIMINGS = "experiment.toml", "rounds.jsonl", "timings.jsonl"
ENVIRONMENT, PARTITION, CHECKPOINT = "environment.json", "partition.json", "checkpoint"
PYTHON, STOPPED = "python.json", "stopped.json"


class RunError(FedcamsError):
    """A run's folder that is missing, damaged or cannot be written."""


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it."""

    path: Path
    experiment: Experiment
    records: list[RoundRecord]
    timings: list[dict[str, Any]]
    environment: dict[str, Any]
    histogram: list[list[int]]
    stopped: int | None = None
    """The round after which the run was stopped early on purpose."""

    @property
    def finished(self) -> bool:
        """Whether all rounds are there, or the run was stopped early on purpose."""
        return len(self.records) == self.experiment.rounds or len(self.records) == self.stopped


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run."""
    return (path / EXPERIMENT).is_file()


def read_run(path: Path) -> Run:
    """Return everything about the run in a folder; what an unfinished run lacks is empty."""
    return Run(
        path,
        read_experiment(path),
        _records(path / ROUNDS),
        _lines(path / TIMINGS),
        read_object(path / ENVIRONMENT),
        read_object(path / PARTITION).get("histogram", []),
        read_object(path / STOPPED).get("round"),
    )


def read_call(path: Path) -> str:
    """Return the call that started a run from Python; empty for a run of the command line."""
    return str(read_object(path / PYTHON).get("call", ""))


def read_experiment(path: Path) -> Experiment:
    """Return the experiment of the run in a folder; refuses a folder without one."""
    if not is_run(path):
        raise RunError(f"{path} holds no run: {EXPERIMENT} is missing; name the folder that a run was written to")
    return Experiment.read(path / EXPERIMENT)


def read_object(path: Path, fix: str = "delete it") -> dict[str, Any]:
    """Return a JSON object; empty if there is no file. Refuses a damaged one, and says the fix."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(_read(path)))
    except (TypeError, ValueError) as error:
        raise RunError(f"{path}: damaged ({error}); {fix}") from None


def _records(path: Path) -> list[RoundRecord]:
    try:
        return [RoundRecord.from_dict(line) for line in _lines(path)]
    except (TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, error) from None


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; one that was cut short by a kill ends it."""
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in _read(path).split(b"\n")[:-1]]
    except ValueError as error:
        raise _damaged(path, error) from None


def _read(path: Path) -> bytes:
    with os_errors(RunError, "read", path, "make it a file that can be read"):
        return path.read_bytes()


def _damaged(path: Path, error: Exception) -> RunError:
    return RunError(f"{path}: damaged ({error}); resume the run, or delete its folder and start it again")
