"""What a tracker does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from fedcams.runs import Run
from fedcams.simulation import RoundRecord


class Tracker(Protocol):
    """Follows one run after the other: `start`, `log` for every round, `finish`, also when the run broke off."""

    def start(self, run: Run) -> None:
        """A run begins; one that is resumed has records already."""

    def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
        """A round is over."""

    def finish(self) -> None:
        """The run is over."""
