"""A quadratic problem with given smoothness and gradient noise, and how to measure that noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from fedcams import keys
from fedcams.errors import DataError
from fedcams.registry import Number, integer, number, register
from fedcams.tasks.base import Task, TaskData

if TYPE_CHECKING:
    from torch import Tensor


@register("quadratic")
@dataclass(frozen=True)
class Quadratic(Task):
    """Minimise `f(w) = mean_z ½ (w-z)ᵀ A (w-z)` over points z in groups; the model `point` has the output `w - z`.

    `A` is diagonal, its entries a geometric sequence from `smoothness` down to `smoothness/condition`, so L is the
    first of them for every client. The gradient at z is `A (w-z)`: differences of gradients do not depend on w, and
    with one client for each group (the partition `natural`), at every w,

        σ_l² = mean_z∈k ‖A (z - z̄_k)‖² for every group k,    σ_g² = mean_k ‖A (z̄_k - z̄)‖²,

    as given, up to the rounding of float32. For other partitions of the points: `noise(gradients(data, w), shards)`.
    The minimum is at w = (1, ..., 1). Targets are the groups; the test evaluates f itself, on the training points.
    """

    dim: int = integer(10, low=1, doc="coordinates of w")
    groups: int = integer(10, low=2, doc="groups of points, each around its own centre")
    size: int = integer(100, low=2, doc="points in a group")
    smoothness: Number = number(1, low=0, open="low", doc="L, the largest eigenvalue of A")
    condition: Number = number(10, low=1, doc="the largest eigenvalue of A over the smallest")
    sigma_l: Number = number(1, low=0, doc="gradient noise inside a group")
    sigma_g: Number = number(1, low=0, doc="dissimilarity of the groups' gradients")
    seed: int = integer(0, low=0, high=2**63 - 1, doc="which draw of the points")

    reference = "Nesterov, Introductory Lectures on Convex Optimization, 2004, section 2.1"
    model = "point"
    examples = ("quadratic", "quadratic(dim=3, groups=4, size=5, condition=2, sigma_l=0.5, sigma_g=0)")
    refused = (
        ("quadratic(groups=1)", r"allowed: an integer in \[2, inf\)"),
        ("quadratic(sigma_l=-1)", r"allowed: a number in \[0, inf\)"),
        ("quadratic(condition=0.5)", r"allowed: a number in \[1, inf\)"),
    )

    def load(self, folder: Path | None = None) -> TaskData:
        rng = keys.generator(self.seed, "quadratic")
        centres = self._scatter(rng, (1, self.groups, self.dim), float(self.sigma_g))
        offsets = self._scatter(rng, (self.groups, self.size, self.dim), float(self.sigma_l))
        x = torch.from_numpy(1 + centres[0][:, None] + offsets).flatten(0, 1).float()
        y = torch.arange(self.groups).repeat_interleave(self.size)
        return TaskData(x, y, x, y, self.groups, loss=self._loss, metric=self._score, groups=y)

    def curvature(self, device: torch.device | None = None) -> Tensor:
        """Return the diagonal of A, `[dim]`."""
        exponents = -torch.linspace(0, 1, self.dim, device=device)
        return float(self.smoothness) * torch.pow(float(self.condition), exponents)

    def gradients(self, data: TaskData, w: Tensor) -> Tensor:
        """Return the gradient of each training example at `w [dim]`, `[n, dim]`."""
        return self.curvature(w.device) * (w - data.train_x)

    def _scatter(self, rng: np.random.Generator, shape: tuple[int, ...], sigma: float) -> np.ndarray:
        """Sets of vectors `[sets, n, dim]`, each with mean 0 and `mean ‖A v‖² = sigma²`."""
        v: np.ndarray = rng.standard_normal(shape)
        v -= v.mean(1, keepdims=True)
        steepness = np.square(v * self.curvature().numpy()).sum(-1).mean(1)
        v *= (sigma / np.sqrt(steepness))[:, None, None]
        return v

    def _score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The value of f at each example, negative since larger is better."""
        if outputs.shape[-1] != self.dim:
            raise DataError(
                f"{self}: the outputs are {list(outputs.shape)}; expected [n, {self.dim}]: use model 'point'"
            )
        return -0.5 * (self.curvature(outputs.device) * outputs.square()).sum(-1)

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -self._score(outputs, targets)


# -- noise of gradients ------------------------------------------------------------------------------------------


class Noise(NamedTuple):
    """The two variances in convergence theorems: the smallest constants for which they hold at one point w."""

    sigma_l: float
    """`E‖∇f_i(w; z) - ∇f_i(w)‖² ≤ σ_l²` for one example z of any client i; a batch of b has σ_l²/b."""
    sigma_g: float
    """`mean_i ‖∇f_i(w) - ∇f(w)‖² ≤ σ_g²` with `f = mean_i f_i`."""


def noise(gradients: Tensor, shards: Sequence[Tensor]) -> Noise:
    """Return both constants from the gradient `[n, d]` of each example and the rows `[n_i]` of each client."""
    held = [gradients[rows].double() for rows in shards]
    means = torch.stack([rows.mean(0) for rows in held])
    local = max(float(_variance(rows)) for rows in held)
    return Noise(math.sqrt(local), math.sqrt(float(_variance(means))))


def _variance(vectors: Tensor) -> Tensor:
    """`mean_j ‖v_j - mean v‖²` of `[n, d]`."""
    return (vectors - vectors.mean(0)).square().sum(-1).mean()
