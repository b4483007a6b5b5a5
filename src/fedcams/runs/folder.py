"""A run's folder: its files, and how to read them.

experiment.toml   everything that defines the run; written last when a run begins, so a folder with it holds a run
rounds.jsonl      one RoundRecord per line, without times, so that two runs can be compared byte for byte
theory.jsonl      only with theory_every: one Measured per line, the constants of the theorems at some rounds
timings.jsonl     one object per line: round, seconds, phases (seconds each), peak_memory, peak_device_memory (bytes)
environment.json  versions, machine, device, commit; under "resumed", those after a resumption if they changed
partition.json    {"histogram": [[examples of client i with label j]]}
python.json       only for a run started from Python: the call, and the values that must be equal to continue it
PRIVATE.txt       only for a run with privacy: which of these files its ε covers, and which must stay private
stopped.json      only for a run that was stopped early on purpose: the round and why; the run counts as finished
checkpoint/       what the run continues from; may be deleted once the run is finished
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcams.durable import os_errors
from fedcams.errors import FedcamsError
from fedcams.experiment import Experiment
from fedcams.experiment.experiment import FIRST, read_toml
from fedcams.probes.floor import floor_note
from fedcams.simulation import RoundRecord
from fedcams.simulation.record import FIELDS
from fedcams.theory.measure import Measured

T = TypeVar("T")
EXPERIMENT, ROUNDS, TIMINGS = "experiment.toml", "rounds.jsonl", "timings.jsonl"
ENVIRONMENT, PARTITION, CHECKPOINT = "environment.json", "partition.json", "checkpoint"
PYTHON, STOPPED, PRIVATE, THEORY = "python.json", "stopped.json", "PRIVATE.txt", "theory.jsonl"
WRITTEN = (*FIRST, "server", "local", "uplink", "rounds", "seed", "engine", "evaluate_every")
"""The keys that every version writes to `experiment.toml`."""
APART = ("evaluate", "theory")
"""The phases of a round that are not part of the method."""
REASON = 200
"""The most characters of a client's reason that a note shows."""
NOTE = """{privacy}

Covered by ε, and safe to release: the models, their averages, and what is computed from them and from public data.

Not covered, and private: training losses, gradients, counts, norms, compression errors, cohorts, refusals and message
lengths, which are in rounds.jsonl, theory.jsonl, timings.jsonl, partition.json and in reports. The checkpoint holds
the secret key of the noise and what clients keep. Anyone who has the key can remove the noise.
"""


class RunError(FedcamsError):
    """A run's folder is missing, damaged, in use, or cannot be written."""


@dataclass(frozen=True)
class Run:
    """A run, as read from its folder.

    Examples:
        >>> from pathlib import Path
        >>> from fedcams.experiment import Experiment
        >>> from fedcams.runs import run
        >>> tiny = Experiment(task="quadratic", model="point", clients=2, sampler="full", rounds=1)
        >>> made = run(tiny, Path("made"))
        >>> made.finished, len(made.records)
        (True, 1)
    """

    path: Path
    experiment: Experiment
    records: list[RoundRecord]
    timings: list[dict[str, Any]]
    environment: dict[str, Any]
    histogram: list[list[int]]
    stopped: int | None = None
    """The round after which the run was stopped early on purpose."""
    measured: list[Measured] = field(default_factory=list)
    """What `theory_every` measured."""

    @property
    def name(self) -> str:
        """The name of its folder, under which trackers show it."""
        return self.path.name

    @property
    def finished(self) -> bool:
        """Whether all rounds are there, or the run was stopped early on purpose."""
        return len(self.records) == self.experiment.rounds or len(self.records) == self.stopped

    def recorded(self, name: str) -> list[Any]:
        """Return a field or a probe of the records by its name, exactly as recorded; None where it is missing.

        The list is cached, so do not change it.
        """
        if name not in self._recorded:
            if name in FIELDS:
                self._recorded[name] = list(map(attrgetter(name), self.records))
            else:
                self._recorded[name] = [record.probes.get(name) for record in self.records]
        return self._recorded[name]

    def column(self, name: str) -> NDArray[np.float64]:
        """Return a field or a probe of the records by its name, `[T]`; NaN where it is missing or not finite.

        The array is made once and is read-only.
        """
        if name not in self._columns:
            known = np.array(self.recorded(name), np.float64)  # None becomes NaN
            self._columns[name] = _read_only(np.where(np.isfinite(known), known, np.nan))
        return self._columns[name]

    @functools.cached_property
    def _recorded(self) -> dict[str, list[Any]]:
        return {}

    @functools.cached_property
    def _columns(self) -> dict[str, NDArray[np.float64]]:
        return {}

    @functools.cached_property
    def cohort_sizes(self) -> NDArray[np.float64]:
        """How many clients were asked in each round, `[T]`."""
        return _read_only(np.array(list(map(len, self.recorded("cohort"))), np.float64))

    @functools.cached_property
    def seconds(self) -> NDArray[np.float64]:
        """The seconds of each round without its evaluation and `theory_every`, `[T]`; NaN where none were recorded."""
        known = {line.get("round"): _seconds(line) for line in self.timings}
        return _read_only(np.array([known.get(round, np.nan) for round in self.recorded("round")], np.float64))

    @functools.cached_property
    def probed(self) -> list[str]:
        """The names of the numbers that its probes recorded, in order of appearance."""
        lines = dict.fromkeys(tuple(record.probes) for record in self.records)  # only a few, even for many rounds
        return list(dict.fromkeys(name for line in lines for name in line))

    @property
    def on_floor(self) -> str | None:
        """A sentence if its adaptive server never adapted, naming the `fedavgm` that it was; otherwise None."""
        return floor_note(self.recorded("off_floor"), self.experiment.server)

    @property
    def refusals(self) -> str | None:
        """How many updates were refused, of how many clients, and the last reason; None if none was."""
        refused = [(record.round, client, why) for record in self.records for client, why in record.refused.items()]
        if not refused:
            return None
        (round, client, why), clients = refused[-1], len({client for _, client, _ in refused})
        return (
            f"{len(refused)} of {self.cohort_sizes.sum():.0f} updates were refused, from "
            f"{clients} client{'s' * (clients > 1)}; the last from client {client} in round {round}: {why[:REASON]}"
        )


def private_note(experiment: Experiment) -> str:
    """Return what the files of a run with privacy say about what its ε covers."""
    return NOTE.format(privacy=f"A run with privacy={experiment.privacy}, sampler={experiment.sampler}.")


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run.

    Arguments:
        path: the folder, which need not exist.

    Returns:
        True if it does, finished or not.

    Examples:
        >>> from pathlib import Path
        >>> from fedcams.runs import is_run
        >>> is_run(Path("nowhere"))
        False
    """
    return (path / EXPERIMENT).is_file()


def runs_below(path: Path) -> list[Path]:
    """Return the folder itself if it holds a run, otherwise all folders below it that do, by name."""
    if is_run(path):
        return [path]
    return sorted(found.parent for found in path.rglob(EXPERIMENT) if found.is_file())


def read_run(path: Path) -> Run:
    """Return everything about a run.

    Arguments:
        path: the run's folder.

    Returns:
        Experiment, records, timings and environment; what an unfinished run does not have yet is empty.

    Raises:
        RunError: if there is no run, or it is damaged.

    Examples:
        >>> from pathlib import Path
        >>> from fedcams.experiment import Experiment
        >>> from fedcams.runs import read_run, run
        >>> tiny = Experiment(task="quadratic", model="point", clients=2, sampler="full", rounds=1)
        >>> finished = run(tiny, Path("read"))
        >>> read_run(Path("read")).records == finished.records
        True
    """
    return Run(
        path,
        read_experiment(path),
        _parsed(path / ROUNDS, RoundRecord.from_dict),
        _lines(path / TIMINGS),
        read_object(path / ENVIRONMENT),
        read_object(path / PARTITION).get("histogram", []),
        read_object(path / STOPPED).get("round"),
        _parsed(path / THEORY, Measured.from_dict),
    )


def read_call(path: Path) -> str:
    """Return the call that started a run from Python; an empty string for a run from the command line."""
    return str(read_object(path / PYTHON).get("call", ""))


def read_experiment(path: Path) -> Experiment:
    """Return the experiment that defines the run in a folder."""
    if not is_run(path):
        raise RunError(f"{path} holds no run: {EXPERIMENT} is missing; name the folder that a run was written to")
    experiment, known = Experiment.read(path / EXPERIMENT), read_toml(path / EXPERIMENT)
    if lost := [key for key in WRITTEN if key not in known]:  # defaults would make it another run
        raise RunError(
            f"{path / EXPERIMENT} has no {', '.join(lost)}: it is cut short, or not written by a run; restore it, or "
            "name the folder of a run"
        )
    return experiment


def read_object(path: Path, fix: str = "delete it") -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no file. Refuses a damaged file, and says the fix."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(_read(path)))
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(f"{path}: damaged ({error}); {fix}") from None


def _read_only(values: NDArray[np.float64]) -> NDArray[np.float64]:
    values.setflags(write=False)
    return values


def _seconds(line: dict[str, Any]) -> float:
    total, phases = line.get("seconds"), line.get("phases")
    if not isinstance(total, int | float):
        return np.nan
    apart = [phases.get(name, 0.0) for name in APART] if isinstance(phases, dict) else []
    return max(0.0, float(total) - sum(map(float, apart)))


def _parsed(path: Path, parse: Callable[[dict[str, Any]], T]) -> list[T]:
    try:
        return [parse(line) for line in _lines(path)]
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _damaged(path, error) from None


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file, up to one that was cut short by a kill."""
    if not path.exists():
        return []
    try:
        return _parse(_read(path).split(b"\n")[:-1])
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from None


def _parse(lines: list[bytes]) -> list[Any]:
    """Return the parsed lines: all at once, which takes two thirds of the time, or one by one to locate an error."""
    with contextlib.suppress(ValueError):
        if len(found := json.loads(b"[%b]" % b",".join(lines))) == len(lines):
            return list(found)
    return [json.loads(line) for line in lines]


def _read(path: Path) -> bytes:
    with os_errors(RunError, "read", path, "make it a readable file"):
        return path.read_bytes()


def _damaged(path: Path, error: Exception) -> RunError:
    return RunError(f"{path}: damaged ({error}); resume the run, or delete its folder and start it again")
