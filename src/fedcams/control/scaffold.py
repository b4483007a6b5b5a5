"""SCAFFOLD: control variates that remove the clients' drift from their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedcams.compress import Compressor
from fedcams.control.base import Control
from fedcams.errors import SpecError, UpdateError
from fedcams.parts import Parts
from fedcams.registry import nested, register

if TYPE_CHECKING:
    from torch import Tensor


@register("scaffold")
@dataclass(frozen=True)
class Scaffold(Control):
    """Takes local steps along `g - c_i + c`, then sets `c_i⁺ = c_i - c - Δ_i/Σ rates`, the paper's Option II.

    The server adds `|S|/N mean(c_i⁺ - c_i)` over the accepted clients S to c, so c stays the mean of all c_i. Needs
    local steps of rate times gradient, and the number N of clients.
    """

    codec: Compressor = nested("compressor", "identity", doc="how the change of a client's variate travels")

    reference = "Karimireddy et al.: SCAFFOLD: Stochastic Controlled Averaging, ICML 2020"
    examples = ("scaffold", "scaffold(blockq(bits=8))")
    refused = (("scaffold(codec=none)", "no compressor is named 'none'"),)

    def shift(self, c: Tensor, rows: Tensor) -> Tensor:
        return c - rows

    def change(self, c: Tensor, rows: Tensor, delta: Tensor, rate_sum: Tensor) -> Tensor:
        rates = rate_sum.to(delta.dtype)[:, None]
        moved = -delta / rates.where(rates > 0, 1.0) - c
        return moved * (rates > 0)  # no steps, no change

    def step_(self, c: Tensor, mean_change: Tensor, accepted: int, population: int) -> None:
        if not 1 <= accepted <= population:
            raise UpdateError(
                f"scaffold: accepted={accepted} of population={population}; give the number of clients as population"
            )
        c.add_(mean_change, alpha=accepted / population)

    def check(self, method: Parts) -> None:
        if not method.local.steps_are_rates:
            raise SpecError(
                f"scaffold computes gradients from updates, but steps of {method.local} are not rate times gradient; "
                "choose sgd without momentum, weight_decay, clip and prox, or control=none"
            )
