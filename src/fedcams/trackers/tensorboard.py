"""TensorBoard: curves in the browser; needs the package `tensorboard`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedcams.extras import load
from fedcams.runs import Run
from fedcams.simulation import RoundRecord


class TensorBoard:
    """Writes event files to the folder `tensorboard` of a run; `tensorboard --logdir runs` shows them all."""

    def __init__(self) -> None:
        needed = load("torch.utils.tensorboard", what="the tracker 'tensorboard'", extra="tensorboard")
        self._open: Any = needed.SummaryWriter
        self._writer: Any = None
        self._run: Run | None = None

    def start(self, run: Run) -> None:
        """Waits for the first round, which a resumed run may have gone through before."""
        self._run, self._writer = run, None

    def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
        """Every number of the record, and how long the round took."""
        if self._writer is None and self._run is not None:
            # purge_step hides what was drawn from this round on, before the run was stopped
            self._writer = self._open(self._run.path / "tensorboard", purge_step=record.round)
            self._writer.add_text("experiment", f"```toml\n{self._run.experiment.to_toml()}```")
        for name, value in scalars(record, timing):
            self._writer.add_scalar(name, value, record.round)

    def finish(self) -> None:
        """Closes the files."""
        if self._writer is not None:
            self._writer.close()


def scalars(record: RoundRecord, timing: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Name and value of what can be drawn as a curve over rounds."""
    for name, value in (*vars(record).items(), ("seconds", timing.get("seconds"))):
        if name != "round" and isinstance(value, int | float):
            yield name, value
