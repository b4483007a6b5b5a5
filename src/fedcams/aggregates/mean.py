"""The mean, weighted or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.aggregates.base import Aggregate, check_rows
from fedcams.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("mean")
@dataclass(frozen=True)
class Mean(Aggregate):
    """The weighted mean: updates are added in ascending client id in float32, and the sum is divided once."""

    reference = "McMahan et al.: Communication-Efficient Learning of Deep Networks, AISTATS 2017"
    streaming = True
    examples = ("mean",)

    def combine(self, rows: Tensor, weights: Sequence[float]) -> Tensor:
        check_rows(rows, weights)
        total = torch.zeros_like(rows[0])
        for row, weight in zip(rows, weights, strict=True):
            total.add_(row, alpha=weight)
        return total.div_(sum(weights))
