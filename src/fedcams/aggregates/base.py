"""The base class of aggregates: how the decoded updates of a round become one vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from fedcams.errors import SpecError, UpdateError
from fedcams.parts import Parts
from fedcams.registry import Spec

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 1 << 16
"""Coordinates that are sorted at a time, which keeps the extra memory small."""


class Aggregate(Spec, ABC):
    """The base class of all aggregates. A subclass writes `combine`.

    Examples:
        >>> import fedcams, torch
        >>> fedcams.Method(aggregate="median").aggregate.combine(torch.tensor([[1.0], [2.0], [90.0]]), [1.0, 1.0, 1.0])
        tensor([2.])
    """

    kind = "aggregate"
    reference: ClassVar[str] = ""
    """The publication that describes it."""
    streaming: ClassVar[bool] = False
    """Whether it is the weighted mean, which needs only one decoded row at a time; others see all rows."""
    is_mean: ClassVar[bool] = True
    """Whether each coordinate lies between those of the rows; if not, as with a vote, buffers get the weighted mean."""

    @abstractmethod
    def combine(self, rows: Tensor, weights: Sequence[float]) -> Tensor:
        """Return one vector `[d]`, in new memory, from decoded updates `[C, d]` in ascending client id.

        Only reads `rows`. Refuses empty `rows`, and a number of weights that differs from the number of rows.
        """

    def check(self, method: Parts) -> None:
        """Refuse a method that it does not work with; raises a SpecError that names both parts."""


def check_rows(rows: Tensor, weights: Sequence[float]) -> None:
    """Refuse `rows` that are not `[C, d]` with C >= 1, or not as many as `weights`."""
    if rows.dim() != 2 or len(rows) == 0 or len(rows) != len(weights):
        raise UpdateError(
            f"rows of shape {tuple(rows.shape)} and {len(weights)} weights; give one weight per row, and at least one"
        )


def check_equal(aggregate: Aggregate, weights: Sequence[float]) -> None:
    """Refuse weights that differ, for an aggregate that counts all clients equally."""
    if len(set(weights)) > 1:
        raise UpdateError(f"{aggregate} and weights={list(weights)}; it takes equal weights")


def check_uniform(aggregate: Aggregate, method: Parts) -> None:
    """Refuse a method that weights clients, for an aggregate that counts all clients equally."""
    if method.weighting != "uniform":
        raise SpecError(
            f"{aggregate} counts every client equally, but weighting={method.weighting} does not; "
            "set weighting=uniform, or aggregate=mean"
        )
