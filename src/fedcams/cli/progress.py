"""Show the progress of runs: one line each on a terminal, cut to its width; elsewhere an occasional plain line.

At the end, show a table of their results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from fedcams.experiment import Experiment
    from fedcams.runs import Run, Watch
    from fedcams.simulation import RoundRecord

EVERY = 10
"""Rounds between two lines of output when there is no terminal."""
BAR, SHORTEST_BAR = 12, 6
"""Columns of a bar; a longer text next to it leaves fewer."""
NUMBERS = ("seeds", "rounds", "accuracy", "averaged", "up", "down")
"""Columns of the table of results."""


class Screen(Protocol):
    """Where a session reports on its runs."""

    def say(self, text: str) -> None:
        """Print one line."""

    def title(self, path: Path, experiment: Experiment) -> str:
        """Return what to call the run in a folder."""

    def follow(self, run: Run) -> contextlib.AbstractContextManager[Watch]:
        """Return a context whose value is called after every round of the run."""


class Progress:
    """A console that follows runs, one after the other or several at once from different threads.

    `left` maps the folder of each planned run to the number of its remaining rounds; `jobs` run at once.
    """

    def __init__(
        self, console: Console | None = None, left: Mapping[Path, int] | None = None, jobs: int = 1, quiet: bool = False
    ) -> None:
        self.console, self.quiet = console or Console(), quiet
        self._forecast = Forecast(left or {}, jobs)
        self._groups = {path.parent for path in left or {}}
        self._rows: dict[Path, Row] = {}
        self._live: Live | None = None
        self._lock = RLock()

    def say(self, text: str) -> None:
        """Print one line, unless quiet."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def title(self, path: Path, experiment: Experiment) -> str:
        """Return the label and seed of the run in a folder; with several presets, after the name of its own."""
        return f"{path.parent.name}, {title(experiment)}" if len(self._groups) > 1 else title(experiment)

    @contextlib.contextmanager
    def follow(self, run: Run) -> Iterator[Watch]:
        """Yield a function to call after every round of a run, with the round's record and timing."""
        self._forecast.begin(run.path, run.experiment.rounds - len(run.records))
        show = self._in_row if self.console.is_terminal else self._in_lines
        with contextlib.nullcontext(_nothing) if self.quiet else show(run) as shown:

            def watch(record: RoundRecord, timing: dict[str, Any]) -> None:
                self._forecast.count(run.path, run.experiment.rounds - record.round, timing)
                shown(record, timing)

            try:
                yield watch
            finally:
                self._forecast.end(run.path)

    @contextlib.contextmanager
    def _in_row(self, run: Run) -> Iterator[Watch]:
        place = self._forecast.place(run.path)
        name = self.title(run.path, run.experiment)
        row = Row(f"{place} {name}" if place else name, run.experiment.rounds)

        def watch(record: RoundRecord, timing: dict[str, Any]) -> None:
            row.record, row.left = record, f"{duration(self._forecast.in_all())} left{' in all' if place else ''}"

        with self._lock:
            self._rows[run.path] = row
            if self._live is None:
                self._live = Live(get_renderable=self._picture, console=self.console, transient=True)
                self._live.start()
        try:
            yield watch
        finally:
            self._close(run.path)

    def _close(self, path: Path) -> None:
        """Leave the line of a run above those that still change."""
        with self._lock:
            row = self._rows.pop(path)
            row.left = ""
            self.console.print(row)
            if not self._rows and self._live is not None:
                self._live.stop()
                self._live = None

    def _picture(self) -> Group:
        return Group(*list(self._rows.values()))

    @contextlib.contextmanager
    def _in_lines(self, run: Run) -> Iterator[Watch]:
        last = run.experiment.rounds

        def watch(record: RoundRecord, timing: dict[str, Any]) -> None:
            if record.round % EVERY == 0 or record.round == last:
                pace, left = self._forecast.pace(run.path), timedelta(seconds=round(self._forecast.of(run.path)))
                where = f"{self.title(run.path, run.experiment)}: round {record.round}/{last}"
                self.say(", ".join([where, *losses(record), *sizes(record), f"{pace:.2f} s per round, {left} left"]))

        yield watch


def _nothing(record: RoundRecord, timing: dict[str, Any]) -> None:
    pass


# -- text ------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """The line of one run: its place and name, a bar, and as much of its last round as there is room for."""

    head: str
    rounds: int
    record: RoundRecord | None = None
    left: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, head = options.max_width, Text(self.head)
        head.truncate(2 * width // 5, overflow="ellipsis")  # a long label leaves room for numbers
        round = 0 if self.record is None else self.record.round
        for tail in self._tails(f"{round:>{len(str(self.rounds))}}/{self.rounds}"):
            room = min(BAR, width - head.cell_len - cell_len(tail) - 2)
            if room >= SHORTEST_BAR:
                break
        else:
            cut = set_cell_size(head.plain, max(0, width - cell_len(tail) - 1))
            yield Text(f"{cut} {tail}", no_wrap=True, overflow="crop")
            return
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(head, ProgressBar(self.rounds, round, width=room), Text(tail, style="dim"))
        yield line

    def _tails(self, rounds: str) -> Iterator[str]:
        """Yield what may follow the bar, the longest text first."""
        found, sent = (losses(self.record), sizes(self.record)) if self.record is not None else ([], [])
        left = [self.left] if self.left else []
        for parts in ([*found, *sent, *left], [*found, *left], [*found[-1:], *left], left):
            yield f"{rounds} {', '.join(parts)}".rstrip()
        yield rounds


def title(experiment: Experiment) -> str:
    """Return the label and seed of a run."""
    return f"{experiment.label}, seed {experiment.seed}"


def losses(record: RoundRecord) -> list[str]:
    """Return the refused updates, the training loss and the test accuracy of a round in words, as far as known."""
    numbers = [("loss", record.train_loss), ("accuracy", record.test_accuracy)]
    refused = [f"{len(record.refused)} of {len(record.cohort)} refused"] if record.refused else []
    return refused + [f"{name} {value:.4f}" for name, value in numbers if value is not None]


def sizes(record: RoundRecord) -> list[str]:
    """Return the bytes that a round sent for the whole cohort, in words."""
    return [f"{decimal(record.wire_up)} up", f"{decimal(record.wire_down)} down"]


def duration(seconds: float) -> str:
    """Return a duration as `0:31`, `12:05` or `3:00:00`."""
    text = str(timedelta(seconds=round(seconds)))
    return text.removeprefix("0:0") if text.startswith("0:0") else text.removeprefix("0:")


# -- time ------------------------------------------------------------------------------------------------------------


class Forecast:
    """Estimates how long runs will take from the rounds seen so far; those not yet begun count at the mean pace."""

    def __init__(self, left: Mapping[Path, int], jobs: int) -> None:
        self._left, self._jobs, self._planned = dict(left), jobs, list(left)
        self._seconds: dict[Path, float] = {}
        self._seen: dict[Path, int] = {}

    def begin(self, path: Path, left: int) -> None:
        """Note that a run begins, with this many rounds left."""
        self._left[path], self._seconds[path], self._seen[path] = left, 0.0, 0

    def count(self, path: Path, left: int, timing: Mapping[str, Any]) -> None:
        """Note that a run has finished a round, after which this many are left."""
        self._left[path] = left
        self._seen[path] += 1
        self._seconds[path] += float(timing.get("seconds", 0.0))

    def end(self, path: Path) -> None:
        """Note that a run has ended, finished or not."""
        self._left[path] = 0

    def place(self, path: Path) -> str:
        """Return which run of how many this is, such as `3/24`; an empty string if there is no other."""
        return f"{self._planned.index(path) + 1}/{len(self._planned)}" if len(self._planned) > 1 else ""

    def pace(self, path: Path) -> float:
        """Return the seconds per round of this run, or of all runs if it has not run a round yet."""
        if seen := self._seen.get(path, 0):
            return self._seconds[path] / seen
        return sum(self._seconds.values()) / max(1, sum(self._seen.values()))

    def of(self, path: Path) -> float:
        """Return the seconds that are left for one run."""
        return self.pace(path) * self._left[path]

    def in_all(self) -> float:
        """Return the seconds that are left for all runs: shared by the jobs, and no less than the longest run takes."""
        seconds = [self.of(path) for path in list(self._left)]
        return max(sum(seconds) / self._jobs, max(seconds, default=0.0))


def results(done: Sequence[Run]) -> list[Table]:
    """Return a table per folder with a row per label, averaged over seeds: accuracies of both models, and bytes."""
    groups = dict.fromkeys(run.path.parent for run in done)
    return [
        _table([run for run in done if run.path.parent == group], group.name if len(groups) > 1 else "run")
        for group in groups
    ]


def _table(done: Sequence[Run], name: str) -> Table:
    table = Table(Column(Text(name)), *(Column(name, justify="right") for name in NUMBERS), box=SIMPLE_HEAD)
    for label in dict.fromkeys(run.experiment.label for run in done):
        same = [run for run in done if run.experiment.label == label]
        sent = (sum(getattr(record, key) for run in same for record in run.records) for key in ("wire_up", "wire_down"))
        rounds = ", ".join(sorted({str(len(run.records)) for run in same}))
        accuracies = (_accuracy(same, key) for key in ("test_accuracy", "averaged_accuracy"))
        table.add_row(
            Text(label), str(len(same)), rounds, *accuracies, *(decimal(round(each / len(same))) for each in sent)
        )
    return table


def _accuracy(same: Sequence[Run], key: str) -> str:
    from fedcams.experiment.sweep import final_accuracy

    known = [value for run in same if (value := final_accuracy(run.records, key)) is not None]
    return f"{fmean(known):.4f}" if known else ""
