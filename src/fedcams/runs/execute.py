"""Running an experiment in a folder of its own, and going on after it was stopped."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedcams.errors import SpecError, UpdateError
from fedcams.experiment import Built, Experiment, build
from fedcams.rounds import ServerState
from fedcams.runs.checkpoint import Checkpoints, is_last
from fedcams.runs.environment import environment, peak_device_memory, peak_memory
from fedcams.runs.files import Lines, disk_errors, end_of, locked, write_file
from fedcams.runs.folder import (
    CHECKPOINT,
    ENVIRONMENT,
    EXPERIMENT,
    PARTITION,
    ROUNDS,
    TIMINGS,
    Run,
    RunError,
    read_experiment,
    read_object,
    read_run,
)
from fedcams.simulation import Phases, RoundRecord

Watch = Callable[[RoundRecord, dict[str, Any]], None]
"""Called after every round with its record and its timing; what it raises stops the run."""


def run(
    experiment: Experiment,
    folder: Path,
    *,
    data: Path | None = None,
    device: str | torch.device = "cpu",
    checkpoint_every: int = 25,
    watch: Watch | None = None,
) -> Run:
    """Runs an experiment in a new folder; stopped by whatever, it can be resumed there.

    `data` is the folder of downloaded files; a checkpoint is written every `checkpoint_every` rounds and at the end.
    """
    folder, loop = Path(folder), _Loop(device, checkpoint_every, watch)
    _refuse_taken(folder)
    built = build(experiment, data, device)  # first: what cannot be built leaves no folder behind
    with disk_errors("make", folder, "free space, or name a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        _refuse_taken(folder)  # once more, should another process have been faster
        write_file(folder / ENVIRONMENT, _json(environment(device, built.simulation.engine)))
        write_file(folder / PARTITION, _json({"histogram": built.histogram.tolist()}))
        write_file(folder / EXPERIMENT, experiment.to_toml().encode())
        return loop.go(folder, experiment, built)


def resume(
    folder: Path,
    *,
    data: Path | None = None,
    device: str | torch.device = "cpu",
    checkpoint_every: int = 25,
    watch: Watch | None = None,
) -> Run:
    """Goes on from the last checkpoint, or from the beginning; a finished run is returned as it is.

    On the same machine the records become, byte for byte, those of a run that was never stopped.
    """
    folder, loop = Path(folder), _Loop(device, checkpoint_every, watch)
    experiment = read_experiment(folder)
    with locked(folder):
        if _is_finished(folder, experiment):
            return read_run(folder)
        return loop.go(folder, experiment, build(experiment, data, device))


@dataclass(frozen=True)
class _Loop:
    """How rounds are run, as the caller wants it."""

    device: str | torch.device
    checkpoint_every: int
    watch: Watch | None

    def __post_init__(self) -> None:
        if self.checkpoint_every < 1:
            raise SpecError(f"checkpoint_every={self.checkpoint_every}; allowed: 1 or more")

    def go(self, folder: Path, experiment: Experiment, built: Built) -> Run:
        """From the checkpoint, where there is one, to the last round."""
        checkpoints = Checkpoints(folder / CHECKPOINT, experiment, built.simulation)
        state = checkpoints.load(built.state)
        _note_environment(folder / ENVIRONMENT, state.round, environment(self.device, built.simulation.engine))
        with (
            contextlib.closing(Lines(folder / ROUNDS, keep=state.round)) as rounds,
            contextlib.closing(Lines(folder / TIMINGS, keep=state.round)) as timings,
        ):
            while state.round < experiment.rounds:
                state, record, timing = self._round(built, state)
                rounds.append(_line(record))
                timings.append(json.dumps(timing))
                if state.round % self.checkpoint_every == 0 or state.round == experiment.rounds:
                    rounds.sync()  # first: the lines of a checkpoint must be there whenever it is
                    timings.sync()
                    checkpoints.save(state)
                if self.watch is not None:
                    self.watch(record, timing)
        return read_run(folder)

    def _round(self, built: Built, state: ServerState) -> tuple[ServerState, RoundRecord, dict[str, Any]]:
        phases, started = Phases(), time.perf_counter()
        state, record = built.simulation.advance(state, phases)
        timing = {
            "round": state.round,
            "seconds": round(time.perf_counter() - started, 6),
            "phases": {name: round(seconds, 6) for name, seconds in phases.seconds.items()},
            "peak_memory": peak_memory(),
            "peak_device_memory": peak_device_memory(self.device),
        }
        return state, record, timing


def _refuse_taken(folder: Path) -> None:
    for name in (EXPERIMENT, ROUNDS, CHECKPOINT):
        if (folder / name).exists():
            raise RunError(f"{folder} already holds a run ({name} is there); resume it, or name another folder")


def _is_finished(folder: Path, experiment: Experiment) -> bool:
    """Whether the last round was saved; the checkpoint of a finished run may have been deleted to save space."""
    if not (folder / CHECKPOINT).exists():
        return read_run(folder).finished
    if not is_last(folder / CHECKPOINT, experiment):
        return False
    end_of(folder / ROUNDS, experiment.rounds)  # refuses where one of the lines was lost since
    return True


def _note_environment(path: Path, round: int, now: dict[str, Any]) -> None:
    """Adds where the run goes on, and from which round, if that is not where it was before."""
    known = read_object(path)
    first = {key: value for key, value in known.items() if key != "resumed"}
    sittings: list[dict[str, Any]] = known.get("resumed", [])
    last = {key: value for key, value in (sittings[-1] if sittings else first).items() if key != "round"}
    if last != now:
        write_file(path, _json({**first, "resumed": [*sittings, {"round": round, **now}]}))


def _line(record: RoundRecord) -> str:
    """The record's line; JSON has no infinity, and a run that came to it is of no use."""
    bad = {key: value for key, value in vars(record).items() if isinstance(value, float) and not math.isfinite(value)}
    if bad:
        found = ", ".join(f"{key} is {value}" for key, value in bad.items())
        raise UpdateError(f"round {record.round}: {found}; lower the learning rates or clip")
    return record.to_json()


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, indent=1).encode() + b"\n"
