"""Multi-Krum: leaves out whole updates that lie far from the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.aggregates.base import PIECE, Aggregate, check_rows
from fedcams.aggregates.mean import Mean
from fedcams.registry import Number, exact, number, register

if TYPE_CHECKING:
    from torch import Tensor


@register("krum")
@dataclass(frozen=True)
class Krum(Aggregate):
    """The weighted mean without the f = floor(fraction·C) of C updates whose neighbours are farthest away.

    An update's score is the sum of its squared distances to the C - f - 2 updates nearest to it. It compares whole
    updates, so it detects a wrong direction that is hidden by noise in every single coordinate. All decoded updates of
    a round are in memory at once.
    """

    fraction: Number = number(0.2, low=0, high=0.5, open="high", doc="the fraction of updates that is left out")

    reference = "Blanchard et al.: Machine Learning with Adversaries, NeurIPS 2017"
    examples = ("krum", "krum(fraction=1/3)")
    refused = (("krum(fraction=0.5)", r"allowed: a number in \[0, 0.5\)"),)

    def combine(self, rows: Tensor, weights: Sequence[float]) -> Tensor:
        check_rows(rows, weights)
        count = len(rows)
        out = math.floor(exact(self.fraction) * count)
        nearest = squared_distances(rows).sort(dim=1).values[:, 1 : max(2, count - out - 1)]  # itself comes first
        scores = nearest.sum(dim=1).tolist()
        kept = sorted(sorted(range(count), key=scores.__getitem__)[: count - out])
        return Mean().combine(rows[kept], [weights[place] for place in kept])


def squared_distances(rows: Tensor) -> Tensor:
    """Return the squared distances `[C, C]` between rows `[C, d]`, in float64, where even the largest have squares."""
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for columns in rows.split(PIECE, dim=1):
        products += columns.double() @ columns.double().T
    squares = products.diag()
    return (squares[:, None] + squares - 2 * products).clamp_(min=0)
