"""What an aggregate is: how the decoded updates of a round become one vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from fedcams.errors import UpdateError
from fedcams.parts import Parts
from fedcams.registry import Spec


class Aggregate(Spec, ABC):
    """The root of all aggregates; a subclass writes `combine`."""

    kind = "aggregate"
    reference: ClassVar[str] = ""
    """Where it was published."""
    streaming: ClassVar[bool] = False
    """Whether it is the weighted mean, which needs no more than one decoded row at a time; others see all rows."""

    @abstractmethod
    def combine(self, rows: Tensor, weights: Sequence[float]) -> Tensor:
        """Decoded updates `[C, d]` in ascending client id -> `[d]` in new memory; only reads `rows`.

        Refuses no rows at all and another number of weights than rows.
        """

    def check(self, method: Parts) -> None:
        """Refuses a method with which it does not work, by a SpecError that names both parts."""


def check_rows(rows: Tensor, weights: Sequence[float]) -> None:
    """Refuses rows that cannot be combined."""
    if rows.dim() != 2 or len(rows) == 0 or len(rows) != len(weights):
        raise UpdateError(
            f"rows of shape {tuple(rows.shape)} and {len(weights)} weights; give one or more and a weight each"
        )
