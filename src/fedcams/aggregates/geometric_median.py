"""The geometric median: the vector with the smallest sum of distances to the updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.aggregates.base import Aggregate, check_rows
from fedcams.aggregates.median import middle
from fedcams.bits.vectors import row_norms
from fedcams.registry import integer, register

if TYPE_CHECKING:
    from torch import Tensor

NEAR = 1e-6
"""Distances below this part of the norm of the coordinate-wise median count as this: an update may lie on it."""


@register("geometric_median")
@dataclass(frozen=True)
class GeometricMedian(Aggregate):
    """The geometric median by a few steps of Weiszfeld from the coordinate-wise median: z = Σ w_i x_i / Σ w_i.

    w_i is the client's weight divided by its distance from z, so a distant update counts little in any direction.
    Where updates lie on z, the others move it only if they pull more strongly (Vardi, Zhang 2000). All decoded updates
    of a round are in memory at once.
    """

    steps: int = integer(8, low=1, high=100, doc="number of steps")

    reference = "Pillutla, Kakade, Harchaoui: Robust Aggregation for Federated Learning, IEEE TSP 2022"
    examples = ("geometric_median", "geometric_median(steps=3)")
    refused = (("geometric_median(steps=0)", r"allowed: an integer in \[1, 100\]"),)

    def combine(self, rows: Tensor, weights: Sequence[float]) -> Tensor:
        check_rows(rows, weights)
        z = middle(rows)
        least = NEAR * float(row_norms(z[None]))
        for _ in range(self.steps if len(rows) > 1 else 0):
            distances = [max(float(row_norms((row - z)[None])), least) for row in rows]
            z = _moved(z, rows, weights, distances)
        return z


def _moved(z: Tensor, rows: Tensor, weights: Sequence[float], distances: Sequence[float]) -> Tensor:
    """Return the next z; updates at distance 0, as those of idle clients may be from a z of zero, hold it back."""
    pulls = [weight / distance if distance else 0.0 for weight, distance in zip(weights, distances, strict=True)]
    if not any(pulls):
        return z  # all updates lie there, or too far away for float32
    target = _mean(rows, pulls)
    if min(distances):
        return target
    held = sum(weight for weight, distance in zip(weights, distances, strict=True) if not distance)
    pull = sum(pulls) * float(row_norms((target - z)[None]))
    return z.lerp(target, 1 - held / pull) if pull > held else z


def _mean(rows: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the mean of rows with these weights, added one after the other."""
    total = sum(weights)
    out = torch.zeros_like(rows[0])
    for row, weight in zip(rows, weights, strict=True):
        out.add_(row, alpha=weight / total)
    return out
