"""How much gradients scatter: the two variances that convergence theorems speak of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Noise(NamedTuple):
    """The smallest constants for which both assumptions hold at one point w."""

    sigma_l: float
    """`E‖∇f_i(w; z) - ∇f_i(w)‖² ≤ σ_l²` for one example z of any client i; a batch of b has σ_l²/b."""
    sigma_g: float
    """`mean_i ‖∇f_i(w) - ∇f(w)‖² ≤ σ_g²` with `f = mean_i f_i`."""


def noise(gradients: Tensor, shards: Sequence[Tensor]) -> Noise:
    """From the gradient `[n, d]` of each example and the rows `[n_i]` that each client holds."""
    held = [gradients[rows].double() for rows in shards]
    means = torch.stack([rows.mean(0) for rows in held])
    local = max(float(_variance(rows)) for rows in held)
    return Noise(math.sqrt(local), math.sqrt(float(_variance(means))))


def _variance(vectors: Tensor) -> Tensor:
    """`mean_j ‖v_j - mean v‖²` of `[n, d]`."""
    return (vectors - vectors.mean(0)).square().sum(-1).mean()
