"""The coordinate-wise median: fewer than half of the clients cannot move it beyond the values of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.aggregates.base import PIECE, Aggregate, check_equal, check_rows, check_uniform
from fedcams.parts import Parts
from fedcams.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("median")
@dataclass(frozen=True)
class Median(Aggregate):
    """The median in every coordinate; for an even number of clients, the mean of the two in the middle.

    All decoded updates of a round are in memory at once. All clients count equally: weights are refused.
    """

    reference = "Yin et al.: Byzantine-Robust Distributed Learning, ICML 2018"
    examples = ("median",)
    refused = (("median(1)", "at most 0 values"),)

    def combine(self, rows: Tensor, weights: Sequence[float]) -> Tensor:
        check_rows(rows, weights)
        check_equal(self, weights)
        return middle(rows)

    def check(self, method: Parts) -> None:
        check_uniform(self, method)


def middle(rows: Tensor) -> Tensor:
    """Return the coordinate-wise median `[d]` of `rows [C, d]`, in new memory."""
    out, low, high = torch.empty_like(rows[0]), (len(rows) - 1) // 2, len(rows) // 2
    for piece, columns in zip(out.split(PIECE), rows.split(PIECE, dim=1), strict=True):
        ordered = columns.sort(dim=0).values
        if low == high:
            piece.copy_(ordered[low])
        else:  # halved before they are added, because their sum may overflow
            torch.add(ordered[low] / 2, ordered[high] / 2, out=piece)
    return out
