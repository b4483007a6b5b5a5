"""What a method with privacy adds to a round: secret cohorts, the noisy mean, and what the rounds have spent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedcams.errors import SpecError
from fedcams.privacy.secret import chosen
from fedcams.privacy.sums import ClippedSum
from fedcams.sampler import Sampler

if TYPE_CHECKING:
    from torch import Tensor

    from fedcams.rounds.server import Server, ServerState


def check_privacy(server: Server) -> None:
    """Refuse a server whose model, sampler or number of rounds makes the claim of its method's privacy wrong."""
    if server.method.privacy.active and server.buffer_layout is not None:
        raise SpecError(
            f"privacy={server.method.privacy} does not cover buffers, which travel without noise, but this model has "
            f"{server.buffer_layout.names[0]}; use a model without batch-norm statistics, such as one with GroupNorm"
        )
    epsilon_after(server, 1)  # refuses samplers, unknown populations, and targets that no noise meets


def draw_cohort(
    server: Server,
    state: ServerState,
    sampler: Sampler,
    clients: Sequence[int],
    weights: Sequence[float] | None = None,
) -> list[int]:
    """Return those of `clients` that take part in the round after this state, in ascending order.

    With privacy they are drawn from the secret key, because every client is told the run's seed. `weights` are for
    samplers that need them.
    """
    if server.method.privacy.active:
        return chosen(state.secret, state.round + 1, sorted(clients), server.participation.p)
    return sampler.sample(clients, state.round + 1, server.seed, weights)


def noisy_mean(server: Server, state: ServerState, total: ClippedSum) -> Tensor:
    """Return the mean `[d]` of the round after this state, with its noise, on the device of the model."""
    mean = server.method.privacy.noisy_mean(total, server.participation, state.secret, state.round + 1)
    return mean.to(state.x.device)


def epsilon_after(server: Server, rounds: int) -> dict[str, float]:
    """Return the ε that so many rounds have spent, under its name in records; nothing for a method without privacy."""
    privacy = server.method.privacy
    return {"epsilon": privacy.epsilon_after(rounds, server.participation)} if privacy.active else {}
