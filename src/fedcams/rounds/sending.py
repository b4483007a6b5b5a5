"""The rows of a cohort between training and encoding, and which of its clients cannot send theirs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fedcams.errors import UpdateError
from fedcams.layout import Layout
from fedcams.method import Method
from fedcams.rounds.cohort import Arrival, Outgoing, Received
from fedcams.transforms import Facts

if TYPE_CHECKING:
    from torch import Tensor

NOT_FINITE = "the training reports the loss {}; lower the learning rate or clip"


@dataclass(frozen=True)
class Sending:
    """The rows of the clients that send something."""

    method: Method
    """The method in this round."""
    facts: Facts
    losses: Sequence[float]
    h: Tensor
    """`[C, d]`: first the change of the parameters, later with the residual added."""
    buffers: Tensor | None
    received: Received
    refused: Mapping[int, str]
    change: Tensor | None = None
    """`[C, d]`, the change of the control variates."""
    updates: Tensor | None = None
    """`[C, d]`, a copy of the updates after their transforms, for probes."""

    def without(self, refused: Mapping[int, str]) -> Sending:
        """Return the rows of all but these clients."""
        if not refused:
            return self
        places = [i for i, client in enumerate(self.facts.ids) if client not in refused]
        parts = (self.buffers, self.change, self.updates)
        buffers, change, updates = (None if part is None else part[places] for part in parts)
        return replace(
            self,
            facts=self.facts.take(places),
            losses=[self.losses[i] for i in places],
            h=self.h[places],
            buffers=buffers,
            received=self.received.only(places),
            refused={**self.refused, **refused},
            change=change,
            updates=updates,
        )

    def nothing(self) -> Outgoing:
        """Return what is sent if no client sends an update."""
        return Outgoing(Arrival(self.facts, (), {}), {}, None, self.refused)


def unsound(
    ids: Sequence[int], losses: Sequence[float], buffers: Tensor | None, layout: Layout | None
) -> dict[int, str]:
    """Return the clients whose loss or buffers are not finite, and why."""
    found = {i: NOT_FINITE.format(loss) for i, loss in zip(ids, losses, strict=True) if not math.isfinite(loss)}
    if buffers is not None and layout is not None and not bool(torch.isfinite(buffers).all()):
        found = {**not_finite(ids, buffers, layout), **found}
    return found


def not_finite(ids: Sequence[int], rows: Tensor, layout: Layout) -> dict[int, str]:
    """Return the clients whose rows are not finite, and what is wrong with them."""
    found = {}
    for client, row in zip(ids, rows, strict=True):
        try:
            layout.check_finite(row)
        except UpdateError as error:
            found[client] = str(error)
    return found
