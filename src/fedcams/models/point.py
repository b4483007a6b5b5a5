"""A bare parameter vector, which makes a quadratic task a sum of squared distances to its examples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedcams.models.base import Model
from fedcams.registry import register

if TYPE_CHECKING:
    from torch import nn


@register("point")
@dataclass(frozen=True)
class Point(Model):
    """A vector w of the size of an example, initially zero; the output is `w - x`, for any number of classes."""

    reference = "the parameter x of the objective f(x) in every convergence theorem"
    examples = ("point",)
    refused = (("point(dim=3)", "point has no key 'dim'"),)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        from fedcams.models.networks.difference import Difference

        return Difference(math.prod(shape))
