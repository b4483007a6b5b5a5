"""A bare parameter vector, which makes a quadratic task a sum of squared distances to its examples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcams.models.base import Model
from fedcams.registry import register


class Difference(nn.Module):
    """Difference to a parameter vector: `x [n, ...] -> w - x [n, d]`."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        """Return `w - x` for each example, flattened."""
        return self.w - x.flatten(1)


@register("point")
@dataclass(frozen=True)
class Point(Model):
    """A vector w of the size of an example, initially zero; the output is `w - x`, for any number of classes."""

    reference = "the parameter x of the objective f(x) in every convergence theorem"
    examples = ("point",)
    refused = (("point(dim=3)", "point has no key 'dim'"),)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return Difference(math.prod(shape))
