"""Run an experiment in its own folder, and resume it after a stop."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedcams.durable import OWNER_ONLY
from fedcams.errors import SpecError, UpdateError
from fedcams.experiment import Built, Experiment, build
from fedcams.rounds import ServerState
from fedcams.rows import SavedRows
from fedcams.runs.checkpoint import REPLICAS, ROWS, Checkpoint, clear_after_last, read_state, start_over
from fedcams.runs.environment import environment, peak_device_memory, peak_memory
from fedcams.runs.files import EVERYONE, Lines, disk_errors, end_of, locked, write_file, write_public
from fedcams.runs.folder import (
    CHECKPOINT,
    ENVIRONMENT,
    EXPERIMENT,
    PARTITION,
    PRIVATE,
    ROUNDS,
    TIMINGS,
    Run,
    RunError,
    private_note,
    read_call,
    read_experiment,
    read_object,
    read_run,
)
from fedcams.simulation import Phases, RoundRecord, Simulation

if TYPE_CHECKING:
    import torch

Watch = Callable[[RoundRecord, dict[str, Any]], None]
"""Called after every round with its record and its timing; an exception stops the run."""


def run(
    experiment: Experiment,
    folder: Path,
    *,
    data: Path | None = None,
    device: str | torch.device = "cpu",
    checkpoint_every: int = 25,
    watch: Watch | None = None,
    keep_rows: bool = False,
) -> Run:
    """Run an experiment in a new folder and return the finished run; however it stops, `resume` continues it there.

    `data` is the folder of downloaded files. A checkpoint is written every `checkpoint_every` rounds and at the end;
    the last has what clients keep only if `keep_rows`, which `extend` needs. Refuses a folder that already holds a run.
    """
    folder = Path(folder)
    check_interval(checkpoint_every)
    refuse_taken(folder)
    built = build(experiment, data, device)  # first, so that an experiment that cannot be built leaves no folder behind
    make_folder(folder)
    with locked(folder):
        refuse_taken(folder)  # again, in case another process was faster
        write_about(folder, experiment, device, built.simulation, built.histogram.tolist())
        return _finish(folder, experiment, built, device, checkpoint_every, watch, keep_rows)


def resume(
    folder: Path,
    *,
    data: Path | None = None,
    device: str | torch.device = "cpu",
    checkpoint_every: int = 25,
    watch: Watch | None = None,
    keep_rows: bool = False,
) -> Run:
    """Continue a run from its last checkpoint, or from its start, and return it; a finished run is returned unchanged.

    On the same machine, the records are equal, byte for byte, to those of a run that was never stopped. Refuses a run
    that was started from Python, unless it is finished, because only Python has its model and data.
    """
    folder = Path(folder)
    check_interval(checkpoint_every)
    experiment = read_experiment(folder)
    with locked(folder):
        if call := read_call(folder):
            if (found := read_run(folder)).finished:
                return found
            raise RunError(f"{folder}: this run was started from Python, which has its model and data; call {call}")
        if _is_finished(folder, experiment):
            return read_run(folder)
        built = build(experiment, data, device)
        return _finish(folder, experiment, built, device, checkpoint_every, watch, keep_rows)


def _finish(
    folder: Path,
    experiment: Experiment,
    built: Built,
    device: str | torch.device,
    every: int,
    watch: Watch | None,
    keep_rows: bool,
) -> Run:
    """Run all rounds that are left."""
    journal = Journal(
        folder, built.simulation, identity(experiment), experiment.rounds, device, every, may_grow=keep_rows
    )
    steps = journal.rounds(journal.load(built.state))
    for step in steps:
        try:
            if watch is not None:
                watch(step.record, step.timing)
        except BaseException as error:
            steps.throw(error)  # end the rounds now, while the folder is locked, not when they are garbage-collected
    return read_run(folder)


def identity(experiment: Experiment) -> dict[str, Any]:
    """Return the values that must be equal for a run to continue, with its length only if a schedule follows it."""
    values = experiment.to_dict()
    return {key: value for key, value in values.items() if key != "rounds" or experiment.depends_on_rounds}


class Step(NamedTuple):
    """One finished round, whose record is in the folder."""

    state: ServerState
    record: RoundRecord
    timing: dict[str, Any]


@dataclass(frozen=True)
class Journal:
    """Runs rounds and writes their records, timings and checkpoints to a folder, which the caller has locked."""

    folder: Path
    simulation: Simulation
    identity: dict[str, Any]
    """The values that must be equal for the run to continue from a checkpoint."""
    last: int
    """The number of rounds."""
    device: str | torch.device
    checkpoint_every: int = 25
    may_grow: bool = False
    """Whether the run may get more rounds later, so that even its last checkpoint needs rows."""

    @functools.cached_property
    def checkpoint(self) -> Checkpoint:
        """The run's checkpoint."""
        folder, stores = self.folder / CHECKPOINT, {ROWS: self.simulation.client.rows}
        stores[REPLICAS] = self.simulation.server.replicas
        rows = {name: SavedRows(store, folder / name) for name, store in stores.items() if store is not None}
        return Checkpoint(folder, self.simulation.server, self.identity, rows)

    def load(self, start: ServerState) -> ServerState:
        """Return the state of the checkpoint with its rows, or `start` if there is none."""
        return self.checkpoint.load(start)

    def rounds(self, state: ServerState) -> Generator[Step]:
        """Run the rounds after the loaded state; each is in the folder by the time it is yielded.

        If the caller stops early, a checkpoint of its last round is written.
        """
        saved = state.round
        _note_environment(
            self.folder / ENVIRONMENT,
            saved,
            environment(self.device, self.simulation.engine, self.simulation.why_engine),
        )
        with (
            contextlib.closing(Lines(self.folder / ROUNDS, saved, self.checkpoint.lines, self._mode)) as lines,
            contextlib.closing(Lines(self.folder / TIMINGS, saved, mode=self._mode)) as timings,
        ):

            def save() -> int:
                lines.sync()  # first: a checkpoint on disk must never be without its lines
                timings.sync()
                self.checkpoint.save(state, lines.digest, last=state.round == self.last and not self.may_grow)
                return state.round

            while state.round < self.last:
                step = self._round(state)
                state = step.state
                lines.append(_line(step.record))
                timings.append(json.dumps(step.timing))
                if state.round % self._every == 0 or state.round == self.last:
                    saved = save()
                try:
                    yield step
                except GeneratorExit:
                    if saved != state.round:
                        save()
                    raise

    @property
    def _every(self) -> int:
        """Rounds between checkpoints; with privacy 1, because a round must be durable before its model is seen."""
        return 1 if self.simulation.server.method.privacy.active else self.checkpoint_every

    @property
    def _mode(self) -> int:
        """Who may read the lines: with privacy their owner alone, since losses and norms are not covered by ε."""
        return OWNER_ONLY if self.simulation.server.method.privacy.active else EVERYONE

    def _round(self, state: ServerState) -> Step:
        phases, started = Phases(), time.perf_counter()
        state, record = self.simulation.advance(state, phases)
        timing = {
            "round": state.round,
            "seconds": round(time.perf_counter() - started, 6),
            "phases": {name: round(seconds, 6) for name, seconds in phases.seconds.items()},
            "peak_memory": peak_memory(),
            "peak_device_memory": peak_device_memory(self.device),
        }
        return Step(state, record, timing)


def check_interval(checkpoint_every: int) -> None:
    """Refuse fewer than one round between checkpoints."""
    if checkpoint_every < 1:
        raise SpecError(f"checkpoint_every={checkpoint_every}; allowed: 1 or more")


def make_folder(folder: Path) -> None:
    """Create the folder of a run."""
    with disk_errors("make", folder, "free space, or name a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)


def write_about(
    folder: Path,
    experiment: Experiment,
    device: str | torch.device,
    simulation: Simulation,
    histogram: list[list[int]],
) -> None:
    """Write the description of a new run; the experiment comes last, because a folder with it counts as a run."""
    write_public(folder / ENVIRONMENT, to_json(environment(device, simulation.engine, simulation.why_engine)))
    private = experiment.privacy.active
    (write_file if private else write_public)(folder / PARTITION, to_json({"histogram": histogram}))
    if private:
        write_public(folder / PRIVATE, private_note(experiment).encode())
    write_public(folder / EXPERIMENT, experiment.to_toml().encode())


def refuse_taken(folder: Path) -> None:
    """Refuse a folder that holds a run."""
    for name in (EXPERIMENT, ROUNDS, CHECKPOINT):
        if (folder / name).exists():
            raise RunError(f"{folder} already holds a run ({name} is there); resume it, or name another folder")


def _is_finished(folder: Path, experiment: Experiment) -> bool:
    """Return whether the last round was saved; a finished run's checkpoint may have been deleted to save space."""
    if not (folder / CHECKPOINT).exists():
        return read_run(folder).finished
    saved = read_state(folder / CHECKPOINT, identity(experiment))
    if saved is None or saved["round"] < experiment.rounds:
        return False
    if saved["round"] > experiment.rounds:
        past = f"its checkpoint is of round {saved['round']}, after rounds={experiment.rounds}"
        raise RunError(f"{folder}: {past}; {start_over(folder / CHECKPOINT)}")
    end_of(folder / ROUNDS, experiment.rounds, saved.get("lines", ""))  # refuses lines that were lost or changed since
    if not saved["rows"]:
        clear_after_last(folder / CHECKPOINT, experiment.rounds)
    return True


def _note_environment(path: Path, round: int, now: dict[str, Any]) -> None:
    """Add the current environment, and the round it starts with, if it differs from the last one."""
    known = read_object(path)
    first = {key: value for key, value in known.items() if key != "resumed"}
    sittings: list[dict[str, Any]] = known.get("resumed", [])
    last = {key: value for key, value in (sittings[-1] if sittings else first).items() if key != "round"}
    if last != now:
        write_public(path, to_json({**first, "resumed": [*sittings, {"round": round, **now}]}))


def _line(record: RoundRecord) -> str:
    """Return the record as a line; refuses values that are not finite, which JSON lacks and no run can recover from."""
    values = record.to_dict().items()
    bad = {key: value for key, value in values if isinstance(value, float) and not math.isfinite(value)}
    if bad:
        found = ", ".join(f"{key} is {value}" for key, value in bad.items())
        raise UpdateError(f"round {record.round}: {found}; lower the learning rates or clip")
    return record.to_json()


def to_json(values: dict[str, Any]) -> bytes:
    """Return readable JSON."""
    return json.dumps(values, indent=1).encode() + b"\n"
