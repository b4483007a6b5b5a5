"""How a run is doing: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from fedcams.experiment import Experiment
from fedcams.runs import Watch
from fedcams.simulation import RoundRecord

EVERY = 10
"""Rounds from one line to the next where there is no terminal."""


@contextlib.contextmanager
def progress(experiment: Experiment, console: Console, quiet: bool = False) -> Iterator[Watch]:
    """Someone to tell about every round."""
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
        TextColumn("{task.fields[state]}", style="dim", table_column=Column()),  # the one that wraps where it is narrow
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
    """Which run of a preset it is."""
    return f"{experiment.label}, seed {experiment.seed}"


def state(record: RoundRecord) -> str:
    """What a round brought and what it sent, the whole cohort together."""
    numbers = [("loss", record.train_loss), ("accuracy", record.test_accuracy)]
    known = [f"{name} {value:.4f}" for name, value in numbers if value is not None]
    return ", ".join([*known, f"{decimal(record.wire_up)} up", f"{decimal(record.wire_down)} down"])


class Clock:
    """Seconds a round and the time left, by the rounds seen so far."""

    def __init__(self, rounds: int) -> None:
        self._rounds, self._seen, self._seconds = rounds, 0, 0.0

    def __call__(self, record: RoundRecord, timing: Mapping[str, Any]) -> str:
        """Counts a round."""
        self._seen += 1
        self._seconds += float(timing.get("seconds", 0.0))
        pace = self._seconds / self._seen
        left = timedelta(seconds=round(pace * (self._rounds - record.round)))
        return f"{pace:.2f} s a round, {left} left"
