"""Multilayer perceptron: linear layers with ReLU between them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from fedcams.models.base import Model
from fedcams.registry import integer, register


@register("mlp")
@dataclass(frozen=True)
class MLP(Model):
    """Flatten, then `layers` times (linear, ReLU), then linear."""

    hidden: int = integer(128, low=1, doc="units of a hidden layer")
    layers: int = integer(1, low=1, doc="hidden layers")

    reference = "Rumelhart, Hinton, Williams, Learning Representations by Back-Propagating Errors, Nature 323, 1986"
    examples = ("mlp", "mlp(hidden=16, layers=2)")
    refused = (
        ("mlp(hidden=0)", r"allowed: an integer in \[1, inf\)"),
        ("mlp(layers=0)", r"allowed: an integer in \[1, inf\)"),
    )

    def build(self, shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        widths = [math.prod(shape), *[self.hidden] * self.layers]
        pairs = ((torch.nn.Linear(a, b), torch.nn.ReLU()) for a, b in itertools.pairwise(widths))
        body = itertools.chain.from_iterable(pairs)
        return torch.nn.Sequential(torch.nn.Flatten(), *body, torch.nn.Linear(self.hidden, classes))
