"""Where a method's bytes went: updates, deltas, catching up, dense models, and the rest."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from fedcams.report.collect import Collection, Method
from fedcams.runs import Run

PARTS = {
    "Updates": "#0072b2",
    "Deltas": "#009e73",
    "Catch-up": "#e69f00",
    "Dense models": "#d55e00",
    "Buffers and heads": "#999999",
}
"""In the order in which they are drawn, with their colours; all but the first go down."""


@dataclass(frozen=True)
class Parts:
    """Bytes of all clients in all rounds by `PARTS`, mean over seeds."""

    label: str
    bytes: tuple[float, ...]

    @property
    def total(self) -> float:
        """Up and down together."""
        return sum(self.bytes)


def parts(collection: Collection) -> list[Parts]:
    """Of every method whose runs recorded them, where some method sends anything but dense models."""
    found = [_parts(method) for method in collection.methods if all(map(_recorded, method.runs))]
    return found if any(deltas or catchup for _, deltas, catchup, *_ in (p.bytes for p in found)) else []


def share_of_down(run: Run, key: str) -> float | None:
    """The part `wire_down_<key>` of all bytes down; None where it was not recorded."""
    down = sum(record.wire_down for record in run.records)
    if not _recorded(run) or not down:
        return None
    return float(sum(getattr(record, f"wire_down_{key}") for record in run.records)) / down


def _recorded(run: Run) -> bool:
    return all(record.wire_down_dense is not None for record in run.records)


def _parts(method: Method) -> Parts:
    rows = [_of(run) for run in method.runs]
    return Parts(method.label, tuple(fmean(column) for column in zip(*rows, strict=True)))


def _of(run: Run) -> tuple[int, ...]:
    down, deltas, catchup, dense = (
        sum(getattr(record, key) or 0 for record in run.records)
        for key in ("wire_down", "wire_down_deltas", "wire_down_catchup", "wire_down_dense")
    )
    apart = sum(record.wire_up_buffers for record in run.records)
    up = sum(record.wire_up for record in run.records) - apart
    return up, deltas, catchup, dense, down - deltas - catchup - dense + apart
