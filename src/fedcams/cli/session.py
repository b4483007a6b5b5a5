"""Run experiments: start, continue or skip each one, and tell a screen and trackers about its rounds."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from fedcams import runs
from fedcams.cli.progress import Screen
from fedcams.errors import SpecError, first_sentence
from fedcams.experiment import Experiment
from fedcams.runs import Run, RunError, Watch, is_run, read_run
from fedcams.runs.folder import ROUNDS, read_experiment
from fedcams.simulation import RoundRecord
from fedcams.trackers import Tracker, check_trackers, end, tracker

AGAIN = "run the same command again to continue from the last checkpoint"


@dataclass(frozen=True)
class Settings:
    """How runs are carried out; modules register your own pieces, and trackers are given by their specs."""

    data: Path | None = None
    device: str = "cpu"
    track: Sequence[str] = ()
    checkpoint_every: int = 25
    modules: Sequence[str] = ()
    keep_rows: bool = False
    """Whether finished runs may be extended later, even if clients keep state."""

    def to_json(self) -> str:
        """Return the settings as one line, which every worker receives first."""
        data = None if self.data is None else str(self.data)
        return json.dumps({**vars(self), "data": data, "track": [*self.track], "modules": [*self.modules]})

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Return the settings that `to_json` wrote."""
        values = json.loads(line)
        return cls(**{**values, "data": None if values["data"] is None else Path(values["data"])})

    def session(self, screen: Screen) -> Session:
        """Return a session with these settings, which reports to this screen."""
        return Session(self, [tracker(spec) for spec in self.track], screen)


@dataclass(frozen=True)
class Session:
    """Carries out runs, one after the other, and tells a screen and trackers about their rounds."""

    settings: Settings
    trackers: Sequence[Tracker]
    screen: Screen

    def carry_out(self, experiment: Experiment, folder: Path) -> Run:
        """Run an experiment in its folder, or continue or extend it there; return the finished run."""
        if not is_run(folder):
            with self.watching(run_so_far(experiment, folder)) as watch:
                return runs.run(experiment, folder, **self._options, watch=watch)
        refuse_other(experiment, folder)
        if read_experiment(folder).rounds < experiment.rounds:
            runs.extend(folder, experiment.rounds)
        return self.resume(folder)

    def resume(self, folder: Path) -> Run:
        """Run the remaining rounds of the run in a folder; return the finished run."""
        found = run_so_far(read_experiment(folder), folder)
        if found.finished:
            self.screen.say(f"{self.screen.title(found.path, found.experiment)}: already finished, in {found.path}")
            return runs.resume(found.path, **self._options)  # a kill may have come before the last checkpoint
        self.screen.say(f"{self.screen.title(found.path, found.experiment)}: continuing in {found.path}")
        with self.watching(found) as watch:
            return runs.resume(found.path, **self._options, watch=watch)

    @property
    def _options(self) -> dict[str, Any]:
        return {key: getattr(self.settings, key) for key in ("data", "device", "checkpoint_every", "keep_rows")}

    @contextlib.contextmanager
    def watching(self, run: Run) -> Iterator[Watch]:
        """Yield a function that tells the screen and every tracker about a round."""
        check_trackers(self.trackers, run.experiment.privacy)
        with contextlib.ExitStack() as stack:
            show = stack.enter_context(self.screen.follow(run))
            for each in self.trackers:
                stack.push(functools.partial(end, each))
                with naming(each, "cannot start", "set it up, or leave it out of --track"):
                    each.start(run)

            def watch(record: RoundRecord, timing: dict[str, Any]) -> None:
                show(record, timing)
                for each in self.trackers:
                    with naming(each, f"failed in round {record.round}", AGAIN):
                        each.log(record, timing)

            yield watch


@contextlib.contextmanager
def naming(tracker: Tracker, failure: str, fix: str) -> Iterator[None]:
    """Turn an error of a tracker's library into one line that names the tracker."""
    try:
        yield
    except Exception as error:
        name = type(tracker).__module__.rpartition(".")[2]
        reason = " ".join(str(error).split()).removesuffix(".")
        raise RunError(f"the tracker {name!r} {failure}: {type(error).__name__}: {reason}; {fix}") from error


def check_device(device: str) -> None:
    """Refuse a device that torch does not have here."""
    if device == "cpu":
        return  # always available, so check it without loading torch, which takes seconds
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # a CPU-only torch asserts that there is CUDA
        raise SpecError(f"--device {device}: {first_sentence(error)}; cpu always works") from None


def rounds_left(experiment: Experiment, folder: Path) -> int:
    """Return how many rounds of an experiment its folder does not have yet."""
    records = folder / ROUNDS
    done = records.read_bytes().count(b"\n") if records.is_file() else 0
    return max(0, experiment.rounds - done)


def refuse_other(experiment: Experiment, folder: Path) -> None:
    """Refuse a folder that holds another run, naming the keys that differ, or one that cannot get this many rounds."""
    if not is_run(folder) or (found := read_experiment(folder)) == experiment:
        return
    there, here = found.to_dict(), experiment.to_dict()
    keys = [key for key in here if there[key] != here[key]]
    if keys == ["rounds"] and experiment.rounds > found.rounds:
        runs.check_extension(folder, experiment.rounds)
        return
    differences = ", ".join(f"{key}={there[key]} there, {here[key]} here" for key in keys)
    raise RunError(f"{folder} holds a different run ({differences}); choose another folder with --out, or delete it")


def run_so_far(experiment: Experiment, folder: Path) -> Run:
    """Return what a folder has of the experiment's run, which may be nothing.

    Damaged records are left out, since resuming from the checkpoint repairs or refuses them.
    """
    try:
        if is_run(folder):
            return read_run(folder)
    except RunError:
        pass
    return Run(folder, experiment, [], [], {}, [])


def are_finished(experiments: Mapping[Path, Experiment]) -> bool:
    """Return whether all folders hold the finished runs of their experiments."""
    found = [(run_so_far(experiment, folder), experiment) for folder, experiment in experiments.items()]
    return all(run.finished and run.experiment == experiment for run, experiment in found)
