"""Weights & Biases."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedcams.extras import load
from fedcams.registry import register, text
from fedcams.trackers.base import Tracker, TrackerSpec, scalars

if TYPE_CHECKING:
    from fedcams.runs import Run
    from fedcams.simulation import RoundRecord


@register("wandb")
@dataclass(frozen=True)
class WandB(TrackerSpec):
    """Sends every round to Weights & Biases, or keeps it in the run's folder for `wandb sync`; needs wandb."""

    project: str = text("fedcams", doc="the project that runs appear in")
    mode: str = text("online", choices=("online", "offline"), doc="offline: write to the run's folder only")

    examples = ("wandb", "wandb(project=mine, mode=offline)")
    refused = (("wandb(mode=sometimes)", "allowed: online or offline"),)

    def open(self) -> Tracker:
        return _Run(load("wandb", what="the tracker 'wandb'", extra="wandb"), self)


class _Run:
    def __init__(self, wandb: Any, settings: WandB) -> None:
        self._wandb, self._settings = wandb, settings
        self._run: Any = None

    def start(self, run: Run) -> None:
        """Begin a run there, or continue the one that this folder began: its id depends on the folder alone."""
        run.path.mkdir(parents=True, exist_ok=True)  # or old versions write to a temporary one
        self._run = self._wandb.init(
            project=self._settings.project,
            mode=self._settings.mode,
            name=run.name,
            id=hashlib.blake2b(str(run.path.resolve()).encode(), digest_size=8).hexdigest(),
            resume="allow",
            config=run.experiment.to_dict(),
            dir=str(run.path),
        )

    def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
        """Send every number of the record and the seconds of the round."""
        self._run.log(dict(scalars(record, timing)), step=record.round)

    def finish(self) -> None:
        """End the run there."""
        self._exit(0)

    def abort(self, error: BaseException) -> None:
        """End the run there as failed or, with wandb's own code for Ctrl-C, as stopped."""
        self._exit(1 if isinstance(error, Exception) else 255)

    def _exit(self, code: int) -> None:
        if self._run is not None:
            self._run.finish(exit_code=code)
