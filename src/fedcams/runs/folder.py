"""A run's folder: what it holds, and how it is read back.

experiment.toml   everything that defines the run
rounds.jsonl      one RoundRecord a line, no clock in it: two runs can be compared byte for byte
timings.jsonl     one object a line: round, seconds, seconds by phase, peak memory
environment.json  versions, device, commit
partition.json    {"histogram": [[examples of client i with label j]]}
checkpoint/       where the run can go on
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcams.errors import FedcamsError
from fedcams.experiment import Experiment
from fedcams.simulation import RoundRecord

EXPERIMENT, ROUNDS, TIMINGS = "experiment.toml", "rounds.jsonl", "timings.jsonl"
ENVIRONMENT, PARTITION, CHECKPOINT = "environment.json", "partition.json", "checkpoint"


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


def is_run(path: Path) -> bool:
    """Whether a folder holds a run."""
    return (path / EXPERIMENT).is_file()


def read_run(path: Path) -> Run:
    """Everything about a run; what a run that was not finished lacks is empty."""
    if not is_run(path):
        raise RunError(f"{path} holds no run: {EXPERIMENT} is missing; name the folder that a run was written to")
    return Run(
        path,
        Experiment.read(path / EXPERIMENT),
        [RoundRecord(**line) for line in _lines(path / ROUNDS)],
        _lines(path / TIMINGS),
        _object(path / ENVIRONMENT),
        _object(path / PARTITION).get("histogram", []),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; one that was cut short by a kill ends it."""
    if not path.exists():
        return []
    whole = path.read_text().split("\n")[:-1]
    try:
        return [json.loads(line) for line in whole]
    except json.JSONDecodeError as error:
        raise RunError(f"{path}: damaged ({error}); resume the run, or delete its folder and start it anew") from None


def _object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (json.JSONDecodeError, TypeError, ValueError) as error:
        raise RunError(f"{path}: damaged ({error}); delete it") from None
