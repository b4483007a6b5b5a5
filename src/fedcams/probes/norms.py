"""Norms of updates and residuals, and an estimate of the gradient, from numbers that a round has anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.bits.vectors import row_norms
from fedcams.probes.base import Leftovers, Probe
from fedcams.registry import register

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = 2**15
"""Coordinates that are multiplied in float32 at a time; the products are added in float64."""


@register("norms")
@dataclass(frozen=True)
class Norms(Probe):
    """Records `update_norm`, `mean_update_norm`, `residual_norm` and, for plain SGD, `gradient_sq`.

    `update_norm` is the root mean square of the norms of the cohort's updates Δ as trained, `mean_update_norm` the norm
    of their mean, and `residual_norm` the root mean square of what clients keep. `gradient_sq` estimates ‖∇f‖²: with
    `g_i = -Δ_i/(rate·steps)` and their variance s², it is `‖mean g‖² - (1 - n/m) s²/n` for n of m clients. The estimate
    is unbiased for one small local step, and too low if clients move far. It is noisy and may be negative: average it
    over rounds.
    """

    needs = frozenset({"gram"})
    examples = ("norms",)

    def measure(self, left: Leftovers) -> dict[str, float]:
        if left.gram is None or not bool(left.gram.isfinite().all()):  # rows of 1e19 and more overflow
            return {}
        weights = torch.tensor(left.facts.weights, dtype=torch.float64)
        found = {
            "update_norm": float(left.gram.diagonal().mean().sqrt()),
            "mean_update_norm": _length(left.gram, weights / weights.sum()) ** 0.5,
        }
        if left.residual is not None:
            found["residual_norm"] = float(row_norms(left.residual).square().mean().sqrt())
        clients, population = len(left.gram), left.facts.population
        if left.method.local.steps_are_rates and (clients > 1 or clients == population):
            found["gradient_sq"] = _gradient(left, clients, population)
        return found


def _length(gram: Tensor, weights: Tensor) -> float:
    """Return ‖Σ w_i Δ_i‖² from the inner products of the rows."""
    return max(0.0, float(weights @ gram @ weights))


def _gradient(left: Leftovers, clients: int, population: int) -> float:
    """Return the estimate of ‖∇f‖² at the model that the round started from."""
    assert left.gram is not None
    steps = torch.tensor(left.facts.steps, dtype=torch.float64) * left.facts.rate
    gram = left.gram / torch.outer(steps, steps)
    mean = _length(gram, torch.full((clients,), 1 / clients, dtype=torch.float64))
    if clients in (1, population):
        return mean
    variance = (float(gram.diagonal().sum()) - clients * mean) / (clients - 1)
    absent = 1 - clients / population if population else 1.0
    return mean - absent * variance / clients


def inner_products(rows: Tensor) -> Tensor:
    """Return the inner products of rows.

    Arguments:
        rows: `[C, d]`, on any device.

    Returns:
        `[C, C]` in float64, on the CPU; not finite if they overflow.

    Examples:
        >>> import torch
        >>> from fedcams.probes import inner_products
        >>> inner_products(torch.tensor([[1.0, 0.0], [3.0, 4.0]])).tolist()
        [[1.0, 3.0], [3.0, 25.0]]
    """
    total = rows.new_zeros((len(rows), len(rows)), dtype=torch.float64)
    for part in rows.split(COLUMNS if rows.device.type == "cpu" else 2**7 * COLUMNS, dim=1):
        total += part @ part.T
    return total.cpu()
