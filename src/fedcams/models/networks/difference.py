"""The module of the model `point`."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Difference(nn.Module):
    """Difference to a parameter vector: `x [n, ...] -> w - x [n, d]`."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        """Return `w - x` for each example, flattened."""
        return self.w - x.flatten(1)
