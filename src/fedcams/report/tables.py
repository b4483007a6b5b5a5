"""The numbers as files: summary.csv and rounds.csv exactly, summary.md to read."""

from __future__ import annotations

import csv
import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedcams.registry import resolve
from fedcams.report.axes import AXES
from fedcams.report.collect import Collection
from fedcams.report.profiles import compute
from fedcams.report.series import position
from fedcams.report.summary import NO_FEEDBACK, Row, Spread, Summary
from fedcams.report.units import NONE, human_bytes, human_seconds, score

SPREADS = ("final", "last", "best")
RECORDED = (
    "train_loss", "test_loss", "test_accuracy", "wire_up", "wire_down", "wire_up_buffers", "wire_down_buffers",
    "paper_bits_up", "paper_bits_down", "q", "gamma", "delta_norm", "wire_down_deltas", "wire_down_catchup",
    "wire_down_dense", "held_loss", "held_accuracy",
)  # fmt: skip


def write_summary_csv(path: Path, summary: Summary) -> None:
    """One row a method, exact numbers, bytes in bytes and seconds in seconds."""
    rows = [_exact(row, summary.target) for row in summary.rows]
    _write(path, list(rows[0]), (row.values() for row in rows))


def write_rounds_csv(path: Path, collection: Collection) -> None:
    """One row a round of every run: what was recorded, the sums so far and the seconds."""
    sums = [axis.key for axis in AXES if axis.unit]
    header = ["label", "seed", "round", "cohort", *RECORDED, *(f"cumulative_{key}" for key in sums), "seconds"]
    _write(path, header, _rounds(collection))


def _rounds(collection: Collection) -> Iterable[Sequence[object]]:
    for method in collection.methods:
        for run in method.runs:
            places = [position(run, axis).astype(int).tolist() for axis in AXES if axis.unit]
            seconds = [None if value != value else value for value in compute(run).tolist()]
            for record, *sums, taken in zip(run.records, *places, seconds, strict=True):
                fields = [getattr(record, name) for name in RECORDED]
                yield [method.label, run.experiment.seed, record.round, len(record.cohort), *fields, *sums, taken]


def _exact(row: Row, target: float | None) -> dict[str, object]:
    """A row's fields under their names; a spread is three of them, and the target stands with what depends on it."""
    exact: dict[str, object] = {}
    for key, value in vars(row).items():
        if key in SPREADS:
            exact |= {f"{key}_accuracy{end}": getattr(value, name, None) for end, name in ENDINGS.items()}
        elif key == "reached":
            exact |= {"target": target, "seeds_reached": value}
        else:
            exact[key] = " ".join(map(str, value)) if key == "seeds" else value
    return exact


ENDINGS = {"": "mean", "_low": "low", "_high": "high"}


def _write(path: Path, header: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


@dataclass(frozen=True)
class Cell:
    """One entry of the table: what is read and sorted by, a second line in small print, what a pointer is told."""

    text: str
    order: float | str | None = None
    note: str = ""
    hint: str = ""


PIECES = {
    "server": ("Server", "what the server does with the mean update"),
    "uplink": ("Uplink", "how updates travel to the server"),
    "downlink": ("Downlink", "how the model travels to clients"),
}
"""Columns that are left out where they say the same of all methods."""


def columns(summary: Summary) -> dict[str, str]:
    """The heads of the table, each with an explanation."""
    target = "" if summary.target is None else f" {score(summary.target, summary.percent)}"
    return {
        "Method": "the experiment's label",
        **{head: doc for key, (head, doc) in PIECES.items() if summary.shows(key)},
        "Seeds": "how many runs; numbers are means over them, small print is lowest to highest",
        "Final accuracy": "mean over the last 20% of the rounds; held: that of the model that all clients hold",
        "Last": "accuracy at the last evaluation",
        "Best": "highest accuracy of any evaluation",
        "Bytes up": "sent by all clients in all rounds, headers and buffers included",
        "Bytes down": "sent to all clients in all rounds; small print: what catching up and dense models take of it",
        "Up + down": "both together",
        f"Bytes to{target or ' target'}": "up + down until the target accuracy was first reached, by every seed",
        "Time a round": "median of the measured seconds, evaluation apart",
    }


def text_columns(summary: Summary) -> int:
    """How many columns, the first ones, hold words; the others hold numbers."""
    return list(columns(summary)).index("Seeds")


def cells(row: Row, summary: Summary) -> list[Cell]:
    """One line of the table, in the order of `columns`."""
    return [
        Cell(row.label, row.label),
        *(_spec(key, getattr(row, key)) for key in PIECES if summary.shows(key)),
        Cell(str(len(row.seeds)), len(row.seeds)),
        _final(row, summary),
        *(_spread(spread, summary.percent, len(row.seeds)) for spread in (row.last, row.best)),
        Cell(human_bytes(row.bytes_up), row.bytes_up),
        Cell(human_bytes(row.bytes_down), row.bytes_down, _shares(row)),
        Cell(human_bytes(row.bytes_total), row.bytes_total),
        _to_target(row, summary),
        Cell(human_seconds(row.seconds_per_round), row.seconds_per_round),
    ]


def _spec(key: str, spec: str) -> Cell:
    kind = "compressor" if key == "uplink" else key
    return Cell(spec, spec, hint=resolve(kind, spec.removesuffix(NO_FEEDBACK)).spelled_out())


def _spread(spread: Spread | None, percent: bool, seeds: int) -> Cell:
    if spread is None:
        return Cell(NONE)
    low, high = score(spread.low, percent).removesuffix(" %"), score(spread.high, percent).removesuffix(" %")
    return Cell(score(spread.mean, percent), spread.mean, f"{low} … {high}" if seeds > 1 else "")


def _final(row: Row, summary: Summary) -> Cell:
    """The final accuracy, and below it that of what clients hold."""
    cell = _spread(row.final, summary.percent, len(row.seeds))
    held = "" if row.held_accuracy is None else f"held {score(row.held_accuracy, summary.percent)}"
    return replace(cell, note=", ".join(part for part in (cell.note, held) if part))


def _shares(row: Row) -> str:
    """What catching up and dense models take of the bytes down, where there is anything else."""
    if row.downlink == "none" or row.down_catchup is None or row.down_dense is None:
        return ""
    shares = {"catch-up": row.down_catchup, "dense": row.down_dense}
    return ", ".join(f"{100 * share:.0f}% {name}" for name, share in shares.items() if share)


def _to_target(row: Row, summary: Summary) -> Cell:
    if row.bytes_to_target is None:
        seeds = len(row.seeds)
        return Cell(
            "not reached" if summary.target is not None else NONE,
            None,
            f"by {row.reached} of {seeds} seeds only" if row.reached else "",
        )
    return Cell(human_bytes(row.bytes_to_target), row.bytes_to_target, f"round {row.rounds_to_target:.4g}")


def markdown(collection: Collection, summary: Summary) -> str:
    """The table, for README files and issues."""
    heads = list(columns(summary))
    words = text_columns(summary)
    lines = [heads, ["---"] * words + ["---:"] * (len(heads) - words)]
    lines += [[_markdown(cell) for cell in cells(row, summary)] for row in summary.rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = [note for method in collection.methods for note in method.unfinished]
    listed = "\n".join(f"- Unfinished: {_plain(note)}" for note in notes)
    return "\n\n".join(part for part in ("# Runs", table, explained(summary), listed) if part) + "\n"


def explained(summary: Summary) -> str:
    """What the numbers mean, in two sentences."""
    if summary.target is None:
        return "Nothing was evaluated, so there is no accuracy to compare at."
    why = "as given" if summary.given else "95% of the best method's final accuracy"
    return (
        "Numbers are means over seeds, bytes those of all clients. Final accuracy is the mean over the last 20% of the "
        f"rounds. Target: {score(summary.target, summary.percent)} ({why})."
    )


def _markdown(cell: Cell) -> str:
    return _plain(f"{cell.text} ({cell.note})" if cell.note else cell.text)


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
