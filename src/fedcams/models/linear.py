"""A linear layer on the flattened example: with cross-entropy it is multinomial logistic regression."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fedcams.models.base import Model
from fedcams.registry import flag, register


@register("linear")
@dataclass(frozen=True)
class Linear(Model):
    """Linear layer `W x + b` on the flattened x; convex under cross-entropy, so rates can be checked against theory."""

    bias: bool = flag(True, doc="add b")

    reference = "Cox, The Regression Analysis of Binary Sequences, J. R. Stat. Soc. B 20, 1958"
    examples = ("linear", "linear(bias=false)")
    refused = (("linear(bias=2)", "allowed: true or false"),)

    def build(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(math.prod(shape), classes, bias=self.bias))
