"""Carrying out experiments: start, go on or leave alone, with someone watching."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedcams import runs
from fedcams.cli.progress import progress, title
from fedcams.errors import SpecError
from fedcams.experiment import Experiment
from fedcams.runs import Run, RunError, Watch, is_run, read_run
from fedcams.runs.folder import read_experiment
from fedcams.simulation import RoundRecord
from fedcams.trackers import Tracker


@dataclass(frozen=True)
class Session:
    """Where data lie, on which device to train, and who is told."""

    data: Path | None = None
    device: str = "cpu"
    quiet: bool = False
    trackers: Sequence[Tracker] = ()
    checkpoint_every: int = 25
    console: Console = field(default_factory=Console)

    def __post_init__(self) -> None:
        try:
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError) as error:  # a CPU-only torch asserts that there is CUDA
            reason = str(error).partition("\n")[0].partition(". ")[0]  # the rest explains torch, not the mistake
            raise SpecError(f"--device {self.device}: {reason}; this machine always has cpu") from None

    def say(self, text: str) -> None:
        """One line, unless quiet."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def carry_out(self, experiment: Experiment, folder: Path) -> Run:
        """Runs an experiment in its folder, or what is left of it."""
        if not is_run(folder):
            with self.watching(Run(folder, experiment, [], [], {}, [])) as watch:
                every = self.checkpoint_every
                return runs.run(
                    experiment, folder, data=self.data, device=self.device, checkpoint_every=every, watch=watch
                )
        refuse_other(experiment, folder)
        return self.go_on(folder)

    def go_on(self, folder: Path) -> Run:
        """Carries out what is left of a run."""
        found = _known(folder)
        if found.finished:
            self.say(f"{title(found.experiment)}: finished already, in {found.path}")
            return self._resume(found.path, None)  # all the same: a kill may have come before the last checkpoint
        self.say(f"{title(found.experiment)}: going on in {found.path}")
        with self.watching(found) as watch:
            return self._resume(found.path, watch)

    def _resume(self, path: Path, watch: Watch | None) -> Run:
        every = self.checkpoint_every
        return runs.resume(path, data=self.data, device=self.device, checkpoint_every=every, watch=watch)

    @contextlib.contextmanager
    def watching(self, run: Run) -> Iterator[Watch]:
        """Tells the console and every tracker about the rounds of a run."""
        with contextlib.ExitStack() as stack:
            show = stack.enter_context(progress(run.experiment, self.console, self.quiet))
            for tracker in self.trackers:
                stack.callback(tracker.finish)
                tracker.start(run)

            def watch(record: RoundRecord, timing: dict[str, Any]) -> None:
                show(record, timing)
                for tracker in self.trackers:
                    tracker.log(record, timing)

            yield watch


def refuse_other(experiment: Experiment, folder: Path) -> None:
    """Refuses a folder that holds another run, and says how that differs."""
    if not is_run(folder) or (found := read_experiment(folder)) == experiment:
        return
    there, here = found.to_dict(), experiment.to_dict()
    differences = ", ".join(f"{key}={there[key]} there, {here[key]} here" for key in here if there[key] != here[key])
    raise RunError(f"{folder} holds another run ({differences}); choose another folder by --out, or delete that one")


def _known(folder: Path) -> Run:
    """The run; without its records where they cannot be read, which going on from the checkpoint mends or refuses."""
    experiment = read_experiment(folder)
    try:
        return read_run(folder)
    except RunError:
        return Run(folder, experiment, [], [], {}, [])
