"""Trackers: services that follow a run, such as TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from fedcams.errors import SpecError
from fedcams.extras import load
from fedcams.registry.fields import nearest
from fedcams.runs import Run
from fedcams.simulation import RoundRecord


class Tracker(Protocol):
    """Follows runs, one after the other: `start`, `log` after every round, `finish` even if the run fails."""

    def start(self, run: Run) -> None:
        """Begin to follow a run; a resumed run already has records."""

    def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
        """Take the record and the timing of a finished round."""

    def finish(self) -> None:
        """Stop following the run."""


class TensorBoard:
    """Write event files to the folder `tensorboard` of a run, for `tensorboard --logdir runs`; needs tensorboard."""

    def __init__(self) -> None:
        needed = load("torch.utils.tensorboard", what="the tracker 'tensorboard'", extra="tensorboard")
        self._open: Any = needed.SummaryWriter
        self._writer: Any = None
        self._run: Run | None = None

    def start(self, run: Run) -> None:
        """Remember the run; files are opened at its first round, since a resumed run starts later."""
        self._run, self._writer = run, None

    def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
        """Write every number of the record and the seconds of the round."""
        if self._writer is None and self._run is not None:
            # purge_step hides what an interrupted run wrote for this round and later ones
            self._writer = self._open(self._run.path / "tensorboard", purge_step=record.round)
            self._writer.add_text("experiment", f"```toml\n{self._run.experiment.to_toml()}```")
        for name, value in scalars(record, timing):
            self._writer.add_scalar(name, value, record.round)

    def finish(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()


def scalars(record: RoundRecord, timing: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the name and value of everything that can be drawn as a curve over rounds."""
    for name, value in (*record.to_dict().items(), ("seconds", timing.get("seconds"))):
        if name != "round" and isinstance(value, int | float):
            yield name, value


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard}
"""Trackers by name; add your own here."""


def tracker(name: str) -> Tracker:
    """Return a new tracker by its name in TRACKERS; refuse an unknown name."""
    if name not in TRACKERS:
        raise SpecError(f"no tracker is named {name!r}{nearest(name, TRACKERS)}; known: {', '.join(TRACKERS)}")
    return TRACKERS[name]()
