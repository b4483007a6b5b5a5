"""The journal of a run: its rounds as they are run, with their records, timings and checkpoints in its folder."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedcams.durable import EVERYONE, OWNER_ONLY
from fedcams.rounds import ServerState
from fedcams.rows import SavedRows
from fedcams.runs.checkpoint import REPLICAS, ROWS, Checkpoint
from fedcams.runs.environment import environment, peak_device_memory, peak_memory
from fedcams.runs.files import Lines, end_of, refuse_linked_folders, write_public
from fedcams.runs.folder import CHECKPOINT, ENVIRONMENT, ROUNDS, THEORY, TIMINGS, read_object
from fedcams.simulation import Phases, RoundRecord, Simulation
from fedcams.theory.gradients import Point
from fedcams.theory.measure import Measured, measure


class Step(NamedTuple):
    """One finished round, whose record is in the folder."""

    state: ServerState
    record: RoundRecord
    timing: dict[str, Any]
    measured: Measured | None
    """The constants of the theorems at the model that the round started from, if they were measured."""


class Files(NamedTuple):
    """The files of a run that grow with its rounds, open for writing."""

    lines: Lines
    timings: Lines
    theory: Lines | None
    """Measured constants; None if the run measures none."""

    def append(self, step: Step) -> None:
        """Add a round; refuses a record with values that are not finite."""
        self.lines.append(step.record.check().to_json())
        self.timings.append(json.dumps(step.timing))
        if self.theory is not None and step.measured is not None:
            self.theory.append(step.measured.to_json())

    def sync(self) -> None:
        """Make all lines durable."""
        for file in filter(None, self):
            file.sync()


@dataclass(frozen=True)
class Journal:
    """Runs rounds and writes their records, timings and checkpoints to a folder, which the caller has locked."""

    folder: Path
    simulation: Simulation
    identity: dict[str, Any]
    """The values that must be equal for the run to continue from a checkpoint."""
    checkpoint_every: int = 25
    keep_rows: bool = False
    """Whether the run may get more rounds later, so that even its last checkpoint needs rows."""
    theory_every: int = 0
    """Rounds between measurements of the theorems' constants; 0 means none."""

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

    def check_theory(self, saved: int) -> None:
        """Refuse measured constants of saved rounds that were lost or changed since the loaded checkpoint."""
        if self.theory_every and self.checkpoint.theory:
            end_of(self.folder / THEORY, saved, self.checkpoint.theory, gaps=True)

    def rounds(self, state: ServerState) -> Generator[Step]:
        """Run the rounds after the loaded state; each is in the folder by the time it is yielded.

        If the caller stops early, a checkpoint of its last round is written.
        """
        saved, simulation = state.round, self.simulation
        _note_environment(self.folder / ENVIRONMENT, saved, environment_of(simulation))
        with self._open(saved) as files:
            while state.round < simulation.rounds:
                step = self._round(state)
                state = step.state
                files.append(step)
                if state.round % self._every == 0 or state.round == simulation.rounds:
                    saved = self._save(state, files)
                try:
                    yield step
                except GeneratorExit:
                    if saved != state.round:
                        self._save(state, files)
                    raise

    @contextlib.contextmanager
    def _open(self, saved: int) -> Iterator[Files]:
        """Open the files that grow, cut back to the saved rounds."""
        with (
            contextlib.closing(Lines(self.folder / ROUNDS, saved, self.checkpoint.lines, self._mode)) as lines,
            contextlib.closing(Lines(self.folder / TIMINGS, saved, mode=self._mode)) as timings,
            self._theory_lines(saved) as theory,
        ):
            yield Files(lines, timings, theory)

    def _save(self, state: ServerState, files: Files) -> int:
        """Make this state the checkpoint, and return its round."""
        refuse_linked_folders(self.folder)
        files.sync()  # first: a checkpoint on disk must never be without its lines
        last = state.round == self.simulation.rounds and not self.keep_rows
        self.checkpoint.save(state, files.lines.digest, last, files.theory.digest if files.theory else "")
        return state.round

    @property
    def _every(self) -> int:
        """Rounds between checkpoints; with privacy 1, because a round must be durable before its model is seen."""
        return 1 if self.simulation.server.method.privacy.active else self.checkpoint_every

    @property
    def _mode(self) -> int:
        """Who may read the lines: with privacy their owner alone, since losses and norms are not covered by ε."""
        return OWNER_ONLY if self.simulation.server.method.privacy.active else EVERYONE

    def _theory_lines(self, saved: int) -> contextlib.AbstractContextManager[Lines | None]:
        """Return the file for measured constants, cut back to the saved rounds; None if the run measures none."""
        if not self.theory_every:
            return contextlib.nullcontext()
        path, digest = self.folder / THEORY, self.checkpoint.theory
        return contextlib.closing(Lines(path, saved, digest, self._mode, gaps=True))

    def _is_measured(self, round: int) -> bool:
        every = self.theory_every
        return every > 0 and (round == 1 or round % every == 0 or round == self.simulation.rounds)

    def _round(self, state: ServerState) -> Step:
        phases, started, done, measured = Phases(), time.perf_counter(), state.round, None
        start = _copy(state) if self._is_measured(done + 1) else None  # a round overwrites its state
        state, record = self.simulation.advance_(state, phases)
        if start is not None:
            with phases("theory"):
                measured = measure(self.simulation.problem, start, state.x, done)
        timing = {
            "round": state.round,
            "seconds": round(time.perf_counter() - started, 6),
            "phases": {name: round(seconds, 6) for name, seconds in phases.seconds.items()},
            "peak_memory": peak_memory(),
            "peak_device_memory": peak_device_memory(self.simulation.problem.device),
        }
        return Step(state, record, timing, measured)


def _copy(state: ServerState) -> Point:
    return Point(state.x.clone(), None if state.buffers is None else state.buffers.clone())


def environment_of(simulation: Simulation) -> dict[str, Any]:
    """Return the environment in which a simulation runs here."""
    return environment(simulation.problem.device, simulation.engine, simulation.why_engine)


def _note_environment(path: Path, round: int, now: dict[str, Any]) -> None:
    """Add the current environment, and the round it starts with, if it differs from the last one."""
    known = read_object(path)
    first = {key: value for key, value in known.items() if key != "resumed"}
    sittings: list[dict[str, Any]] = known.get("resumed", [])
    last = {key: value for key, value in (sittings[-1] if sittings else first).items() if key != "round"}
    if last != now:
        write_public(path, to_json({**first, "resumed": [*sittings, {"round": round, **now}]}))


def to_json(values: dict[str, Any]) -> bytes:
    """Return readable JSON."""
    return json.dumps(values, indent=1).encode() + b"\n"
