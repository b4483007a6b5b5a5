"""Where the bytes of each method go: updates, deltas, catching up, dense models, and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from fedcams.report.collection import Collection, Method
from fedcams.runs import Run

PARTS = {
    "Updates": "#0072b2",
    "Deltas": "#009e73",
    "Catch-up": "#e69f00",
    "Dense models": "#d55e00",
    "Buffers and headers": "#999999",
}
"""What bytes are for, in the order of drawing, with colours; all but the first go down."""


@dataclass(frozen=True)
class Parts:
    """Bytes of one method by `PARTS`: all clients and rounds, mean over seeds."""

    label: str
    bytes: tuple[float, ...]

    @property
    def total(self) -> float:
        """Up plus down."""
        return sum(self.bytes)


def parts(collection: Collection) -> list[Parts]:
    """Return the parts of every method that recorded them; nothing if all methods send dense models only."""
    found = [_parts(method) for method in collection.methods if all(map(_has_parts, method.runs))]
    return found if any(deltas or catchup for _, deltas, catchup, *_ in (p.bytes for p in found)) else []


def share_of_down(run: Run, key: str) -> float | None:
    """Return the part `wire_down_<key>` of all bytes down; None if it was not recorded."""
    down = int(sum(run.recorded("wire_down")))
    if not _has_parts(run) or not down:
        return None
    return float(sum(run.recorded(f"wire_down_{key}"))) / down


def _has_parts(run: Run) -> bool:
    return None not in run.recorded("wire_down_dense")


def _parts(method: Method) -> Parts:
    rows = [_bytes_of(run) for run in method.runs]
    return Parts(method.label, tuple(fmean(column) for column in zip(*rows, strict=True)))


def _bytes_of(run: Run) -> tuple[int, ...]:
    down, deltas, catchup, dense = (
        sum(filter(None, run.recorded(key)))
        for key in ("wire_down", "wire_down_deltas", "wire_down_catchup", "wire_down_dense")
    )
    apart = sum(run.recorded("wire_up_buffers"))
    up = sum(run.recorded("wire_up")) - apart
    return up, deltas, catchup, dense, down - deltas - catchup - dense + apart
