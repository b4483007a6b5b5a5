"""CSV: one file in the run's folder that any spreadsheet opens."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcams.registry import register
from fedcams.trackers.base import Tracker, TrackerSpec

if TYPE_CHECKING:
    from fedcams.runs import Run
    from fedcams.simulation import RoundRecord

FILE = "rounds.csv"
OTHERS = ("cohort", "refused")
"""What a record holds besides numbers."""


@register("csv")
@dataclass(frozen=True)
class CSV(TrackerSpec):
    """Writes one line per round to `rounds.csv` in the run's folder."""

    examples = ("csv",)
    refused = (("csv(file=x)", "csv has no key 'file'"),)

    def open(self) -> Tracker:
        return _File()


class _File:
    def __init__(self) -> None:
        self._run: Run | None = None
        self._path: Path | None = None

    def start(self, run: Run) -> None:
        """Remember the run; the file is begun at its first round."""
        self._run, self._path = run, None

    def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
        """Append a line; the first one of a resumed run also writes those of the rounds before it."""
        if self._path is None and self._run is not None:
            self._path = self._run.path / FILE
            self._write("w", [list(_numbers(record))])
            before = zip(self._run.records, self._run.timings, strict=False)
            self._write("a", [list(_numbers(*each).values()) for each in before if each[0].round < record.round])
        self._write("a", [list(_numbers(record, timing).values())])

    def _write(self, mode: str, lines: list[list[Any]]) -> None:
        assert self._path is not None
        with self._path.open(mode, newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(lines)

    def finish(self) -> None:
        """Do nothing: the file is closed after every line."""


def _numbers(record: RoundRecord, timing: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the columns of a record, and the seconds of the round."""
    values = {name: value for name, value in record.to_dict().items() if name not in OTHERS}
    return {**values, "seconds": (timing or {}).get("seconds")}
