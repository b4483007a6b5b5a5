"""The numbers of a report as text: exact in summary.csv and rounds.csv, readable in summary.md and in the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedcams.durable import write_text
from fedcams.escaping import csv_cell, plain
from fedcams.registry import resolve
from fedcams.report.collection import Collection
from fedcams.report.networks import network_markdown
from fedcams.report.numbers import NONE, human_bytes, human_seconds, score
from fedcams.report.series import AXES, CONSTANTS, Array, Metric, position, values
from fedcams.report.summary import NO_FEEDBACK, Row, Spread, Summary
from fedcams.runs import Run

SPREADS = ("final", "averaged", "last", "best")
RECORDED = (
    "train_loss", "test_loss", "test_accuracy", "wire_up", "wire_down", "wire_up_buffers", "wire_down_buffers",
    "paper_bits_up", "paper_bits_down", "q", "gamma", "delta_norm", "wire_down_deltas", "wire_down_catchup",
    "wire_down_dense", "held_loss", "held_accuracy", "averaged_loss", "averaged_accuracy",
)  # fmt: skip
"""Columns of rounds.csv that are always there; what other probes measured follows."""


def write_summary_csv(path: Path, summary: Summary) -> None:
    """Write one row per method: exact numbers, in bytes and seconds."""
    rows = [_exact(row, summary.target) for row in summary.rows]
    write_text(path, "".join(f"{_line(row)}\n" for row in (rows[0], *(row.values() for row in rows))))


def write_rounds_csv(path: Path, collection: Collection) -> None:
    """Write one row per round of every run: what was recorded, the sums so far and the seconds."""
    sums = [axis.key for axis in AXES if axis.unit]
    probed = dict.fromkeys(name for run in collection.runs for name in run.probed)
    names = [*RECORDED, *(name for name in probed if name not in RECORDED)]
    constants = CONSTANTS if any(run.measured for run in collection.runs) else ()
    numbers = [*names, *(metric.key for metric in constants), *(f"cumulative_{key}" for key in sums)]
    header = ["label", "seed", "round", "cohort", "refused", *numbers, "seconds"]
    parts = [_rows(method.label, run, names, constants) for method in collection.methods for run in method.runs]
    write_text(path, "".join([f"{_line(header)}\n", *parts]))


def _rows(label: str, run: Run, names: Sequence[str], constants: Sequence[Metric]) -> str:
    """Return the rows of a run. They hold only numbers, which need no quotes, so all of them become text at once."""
    refused = list(map(len, run.recorded("refused")))
    places = [position(run, axis).astype(int).tolist() for axis in AXES if axis.unit]
    measured, seconds = [_known(values(run, metric)) for metric in constants], _known(run.seconds)
    sizes = run.cohort_sizes.astype(int).tolist()
    columns = (run.recorded("round"), sizes, refused, *map(run.recorded, names), *measured, *places, seconds)
    text = repr(list(zip(*columns, strict=True)))  # [(1, 10, None), (2, 10, 0.5)]
    numbers, named = text[2:-2].replace("None", "").replace(", ", ","), _line([label, run.experiment.seed])
    between = f"\n{named},"
    return between[1:] + numbers.replace("),(", between) + "\n"


def _known(values: Array) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def _exact(row: Row, target: float | None) -> dict[str, object]:
    """Return the fields of a row by name; a spread becomes three fields, and the target precedes what depends on it."""
    exact: dict[str, object] = {}
    for key, value in vars(row).items():
        if key in SPREADS:
            exact |= {f"{key}_accuracy{end}": getattr(value, name, None) for end, name in ENDINGS.items()}
        elif key == "reached":
            exact |= {"target": target, "seeds_reached": value}
        elif key == "averaged_reached":
            exact["averaged_seeds_reached"] = value
        else:
            exact[key] = " ".join(map(str, value)) if key == "seeds" else value
    return exact


ENDINGS = {"": "mean", "_low": "low", "_high": "high"}


def _line(cells: Iterable[object]) -> str:
    """Return a line of a CSV file without its end."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(map(csv_cell, cells))
    return text.getvalue()


@dataclass(frozen=True)
class Cell:
    """One cell of the table: its text, the value to sort by, a second line in small print, and a tooltip."""

    text: str
    order: float | str | None = None
    note: str = ""
    hint: str = ""


METHOD = "Method"
PIECES = {
    "server": ("Server", "how the server uses the mean update"),
    "uplink": ("Uplink", "how updates travel to the server"),
    "downlink": ("Downlink", "how the model travels to clients"),
}
"""Columns that are left out if all methods have the same value."""


def columns(summary: Summary) -> dict[str, str]:
    """Return the column headings of the table, each with an explanation."""
    target, averages = "" if summary.target is None else f" {score(summary.target, summary.percent)}", summary.averages
    return {
        METHOD: "the label of the experiment; small print: its recipe, and the ε that it spent",
        "Final accuracy": "mean over the last 20% of the rounds; held: accuracy of the model that all clients hold",
        **(
            {"Averaged": "the same for the averaged models, which are evaluated but never trained from"}
            if averages
            else {}
        ),
        "Last": "accuracy at the last evaluation",
        "Best": "highest accuracy of all evaluations",
        "Bytes up": "sent by all clients in all rounds, including headers and buffers",
        "Bytes down": "sent to all clients in all rounds; small print: how much of it is catch-up and dense models",
        "Up + down": "sum of both",
        f"Bytes to{target or ' target'}": "up + down until the target is first reached, if every seed reaches it",
        **({f"Averaged to{target or ' target'}": "the same for the averaged models"} if averages else {}),
        "Time per round": "median of the measured seconds, without evaluation",
        "Seeds": "number of runs; other numbers are means over them, small print is lowest to highest",
        **{head: doc for key, (head, doc) in PIECES.items() if summary.shows(key)},
    }


WORDS = (METHOD, *(head for head, _ in PIECES.values()))
"""Columns that hold words; the others hold numbers."""


def cells(row: Row, summary: Summary) -> list[Cell]:
    """Return one line of the table, in the order of `columns`."""
    return [
        Cell(row.label, row.label, _named(row)),
        _final(row, summary),
        *([_spread(row.averaged, summary.percent, len(row.seeds))] if summary.averages else []),
        *(_spread(spread, summary.percent, len(row.seeds)) for spread in (row.last, row.best)),
        Cell(human_bytes(row.bytes_up), row.bytes_up),
        Cell(human_bytes(row.bytes_down), row.bytes_down, _shares(row)),
        Cell(human_bytes(row.bytes_total), row.bytes_total),
        _to_target(row, summary),
        *([_averaged_to_target(row, summary)] if summary.averages else []),
        Cell(human_seconds(row.seconds_per_round), row.seconds_per_round),
        Cell(str(len(row.seeds)), len(row.seeds)),
        *(_spec(key, getattr(row, key)) for key in PIECES if summary.shows(key)),
    ]


def _named(row: Row) -> str:
    """Return the recipe and the ε that a method spent, if it has them."""
    recipe, spent = f"recipe {row.recipe}" if row.recipe else "", f"ε {row.epsilon:.4g} spent" if row.epsilon else ""
    return ", ".join(part for part in (recipe, spent) if part)


def _spec(key: str, spec: str) -> Cell:
    kind = "compressor" if key == "uplink" else key
    return Cell(spec, spec, hint=resolve(kind, spec.removesuffix(NO_FEEDBACK)).spelled_out())


def _spread(spread: Spread | None, percent: bool, seeds: int) -> Cell:
    if spread is None:
        return Cell(NONE)
    low, high = score(spread.low, percent).removesuffix("%"), score(spread.high, percent).removesuffix("%")
    return Cell(score(spread.mean, percent), spread.mean, f"{low} … {high}" if seeds > 1 else "")


def _final(row: Row, summary: Summary) -> Cell:
    """Return the final accuracy, and below it the accuracy of the model that clients hold."""
    cell = _spread(row.final, summary.percent, len(row.seeds))
    held = "" if row.held_accuracy is None else f"held {score(row.held_accuracy, summary.percent)}"
    return replace(cell, note=", ".join(part for part in (cell.note, held) if part))


def _shares(row: Row) -> str:
    """Return the parts of the bytes down for catching up and dense models, if the downlink is compressed."""
    if row.downlink == "none" or row.down_catchup is None or row.down_dense is None:
        return ""
    shares = {"catch-up": row.down_catchup, "dense": row.down_dense}
    return ", ".join(f"{100 * share:.0f}% {name}" for name, share in shares.items() if share)


def _to_target(row: Row, summary: Summary) -> Cell:
    return _spent(row.bytes_to_target, row.rounds_to_target, row.reached, len(row.seeds), summary)


def _averaged_to_target(row: Row, summary: Summary) -> Cell:
    if row.averaged is None:
        return Cell(NONE)
    found, rounds = row.averaged_bytes_to_target, row.averaged_rounds_to_target
    return _spent(found, rounds, row.averaged_reached, len(row.seeds), summary)


def _spent(found: float | None, rounds: float | None, reached: int, seeds: int, summary: Summary) -> Cell:
    """Return the bytes and rounds until the target, which are means over seeds, or how many seeds reached it."""
    if found is None or rounds is None:
        shown = "not reached" if summary.target is not None else NONE
        return Cell(shown, None, f"only by {reached} of {seeds} seeds" if reached else "")
    return Cell(human_bytes(found), found, f"{'mean ' if seeds > 1 else ''}round {rounds:.0f}")


def markdown(collection: Collection, summary: Summary) -> str:
    """Return the table and its notes as Markdown."""
    heads = list(columns(summary))
    lines = [heads, ["---" if head in WORDS else "---:" for head in heads]]
    lines += [[_markdown(cell) for cell in cells(row, summary)] for row in summary.rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = [note for kind in collection.cautions for note in kind]
    notes += [note for method in collection.methods if (note := method.on_floor)]
    listed = "\n".join(f"- {plain(note)}" for note in notes)
    times = network_markdown(collection, summary)
    return "\n\n".join(part for part in ("# Runs", table, explained(summary), listed, times) if part) + "\n"


def explained(summary: Summary) -> str:
    """Return what the numbers mean, in a few sentences."""
    if summary.target is None:
        return "Nothing was evaluated, so there is no accuracy to compare."
    also = ", averaged models included" if summary.averages else ""
    why = "as given" if summary.given else f"95% of the best final accuracy{also}"
    return (
        "Numbers are means over seeds; bytes cover all clients. Final accuracy is the mean over the last 20% of the "
        f"rounds. Target: {score(summary.target, summary.percent)} ({why})."
    )


def _markdown(cell: Cell) -> str:
    return plain(f"{cell.text} ({cell.note})" if cell.note else cell.text)
