"""TensorBoard: event files in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedcams.extras import load
from fedcams.registry import register
from fedcams.trackers.base import Tracker, TrackerSpec, scalars

if TYPE_CHECKING:
    from fedcams.runs import Run
    from fedcams.simulation import RoundRecord


@register("tensorboard")
@dataclass(frozen=True)
class TensorBoard(TrackerSpec):
    """Writes event files to the folder `tensorboard` of a run, for `tensorboard --logdir runs`; needs tensorboard."""

    examples = ("tensorboard",)
    refused = (("tensorboard(folder=x)", "tensorboard has no key 'folder'"),)

    def open(self) -> Tracker:
        needed = load("torch.utils.tensorboard", what="the tracker 'tensorboard'", extra="tensorboard")
        return _Events(needed.SummaryWriter)


class _Events:
    def __init__(self, writer: Any) -> None:
        self._open = writer
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
