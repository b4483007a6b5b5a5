"""CSV: one file in the run's folder that any spreadsheet opens."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcams.durable import EVERYONE, is_own, write_whole
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
        self._rows: list[dict[str, Any]] = []
        self._columns: dict[str, None] = {}

    def start(self, run: Run) -> None:
        """Remember the run; the file is begun at its first round."""
        self._run, self._rows, self._columns = run, [], {}

    def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
        """Append a line; the whole file is written again for a resumed run, for new columns, and if writing failed."""
        assert self._run is not None, "start comes first"
        path, row = self._run.path / FILE, _numbers(record, timing)
        if not self._rows:
            self._rows = _rows_before(self._run, path, record.round)
        self._rows.append(row)
        columns, self._columns = self._columns, {}  # known again once they are on disk
        is_new = not (row.keys() <= columns.keys() and path.exists() and is_own(path))  # never through a link
        columns |= dict.fromkeys(name for each in self._rows for name in each) if is_new else {}
        text = io.StringIO(newline="")
        lines = csv.DictWriter(text, list(columns))
        if is_new:
            lines.writeheader()
        lines.writerows(self._rows if is_new else [row])
        data = text.getvalue().encode()
        if is_new:
            write_whole(path, data, mode=EVERYONE)
        else:
            with path.open("ab") as file:
                file.write(data)
        self._columns = columns

    def finish(self) -> None:
        """Do nothing: the file is closed after every line."""


def _rows_before(run: Run, path: Path, round: int) -> list[dict[str, Any]]:
    """Return the rows of the rounds before this one: those that the file has, otherwise as the run recorded them."""
    timings = itertools.chain(run.timings, itertools.repeat({}))
    rows = {str(each.round): _numbers(each, timing) for each, timing in zip(run.records, timings, strict=False)}
    if path.exists():
        written = csv.DictReader(path.read_text("utf-8").splitlines())
        whole = (row for row in written if None not in row and None not in row.values())  # not cut short by a kill
        rows |= {row["round"]: row for row in whole if row["round"] in rows}
    return [row for number, row in rows.items() if int(number) < round]


def _numbers(record: RoundRecord, timing: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a record, and the seconds of the round."""
    values = {name: value for name, value in record.to_dict().items() if name not in OTHERS}
    return {**values, "seconds": timing.get("seconds")}
