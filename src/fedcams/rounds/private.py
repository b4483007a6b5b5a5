"""What a method with privacy adds to a round: secret cohorts, noise on either side, and what the rounds have spent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedcams.errors import SpecError
from fedcams.layout import Layout
from fedcams.method import Method
from fedcams.privacy import Participation
from fedcams.privacy.secret import chosen, client_key
from fedcams.privacy.sums import ClippedSum
from fedcams.rounds.sending import Sending

if TYPE_CHECKING:
    from torch import Tensor

    from fedcams.rounds.server import Server, ServerState

NoiseKeys = Callable[[int], str]
"""Client -> the key of its noise."""


def check_privacy(server: Server) -> None:
    """Refuse a server whose model, sampler or number of rounds makes the claim of its method's privacy wrong."""
    check_buffers(server.method, server.buffer_layout)
    if server.method.privacy.active:  # refuses samplers, unknown populations, and targets that no noise meets
        server.method.privacy.multiplier(server.participation)


def check_buffers(method: Method, buffer_layout: Layout | None) -> None:
    """Refuse buffers next to privacy; a site checks this too, because its server says which arrays are buffers."""
    if method.privacy.active and buffer_layout is not None:
        raise SpecError(
            f"privacy={method.privacy} does not cover buffers, which travel without noise, but this model has "
            f"{buffer_layout.names[0]}; use a model without batch-norm statistics, such as one with GroupNorm"
        )


def draw_cohort(server: Server, state: ServerState, clients: Sequence[int]) -> list[int]:
    """Return those of `clients` that take part in the round after this state, in ascending order.

    With noise at the server they are drawn from the secret key, because every client is told the run's seed. Noise at
    the client does not need that: its claim does not rely on who is asked.
    """
    if server.method.privacy.active and not server.method.privacy.at_client:
        return chosen(state.secret, state.round + 1, sorted(clients), server.participation.p)
    assert server.sampler is not None, "a server that draws cohorts has a sampler"
    weights = None if server.sampling_weights is None else [server.sampling_weights[client] for client in clients]
    return server.sampler.sample(clients, state.round + 1, server.seed, weights)


def noisy_mean(server: Server, state: ServerState, total: ClippedSum) -> Tensor:
    """Return the mean `[d]` of the round after this state, with its noise, on the device of the model."""
    mean = server.method.privacy.noisy_mean(total, server.participation, state.secret, state.round + 1)
    return mean.to(state.x.device)


def epsilon_after(server: Server, state: ServerState) -> dict[str, float]:
    """Return what the rounds up to this state have spent, by its names in records; nothing without privacy."""
    privacy = server.method.privacy
    if not privacy.active:
        return {}
    return privacy.epsilon_after(state.round, server.participation, state.spent, server.method)


# -- noise at the client -----------------------------------------------------------------------------------------------


def simulated_keys(secret: str) -> NoiseKeys:
    """Return the keys of all simulated clients; sites of a federation have their own keys, see `SiteSecret`."""
    return functools.partial(client_key, secret)


def with_noise_(sending: Sending, failed: Collection[int], rounds: int | None, keys: NoiseKeys | None) -> Sending:
    """Return what clients send when they add noise: their updates, clipped and with noise, in place, and nothing else.

    `failed` are those whose training failed, and `rounds` is the length of the run. Refuses clients without keys.
    """
    privacy, facts = sending.method.privacy, sending.facts
    if keys is None:
        raise SpecError(f"privacy={privacy}: clients add noise, but there are no keys; give Client(noise_keys=...)")
    sending = _without_facts_(sending, failed)
    who = Participation(1.0, len(facts.ids), rounds)
    privacy.perturb_(sending.h, [keys(client) for client in facts.ids], facts.round, who)
    return sending


def _without_facts_(sending: Sending, failed: Collection[int]) -> Sending:
    """Return what clients send without losses and counts; overwrites the rows of those whose training failed with 0.

    These have no noise, so the server must not see them; and a missing update would reveal that training failed.
    """
    places = [place for place, client in enumerate(sending.facts.ids) if client in failed]
    sending.h[places] = 0
    nothing = (0,) * len(sending.facts.ids)
    facts = replace(sending.facts, examples=nothing, steps=nothing)
    return replace(sending, facts=facts, losses=[0.0] * len(nothing))
