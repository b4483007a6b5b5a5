"""Time contenders alternately, several times, and show the results as tables for a terminal or for Markdown."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

Setup = Callable[[], Callable[[], Any]]
"""Called before every timing; returns the function to time."""
SETTLE = 0.02
"""Seconds to wait before each turn: OpenMP threads of earlier work spin for some milliseconds and take a core."""
REPEATS = 3
"""Timings per turn, so that the processor is awake and the caches are warm."""


def best_of(turns: int, contenders: Mapping[str, Setup]) -> dict[str, float]:
    """Return the best time of each contender in milliseconds; the first turn only warms up and does not count."""
    best = dict.fromkeys(contenders, float("inf"))
    for turn in range(turns + 1):
        for name, prepare in contenders.items():
            time.sleep(SETTLE)
            elapsed = min(_time(prepare()) for _ in range(REPEATS))
            best[name] = min(best[name], elapsed if turn else float("inf"))
    return best


def _time(timed: Callable[[], Any]) -> float:
    started = time.perf_counter()
    timed()
    return 1000 * (time.perf_counter() - started)


@dataclass(frozen=True)
class Grid:
    """A table of text: rows under a heading; columns after the first two hold numbers."""

    title: str
    heading: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def to_rich(self) -> Table:
        """Return a table for a terminal; on a narrow one, names wrap."""
        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
        for number, name in enumerate(self.heading):
            table.add_column(name, justify="left" if number < 2 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        """Return a Markdown table."""
        rule = ["---" if number < 2 else "--:" for number in range(len(self.heading))]
        return "\n".join("| " + " | ".join(row) + " |" for row in (self.heading, rule, *self.rows))
