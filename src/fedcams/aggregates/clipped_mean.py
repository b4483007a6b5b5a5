"""The norm-clipped mean: a long update keeps its direction, but counts no more than a usual one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.aggregates.base import Aggregate, check_rows
from fedcams.bits.vectors import row_norms
from fedcams.registry import Number, number, register

if TYPE_CHECKING:
    from torch import Tensor


@register("clipped_mean")
@dataclass(frozen=True)
class ClippedMean(Aggregate):
    """The weighted mean of updates scaled down to `factor` times the median norm of the cohort, if they are longer.

    All decoded updates of a round are in memory at once, because the median is known only when all have arrived.
    """

    factor: Number = number(1, low=0, open="low", doc="how many times the median norm an update may keep")

    reference = "Sun et al.: Can You Really Backdoor Federated Learning?, 2019"
    examples = ("clipped_mean", "clipped_mean(factor=2)")
    refused = (("clipped_mean(factor=0)", r"allowed: a number in \(0, inf\)"),)

    def combine(self, rows: Tensor, weights: Sequence[float]) -> Tensor:
        check_rows(rows, weights)
        norms = row_norms(rows).tolist()
        bound = float(self.factor) * statistics.median_low(norms)
        out = torch.zeros_like(rows[0])
        for row, weight, norm in zip(rows, weights, norms, strict=True):
            out.add_(row, alpha=weight * (bound / norm if norm > bound else 1.0))
        return out.div_(sum(weights))
