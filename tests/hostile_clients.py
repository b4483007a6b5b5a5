"""Hostile clients for simulations: what they send instead of their trained updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from fedcams.engines import CohortUpdate, Engine, Problem
from fedcams.guards import Adaptive, upper
from fedcams.simulation import Simulation

if TYPE_CHECKING:
    from torch import Tensor

Attack = Callable[[CohortUpdate, int], None]
"""Overwrites the row of a client, given by its place in the cohort."""


def huge_signs_(trained: CohortUpdate, place: int) -> None:
    """Send ±1e3 in every coordinate, as `sign` with that scale would decode."""
    row = trained.delta[place]
    row.copy_(torch.where(row < 0, -1e3, 1e3))


def flipped_(trained: CohortUpdate, place: int) -> None:
    """Send the update times -10: away from the minimum."""
    trained.delta[place] *= -10


def turned_(trained: CohortUpdate, place: int) -> None:
    """Send the update with the opposite sign, as long as an honest one."""
    trained.delta[place] *= -1


def nothing_finite_(trained: CohortUpdate, place: int) -> None:
    """Send NaN."""
    trained.delta[place] = torch.nan


def huge_buffers_(trained: CohortUpdate, place: int) -> None:
    """Send buffers of 1e37, whose sum over a cohort is close to the largest float."""
    if trained.buffers is not None:
        trained.buffers[place] = 1e37


def opposed_(trained: CohortUpdate, place: int) -> None:
    """Send the opposite of what the others learn together, almost as long as the default guard accepts."""
    norms = trained.delta.norm(dim=1).tolist()
    others = [at for at in range(len(norms)) if at != place]
    ahead = trained.delta[others].sum(0)
    bound = 0.98 * float(Adaptive().factor) * upper([norms[at] for at in others])
    trained.delta[place] = ahead * (-bound / float(ahead.norm()))


def small_variance_(trained: CohortUpdate, place: int) -> None:
    """Send the mean buffers of the others, with the smallest value that is always positive raised within the bound."""
    if trained.buffers is None:
        return
    others = trained.buffers[[at for at in range(len(trained.buffers)) if at != place]]
    row = others.mean(0)
    spread = upper((others - row).norm(dim=1).tolist())
    smallest = int(row.masked_fill((others <= 0).any(0), torch.inf).argmin())
    row[smallest] += 3 * float(Adaptive().factor) * spread
    trained.buffers[place] = row


ATTACKS: dict[str, Attack] = {
    "sign of 1e3": huge_signs_,
    "flipped times 10": flipped_,
    "NaN": nothing_finite_,
    "buffers of 1e37": huge_buffers_,
}


class HostileEngine(Engine):
    """Trains with another engine, and then has some clients attack."""

    name = "hostile"

    def __init__(self, inner: Engine, attack: Attack, clients: Sequence[int]) -> None:
        self.inner, self.attack, self.clients = inner, attack, frozenset(clients)

    def train(
        self, problem: Problem, start: Tensor, buffers: Tensor | None, cohort: Sequence[int], round: int, seed: int,
        *, rate: float | None = None, shift: Tensor | None = None,
    ) -> CohortUpdate:  # fmt: skip
        """Return what the inner engine returns, with the rows of hostile clients overwritten."""
        trained = self.inner.train(problem, start, buffers, cohort, round, seed, rate=rate, shift=shift)
        for place, client in enumerate(cohort):
            if client in self.clients:
                self.attack(trained, place)
        return trained

    def supports(self, problem: Problem) -> str:
        """Return why the inner engine does not support this problem, or an empty string."""
        return self.inner.supports(problem)


def attacked(simulation: Simulation, attack: Attack, clients: Sequence[int]) -> Simulation:
    """Return the same simulation in which these clients attack in every round."""
    return dataclasses.replace(simulation, engine=HostileEngine(simulation.engine, attack, clients))
