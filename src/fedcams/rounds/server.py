"""The server's half of a round: `open` instructs the cohort, `close` turns its replies into the next model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from fedcams.aggregate import Aggregator
from fedcams.downlink import Downlink, downlink
from fedcams.errors import FedcamsError, SpecError, UpdateError
from fedcams.layout import Layout
from fedcams.optimizers import ServerOptimizer
from fedcams.rounds.messages import Accepted, Instruction, Reply
from fedcams.wire import Payload, encode, unpack


@dataclass(frozen=True)
class Server:
    """What does not change during a run."""

    layout: Layout
    optimizer: ServerOptimizer
    seed: int = 0
    buffer_layout: Layout | None = None
    downlink: Downlink = field(default_factory=lambda: downlink("none"))
    weighting: str = "uniform"
    max_norm: float | None = None
    """The L2 norm above which a decoded update is refused; checking it takes memory for one vector `[d]`."""

    def __post_init__(self) -> None:
        if self.weighting not in ("uniform", "examples"):
            raise SpecError(f"weighting={self.weighting!r}; allowed: uniform or examples")
        if not -(2**63) <= self.seed < 2**63:
            raise SpecError(f"seed={self.seed}; allowed: what fits into 64 bits with a sign")
        if self.max_norm is not None and not self.max_norm > 0:
            raise SpecError(f"max_norm={self.max_norm}; allowed: a number above 0, or None for no bound")


class ServerState(NamedTuple):
    """What does: everything needed to go on after a restart."""

    round: int
    x: Tensor
    buffers: Tensor | None
    optimizer: Any
    downlink: Any
    accepted: Mapping[int, Accepted]


class Closed(NamedTuple):
    """How a round ended; without an accepted update there was no step and the norm is zero."""

    round: int
    accepted: list[int]
    refused: dict[int, str]
    delta_norm: float


def start(server: Server, x: Tensor, buffers: Tensor | None = None) -> ServerState:
    """The state before the first round."""
    server.layout.check_finite(x, "model")
    return ServerState(0, x, buffers, server.optimizer.init(x), server.downlink.init(x), {})


def open(server: Server, state: ServerState, cohort: Collection[int]) -> tuple[dict[int, Instruction], ServerState]:
    """The instructions of the next round, client by client in ascending id."""
    models, sent = server.downlink.send(state.downlink, state.x, server.layout, sorted(cohort))
    buffers = b"" if state.buffers is None else encode("identity", state.buffers, server.buffer_layout)
    instructions = {
        client: Instruction(state.round + 1, client, server.seed, model, buffers, state.accepted.get(client))
        for client, model in models.items()
    }
    return instructions, state._replace(downlink=sent)


def close(
    server: Server, state: ServerState, cohort: Collection[int], replies: Iterable[Reply], in_order: bool = False
) -> tuple[ServerState, Closed]:
    """The state after the round. Consumes the old one; a bad reply is refused with its reason, the others count.

    Replies that come one after the other in ascending client id need the memory of one, with `in_order`.
    """
    round = state.round + 1
    intake = _Intake(server, round, cohort, in_order)
    for reply in replies:
        intake.offer(reply)
    delta, buffers = intake.means()
    accepted = {**state.accepted, **{client: Accepted(round, name) for client, name in intake.names.items()}}
    state = state._replace(round=round, accepted=accepted)
    if delta is None:
        return state, Closed(round, [], intake.refused, 0.0)
    closed = Closed(round, sorted(intake.names), intake.refused, float(delta.norm()))
    x, optimizer = server.optimizer.step(state.optimizer, state.x, delta)
    return state._replace(x=x, optimizer=optimizer, buffers=state.buffers if buffers is None else buffers), closed


class _Intake:
    """The replies of one round: what is sound goes into the sums, the rest is refused with a reason."""

    def __init__(self, server: Server, round: int, cohort: Collection[int], in_order: bool) -> None:
        self.server, self.round, self.cohort = server, round, cohort
        self.updates = Aggregator(server.layout, in_order=in_order)
        self.buffers = Aggregator(server.buffer_layout, in_order=in_order) if server.buffer_layout else None
        self.names: dict[int, bytes] = {}
        self.refused: dict[int, str] = {}

    def offer(self, reply: Reply) -> None:
        try:
            self._add(reply)
        except FedcamsError as error:
            self.refused[reply.client] = f"{type(error).__name__}: {error}"

    def _add(self, reply: Reply) -> None:
        """Everything is checked before anything is added, so that a reply counts whole or not at all."""
        if reply.round != self.round:
            raise UpdateError(f"an update for round {reply.round} in round {self.round}; it came too late or too early")
        if reply.client not in self.cohort:
            raise UpdateError(f"client {reply.client} was not asked in round {self.round}")
        weight = 1.0 if self.server.weighting == "uniform" else float(reply.examples)
        update = unpack(reply.payload, self.server.layout)
        self._check_norm(update)
        buffers = unpack(reply.buffers, self.server.buffer_layout) if self.buffers is not None else None
        self.updates.add(reply.client, update, weight)
        if self.buffers is not None and buffers is not None:
            self.buffers.add(reply.client, buffers, weight)
        self.names[reply.client] = reply.digest

    def _check_norm(self, update: Payload) -> None:
        bound = self.server.max_norm
        if bound is not None and not (norm := float(update.decode().norm())) <= bound:
            raise UpdateError(f"an update of norm {norm:.6g}; at most max_norm={bound:g} is taken")

    def means(self) -> tuple[Tensor, Tensor | None] | tuple[None, None]:
        """Of the updates and of the buffers; None where there is none.

        Updates that are finite one by one may overflow together, or when an optimizer squares them: then nobody can
        say whose fault it is, and none counts.
        """
        if not self.names:
            return None, None
        try:
            delta, buffers = self.updates.mean(), None if self.buffers is None else self.buffers.mean()
            if not math.isfinite(norm := float(delta.norm())):
                raise UpdateError(f"the mean of the updates has the norm {norm}; set max_norm to refuse such updates")
            return delta, buffers
        except UpdateError as error:
            self.refused |= dict.fromkeys(self.names, f"{type(error).__name__}: {error}")
            self.names.clear()
            return None, None
