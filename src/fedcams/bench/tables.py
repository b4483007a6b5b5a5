"""What was timed, as tables for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedcams.bench.rounds import BY_HAND, Case, Share


@dataclass(frozen=True)
class Grid:
    """Rows under a heading; columns after the first two are numbers."""

    title: str
    heading: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def to_rich(self) -> Table:
        """For a terminal; where it is narrow, names go on in the next line and lose nothing."""
        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
        for number, name in enumerate(self.heading):
            table.add_column(name, justify="left" if number < 2 else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def to_markdown(self) -> str:
        """For a page."""
        rule = ["---" if number < 2 else "--:" for number in range(len(self.heading))]
        return "\n".join("| " + " | ".join(row) + " |" for row in (self.heading, rule, *self.rows))


def speed(cases: Sequence[Case]) -> Grid:
    """Milliseconds a round, and how many times faster than by hand."""
    rows = []
    for case in cases:
        for engine in case.accuracy:
            train, whole = (case.milliseconds[f"{what} {engine}"] for what in ("train", "round"))
            by_hand = [case.milliseconds[f"{what} {BY_HAND}"] for what in ("train", "round")]
            numbers = (f"{train:.2f}", f"{by_hand[0] / train:.1f}x", f"{whole:.2f}", f"{by_hand[1] / whole:.1f}x")
            rows.append((f"{case.model}, {case.partition}", engine, *numbers, f"{case.accuracy[engine]:.3f}"))
    heading = ("problem", "engine", "training ms", "faster", "whole round ms", "faster", "FedAvg's accuracy")
    return Grid("Rounds on the digits: 100 clients, 10 a round, 3 epochs, batches of 20", heading, rows)


def shares(found: Sequence[Share]) -> Grid:
    """What compression, byte counting and records cost."""
    rows = [(one.uplink, f"{one.parameters:,}", f"{one.milliseconds:.1f}", f"{100 * one.share:.0f} %") for one in found]
    heading = ("uplink", "parameters", "round ms", "compression, counting, records")
    return Grid("A larger model", heading, rows)
