"""The trimmed mean: a few clients with extreme updates cannot move it far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.aggregates.base import PIECE, Aggregate, check_equal, check_rows, check_uniform
from fedcams.parts import Parts
from fedcams.registry import Number, exact, number, register

if TYPE_CHECKING:
    from torch import Tensor


@register("trimmed")
@dataclass(frozen=True)
class Trimmed(Aggregate):
    """The mean, in every coordinate, without the floor(fraction·C) largest and smallest of C values.

    All decoded updates of a round are in memory at once. All clients count equally: weights are refused.
    """

    fraction: Number = number(0.1, low=0, high=0.5, open="high", doc="the fraction that is left out at each end")

    reference = "Yin et al.: Byzantine-Robust Distributed Learning, ICML 2018"
    examples = ("trimmed", "trimmed(fraction=1/3)")
    refused = (("trimmed(fraction=0.5)", r"allowed: a number in \[0, 0.5\)"),)

    def combine(self, rows: Tensor, weights: Sequence[float]) -> Tensor:
        check_rows(rows, weights)
        check_equal(self, weights)
        out = torch.empty_like(rows[0])
        for piece, columns in zip(out.split(PIECE), rows.split(PIECE, dim=1), strict=True):
            self._combine_(piece, columns)
        return out

    def _combine_(self, out: Tensor, columns: Tensor) -> None:
        trim = math.floor(exact(self.fraction) * len(columns))
        kept = columns.sort(dim=0).values[trim : len(columns) - trim]
        out.zero_()
        for row in kept:  # one after the other, so that every device adds in the same order
            out.add_(row)
        out.div_(len(kept))

    def check(self, method: Parts) -> None:
        check_uniform(self, method)
