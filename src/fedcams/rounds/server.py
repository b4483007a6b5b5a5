"""The server's half of a round: `open` instructs the cohort, `close` turns its replies into the next model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from fedcams.aggregate import Aggregator
from fedcams.compress.identity import IDENTITY
from fedcams.downlink import Broadcast, Downlink, Held, OutOfStep, downlink
from fedcams.errors import FedcamsError, LayoutError, SpecError, UpdateError
from fedcams.layout import Layout
from fedcams.optimizers import ServerOptimizer
from fedcams.residuals import ResidualStore
from fedcams.rounds.messages import BUFFERS, MODEL, UPDATE, Accepted, Instruction, Refusal, Reply, expect_streams
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
    replicas: ResidualStore | None = None
    """What clients hold, for a downlink that keeps it at the server; in memory unless given."""
    max_norm: float | None = None
    """The L2 norm above which a decoded update is refused; checking it takes memory for one vector `[d]`."""

    def __post_init__(self) -> None:
        if self.replicas is None and self.downlink.server_keeps_rows:
            object.__setattr__(self, "replicas", ResidualStore.in_memory(self.layout))
        if self.replicas is not None and self.replicas.layout.id != self.layout.id:
            theirs, ours = (f"{layout.id.hex()} with d={layout.d}" for layout in (self.replicas.layout, self.layout))
            raise LayoutError(f"replicas are rows of layout {theirs}, the model's is {ours}; give an empty store")
        if self.weighting not in ("uniform", "examples"):
            raise SpecError(f"weighting={self.weighting!r}; allowed: uniform or examples")
        if not -(2**63) <= self.seed < 2**63:
            raise SpecError(f"seed={self.seed}; allowed: what fits into 64 bits with a sign")
        if self.max_norm is not None and not self.max_norm > 0:
            raise SpecError(f"max_norm={self.max_norm}; allowed: a number above 0, or None for no bound")

    def weight(self, examples: int) -> float:
        """What the update of a client with so many examples counts in the mean."""
        return 1.0 if self.weighting == "uniform" else float(examples)


class ServerState(NamedTuple):
    """What does: everything needed to go on after a restart."""

    round: int
    x: Tensor
    buffers: Tensor | None
    optimizer: Any
    downlink: Any
    accepted: Mapping[int, Accepted]


class Closed(NamedTuple):
    """How a round ended; without an accepted update there was no step and the norm is zero.

    Among the refused are clients that were out of step: the next instruction brings them the dense model.
    """

    round: int
    accepted: list[int]
    refused: dict[int, str]
    delta_norm: float


def start(server: Server, x: Tensor, buffers: Tensor | None = None) -> ServerState:
    """The state before the first round."""
    server.layout.check_finite(x, "model")
    return ServerState(0, x, buffers, server.optimizer.init(x), server.downlink.init(x), {})


def open(server: Server, state: ServerState, cohort: Collection[int]) -> tuple[dict[int, Instruction], ServerState]:
    """The instructions of the next round, client by client in ascending id.

    A message that is lost, in whatever direction, changes nothing: the next one builds on what the client last said.
    """
    models, sent = server.downlink.send(state.downlink, _broadcast(server, state), sorted(cohort))
    rest = {} if state.buffers is None else {BUFFERS: encode(IDENTITY, state.buffers, server.buffer_layout)}
    instructions = {
        client: Instruction(
            state.round + 1, client, server.seed, {MODEL: model, **rest}, state.accepted.get(client), sealed=True
        )
        for client, model in models.items()
    }
    return instructions, state._replace(downlink=sent)


def resend(server: Server, state: ServerState, refusal: Refusal) -> tuple[Instruction, ServerState]:
    """An instruction for a client that refused the one of the round now open, built on what it says it holds."""
    if refusal.round != state.round + 1:
        raise UpdateError(f"a refusal of round {refusal.round} in round {state.round + 1}; it came too late")
    told = server.downlink.acknowledge(
        state.downlink, _broadcast(server, state), {refusal.client: refusal.held}, closing=False
    )
    instructions, state = open(server, state._replace(downlink=told), [refusal.client])
    return instructions[refusal.client], state


def close(
    server: Server,
    state: ServerState,
    cohort: Collection[int],
    answers: Iterable[Reply | Refusal],
    in_order: bool = False,
) -> tuple[ServerState, Closed]:
    """The state after the round. Consumes the old one; a bad reply is refused with its reason, the others count.

    Replies that come one after the other in ascending client id need the memory of one, with `in_order`.
    """
    round = state.round + 1
    intake = _Intake(server, state, cohort, in_order)
    for answer in answers:
        intake.offer(answer)
    delta, buffers = intake.means()
    accepted = {**state.accepted, **{client: Accepted(round, name) for client, name in intake.names.items()}}
    told = server.downlink.acknowledge(state.downlink, _broadcast(server, state), intake.acks)
    state = state._replace(round=round, accepted=accepted, downlink=told)
    if delta is None:
        return state, Closed(round, [], intake.refused, 0.0)
    closed = Closed(round, sorted(intake.names), intake.refused, float(delta.norm()))
    x, optimizer = server.optimizer.step(state.optimizer, state.x, delta)
    return state._replace(x=x, optimizer=optimizer, buffers=state.buffers if buffers is None else buffers), closed


def _broadcast(server: Server, state: ServerState) -> Broadcast:
    return Broadcast(state.x, server.layout, state.round + 1, server.seed, server.replicas)


class _Intake:
    """The answers of one round: what is sound goes into the sums, the rest is refused with a reason."""

    def __init__(self, server: Server, state: ServerState, cohort: Collection[int], in_order: bool) -> None:
        self.server, self.state, self.round, self.cohort = server, state, state.round + 1, cohort
        self.updates = Aggregator(server.layout, in_order=in_order)
        self.buffers = Aggregator(server.buffer_layout, in_order=in_order) if server.buffer_layout else None
        self.names: dict[int, bytes] = {}
        self.acks: dict[int, Held | None] = {}
        """What clients say they hold: even a reply that is refused tells that."""
        self.refused: dict[int, str] = {}

    def offer(self, answer: Reply | Refusal) -> None:
        try:
            self._check(answer)
            self._listen(answer)
            if isinstance(answer, Refusal):
                raise OutOfStep(answer.reason, answer.held)
            self._add(answer)
        except FedcamsError as error:
            self.refused[answer.client] = f"{type(error).__name__}: {error}"

    def _check(self, answer: Reply | Refusal) -> None:
        if answer.round != self.round:
            raise UpdateError(
                f"an update for round {answer.round} in round {self.round}; it came too late or too early"
            )
        if answer.client not in self.cohort:
            raise UpdateError(f"client {answer.client} was not asked in round {self.round}")

    def _listen(self, answer: Reply | Refusal) -> None:
        """That a client holds what it was sent last outweighs anything else it said in this round."""
        if self.acks.get(answer.client) != self._expected(answer.client):
            self.acks[answer.client] = answer.held

    def _expected(self, client: int) -> Held | None:
        return self.server.downlink.expected(self.state.downlink, client)

    def _add(self, reply: Reply) -> None:
        """Everything is checked before anything is added, so that a reply counts whole or not at all."""
        if reply.held != (sent := self._expected(reply.client)):
            raise UpdateError(f"client {reply.client} trained from {reply.held or 'nothing kept'}, and was sent {sent}")
        weight = self.server.weight(reply.examples)
        expect_streams(reply, [UPDATE] if self.buffers is None else [UPDATE, BUFFERS])
        update = unpack(reply.streams[UPDATE], self.server.layout)
        self._check_norm(update)
        buffers = unpack(reply.streams[BUFFERS], self.server.buffer_layout) if self.buffers is not None else None
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
