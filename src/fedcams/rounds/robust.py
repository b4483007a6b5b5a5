"""The rows of one stream for aggregates that need all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fedcams.aggregates import Aggregate
from fedcams.buffers import without_negative_variances_
from fedcams.compress import Code, Compressor
from fedcams.layout import Layout
from fedcams.rounds.cohort import check_returned

if TYPE_CHECKING:
    from torch import Tensor


class RobustMean:
    """Keeps decoded rows, and combines them in ascending client id; stands where an `Aggregator` adds them up.

    Rows that are not changes, such as buffers, are combined as changes from `before [b]`: an aggregate may scale them.
    """

    def __init__(self, aggregate: Aggregate, layout: Layout, device: torch.device, before: Tensor | None) -> None:
        self.aggregate, self.layout, self.device, self.before = aggregate, layout, device, before
        self._rows: dict[int, Tensor] = {}
        self._weights: dict[int, float] = {}

    def add_rows(self, ids: Sequence[int], codec: Compressor, code: Code, weights: Sequence[float]) -> None:
        """Keep the code `[C, columns]` of several clients as rows."""
        self._rows |= dict(zip(ids, codec.decode(code, self.layout).to(self.device), strict=True))
        self._weights |= dict(zip(ids, weights, strict=True))

    def mean(self) -> Tensor:
        """Return the combined row `[d]`, in new memory; raises an UpdateError if it is not finite."""
        ids = sorted(self._rows)
        rows = torch.stack([self._rows[client] for client in ids])
        if self.before is not None:
            rows -= self.before
        combined = self.aggregate.combine(rows, [self._weights[client] for client in ids])
        check_returned(f"{self.aggregate}: combine", combined, rows[0])
        if self.before is not None:
            without_negative_variances_(combined.add_(self.before), self.layout)
        self.layout.check_finite(combined, "mean of the updates")
        return combined
