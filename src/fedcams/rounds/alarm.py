"""An alarm for training that explodes: the loss or the updates grow far beyond those of the first round."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOSS_GROWTH, UPDATE_GROWTH = 2, 100
"""How many times its first value a number may reach. Updates may grow tenfold when a model leaves a plateau."""


@dataclass
class Alarm:
    """Watches every round, and warns once: when the training loss or the norm of the mean update has exploded."""

    first_loss: float | None = None
    first_norm: float | None = None
    raised: bool = False

    def hear(self, round: int, loss: float | None, norm: float) -> str:
        """Take the training loss (None if unknown) and the norm of a round's mean update (0 without an update).

        Returns a sentence in the round in which one of them explodes, and an empty string otherwise.
        """
        if loss is not None and self.first_loss is None:
            self.first_loss = loss
        if norm > 0 and self.first_norm is None:
            self.first_norm = norm
        said = "" if self.raised else self._said(round, loss, norm)
        self.raised = self.raised or bool(said)
        return said

    def _said(self, round: int, loss: float | None, norm: float) -> str:
        if loss is not None and _exploded(loss, self.first_loss, LOSS_GROWTH):
            what, first = f"training loss {loss:.4g}", self.first_loss
        elif _exploded(norm, self.first_norm, UPDATE_GROWTH):
            what, first = f"mean update of norm {norm:.4g}", self.first_norm
        else:
            return ""
        return f"round {round}: {what}, up from {first:.4g}; the steps are too long: lower the server's lr"


def _exploded(value: float, first: float | None, growth: float) -> bool:
    return not math.isfinite(value) or (first is not None and first > 0 and value > growth * first)
