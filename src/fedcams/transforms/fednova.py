"""FedNova: averages updates per local step, so that clients with more steps do not count more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.errors import SpecError, UpdateError
from fedcams.guards import upper
from fedcams.layout import Layout
from fedcams.parts import Parts
from fedcams.registry import register
from fedcams.transforms.base import Facts, Transform

if TYPE_CHECKING:
    from torch import Tensor

MOST = 20
"""How many times the usual number of steps one client may count for: clients state their own, and one could lie."""


@register("fednova")
@dataclass(frozen=True)
class FedNova(Transform):
    """Divides the update of a client with τ_i steps by τ_i, and multiplies the mean by τ_eff = Σ p_i τ_i.

    p_i are the normalised weights of the accepted clients. In τ_eff, a client counts for at most 20 times the number of
    steps that a quarter of them exceed. Needs local steps of rate times gradient.
    """

    reference = "Wang et al.: Tackling the Objective Inconsistency Problem, NeurIPS 2020"
    examples = ("fednova",)
    refused = (("fednova(1)", "at most 0 values"),)

    def update_(self, rows: Tensor, facts: Facts, layout: Layout) -> None:
        steps = torch.tensor(facts.steps, dtype=rows.dtype, device=rows.device)
        rows.div_(steps.clamp(min=1)[:, None])  # without a step there is no update; the server refuses the reply

    def refuses(self, norm: float, facts: Facts) -> str:
        return _without_steps(facts)

    def mean_(self, mean: Tensor, facts: Facts, layout: Layout) -> None:
        if reason := _without_steps(facts):
            raise UpdateError(reason)
        most = MOST * upper(facts.steps)
        weighted = sum(weight * min(steps, most) for weight, steps in zip(facts.weights, facts.steps, strict=True))
        mean.mul_(weighted / sum(facts.weights))

    def check(self, method: Parts) -> None:
        if not method.local.steps_are_rates:
            raise SpecError(
                f"fednova divides an update by its steps, but those of {method.local} are not rate times gradient; "
                "choose sgd without momentum, weight_decay, clip and prox, or leave fednova out"
            )


def _without_steps(facts: Facts) -> str:
    """Return which client took no step, or an empty string."""
    idle = [client for client, steps in zip(facts.ids, facts.steps, strict=True) if steps < 1]
    return f"client {idle[0]} took 0 steps; fednova needs at least one" if idle else ""
