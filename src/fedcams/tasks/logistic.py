"""Logistic regression on synthetic features: convex and smooth, with bounded gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedcams import keys
from fedcams.registry import Number, integer, number, register
from fedcams.tasks.base import Task, TaskData, accuracy, cross_entropy

if TYPE_CHECKING:
    from torch import Tensor


@register("logistic")
@dataclass(frozen=True)
class Logistic(Task):
    """Cross-entropy of `softmax(W x)`, ‖x‖ = 1, for the model `linear(bias=false)`; labels are drawn from a true W.

    The gradient of an example is `(p - e_y) xᵀ` and its Hessian `(diag p - p pᵀ) ⊗ x xᵀ`. Since ‖p - e_y‖² ≤ 2, the
    first factor of the Hessian is at most ½ and ‖x‖ = 1, for every partition of the examples and at every W

        L = ½,    σ_l² ≤ 2,    σ_g² ≤ 2.

    The exact values at one W: `noise(gradients(data, W), shards)`.
    """

    dim: int = integer(20, low=1, doc="features")
    classes: int = integer(2, low=2, doc="classes")
    size: int = integer(1000, low=2, doc="the number of training examples, and of test examples")
    signal: Number = number(
        5, low=0, doc="scale of the true W: 0 draws labels evenly, larger values make them more certain"
    )
    seed: int = integer(0, low=0, high=2**63 - 1, doc="which draw of W, features and labels")

    reference = "Böhning, Multinomial Logistic Regression Algorithm, Ann. Inst. Statist. Math. 44, 1992"
    model = "linear(bias=false)"
    smoothness = 0.5
    sigma_l = sigma_g = math.sqrt(2)
    examples = ("logistic", "logistic(dim=5, classes=3, size=50)")
    refused = (
        ("logistic(classes=1)", r"allowed: an integer in \[2, inf\)"),
        ("logistic(signal=-1)", r"allowed: a number in \[0, inf\)"),
    )

    def load(self, folder: Path | None = None) -> TaskData:
        rng = keys.generator(self.seed, "logistic")
        x = rng.standard_normal((2 * self.size, self.dim))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        logits = float(self.signal) * x @ rng.standard_normal((self.dim, self.classes))
        y = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1)  # the largest is class k with probability p_k
        (train_x, test_x), (train_y, test_y) = torch.from_numpy(x).float().chunk(2), torch.from_numpy(y).chunk(2)
        return TaskData(train_x, train_y, test_x, test_y, self.classes, loss=cross_entropy, metric=accuracy)

    def gradients(self, data: TaskData, w: Tensor) -> Tensor:
        """Return the gradient of each training example at `w [classes, dim]`, flattened to `[n, classes·dim]`."""
        error = (data.train_x @ w.T).softmax(-1) - torch.nn.functional.one_hot(data.train_y, self.classes)
        return (error.unsqueeze(-1) * data.train_x.unsqueeze(-2)).flatten(1)
