"""Run experiments: start, continue or skip each one, and show its progress."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from fedcams import runs
from fedcams.errors import SpecError
from fedcams.experiment import Experiment
from fedcams.runs import Run, RunError, Watch, is_run, read_run
from fedcams.runs.folder import read_experiment
from fedcams.simulation import RoundRecord
from fedcams.trackers import Tracker

EVERY = 10
"""Rounds between two lines of output when there is no terminal."""


@dataclass(frozen=True)
class Session:
    """Where the data is, which device trains, and what follows the rounds."""

    data: Path | None = None
    device: str = "cpu"
    quiet: bool = False
    trackers: Sequence[Tracker] = ()
    checkpoint_every: int = 25
    console: Console = field(default_factory=Console)

    def __post_init__(self) -> None:
        if self.device == "cpu":
            return
        try:
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError) as error:  # a CPU-only torch asserts that there is CUDA
            reason = str(error).partition("\n")[0].partition(". ")[0]  # the rest is about torch, not about the mistake
            raise SpecError(f"--device {self.device}: {reason}; cpu always works") from None

    def say(self, text: str) -> None:
        """Print one line, unless quiet."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def carry_out(self, experiment: Experiment, folder: Path) -> Run:
        """Run an experiment in its folder, or continue it there; return the finished run."""
        if not is_run(folder):
            with self.watching(Run(folder, experiment, [], [], {}, [])) as watch:
                every = self.checkpoint_every
                return runs.run(
                    experiment, folder, data=self.data, device=self.device, checkpoint_every=every, watch=watch
                )
        refuse_other(experiment, folder)
        return self.resume(folder)

    def resume(self, folder: Path) -> Run:
        """Run the remaining rounds of the run in a folder; return the finished run."""
        found = _known(folder)
        if found.finished:
            self.say(f"{title(found.experiment)}: already finished, in {found.path}")
            return self._resume(found.path, None)  # a kill may have come before the last checkpoint
        self.say(f"{title(found.experiment)}: continuing in {found.path}")
        with self.watching(found) as watch:
            return self._resume(found.path, watch)

    def _resume(self, path: Path, watch: Watch | None) -> Run:
        every = self.checkpoint_every
        return runs.resume(path, data=self.data, device=self.device, checkpoint_every=every, watch=watch)

    @contextlib.contextmanager
    def watching(self, run: Run) -> Iterator[Watch]:
        """Yield a function that tells the console and every tracker about a round."""
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
    """Raise RunError if the folder holds another run, and name the keys that differ."""
    if not is_run(folder) or (found := read_experiment(folder)) == experiment:
        return
    there, here = found.to_dict(), experiment.to_dict()
    differences = ", ".join(f"{key}={there[key]} there, {here[key]} here" for key in here if there[key] != here[key])
    raise RunError(f"{folder} holds another run ({differences}); choose another folder with --out, or delete that one")


def _known(folder: Path) -> Run:
    """Read a run; damaged records are left out, since resuming from the checkpoint repairs or refuses them."""
    experiment = read_experiment(folder)
    try:
        return read_run(folder)
    except RunError:
        return Run(folder, experiment, [], [], {}, [])


# -- progress ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(experiment: Experiment, console: Console, quiet: bool = False) -> Iterator[Watch]:
    """Yield a function to call after every round: a bar on a terminal, now and then a line elsewhere."""
    if quiet:
        yield lambda record, timing: None
    elif console.is_terminal:
        with _bar(console) as bar:
            yield _on_bar(bar, experiment)
    else:
        yield _in_lines(console, experiment)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12, table_column=Column(no_wrap=True)),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[state]}", style="dim", table_column=Column()),  # wraps on a narrow terminal
        console=console,
    )


def _on_bar(bar: Progress, experiment: Experiment) -> Watch:
    clock = Clock(experiment.rounds)
    task = bar.add_task(escape(title(experiment)), total=experiment.rounds, state="")

    def watch(record: RoundRecord, timing: dict[str, Any]) -> None:
        bar.update(task, completed=record.round, state=f"{state(record)}, {clock(record, timing)}")

    return watch


def _in_lines(console: Console, experiment: Experiment) -> Watch:
    clock, last = Clock(experiment.rounds), experiment.rounds

    def watch(record: RoundRecord, timing: dict[str, Any]) -> None:
        pace = clock(record, timing)
        if record.round % EVERY == 0 or record.round == last:
            line = f"{title(experiment)}: round {record.round}/{last}, {state(record)}, {pace}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    return watch


def title(experiment: Experiment) -> str:
    """Return the label and seed of a run."""
    return f"{experiment.label}, seed {experiment.seed}"


def state(record: RoundRecord) -> str:
    """Return the loss, the accuracy and the bytes of one round, for the whole cohort."""
    numbers = [("loss", record.train_loss), ("accuracy", record.test_accuracy)]
    known = [f"{name} {value:.4f}" for name, value in numbers if value is not None]
    return ", ".join([*known, f"{decimal(record.wire_up)} up", f"{decimal(record.wire_down)} down"])


class Clock:
    """Estimate seconds per round and the time left from the rounds seen so far."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self._seen, self._seconds = rounds, 0, 0.0

    def __call__(self, record: RoundRecord, timing: Mapping[str, Any]) -> str:
        """Count a round and return the estimate as text."""
        self._seen += 1
        self._seconds += float(timing.get("seconds", 0.0))
        pace = self._seconds / self._seen
        left = timedelta(seconds=round(pace * (self._rounds - record.round)))
        return f"{pace:.2f} s per round, {left} left"
