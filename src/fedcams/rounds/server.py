"""The server's side of a round: its state, what it sends, and how the arrivals of a cohort become the next model.

`instruct` makes the instructions of a round as bytes, an `Intake` takes the replies, and `conclude_` makes the step.
A simulation delivers models and takes arrivals as rows instead; everything else is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from fedcams.compress.identity import IDENTITY
from fedcams.downlink import ROWS, Broadcast, Part
from fedcams.errors import LayoutError, SpecError, UpdateError
from fedcams.guards import Norms, Past
from fedcams.layout import Layout
from fedcams.method import BUFFERS, CONTROL, Method
from fedcams.privacy import Participation, Spent
from fedcams.privacy.secret import new_key
from fedcams.rounds.cohort import beside_the_model
from fedcams.rounds.intake import Intake
from fedcams.rounds.messages import Accepted, Instruction, Refusal, Reply
from fedcams.rounds.private import check_privacy
from fedcams.rows import RowStore
from fedcams.sampler import Sampler
from fedcams.transforms import Facts
from fedcams.wire import encode

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Server:
    """Everything about the server that does not change during a run."""

    method: Method
    layout: Layout
    buffer_layout: Layout | None = None
    seed: int = 0
    rounds: int | None = None
    """The number of rounds in the run, for schedules that depend on it."""
    population: int = 0
    """The number of clients; 0 if it is not known."""
    replicas: RowStore | None = None
    """The models that clients hold, for downlinks that keep them at the server; in memory unless given."""
    sampler: Sampler | None = None
    """What chooses the cohorts; needed to draw them, and if the method's weights come from it."""
    sampling_weights: Mapping[int, float] | None = None
    """The weights of all clients that the sampler draws by, if it needs them."""

    def __post_init__(self) -> None:
        needed = replica_layouts(self.method, self.layout, self.buffer_layout)
        if self.replicas is None and needed:
            object.__setattr__(self, "replicas", RowStore.in_memory(needed))
        if self.replicas is not None and dict(self.replicas.layouts) != needed:
            raise LayoutError(
                f"replicas has rows that do not match this model's layout, d={self.layout.d}; give an empty store"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise SpecError(f"seed={self.seed}; allowed: a signed 64-bit integer")
        if self.method.weighting == "sampler" and self.sampler is None:
            raise SpecError("weighting=sampler: this server does not know the sampler; give Server(sampler=...)")
        if self.method.control.active and not self.population:
            raise SpecError(
                f"control={self.method.control} needs the number of all clients, but population=0; "
                "give Server(population=...)"
            )
        self.method.check_rounds(self.rounds)
        check_privacy(self)

    @cached_property
    def participation(self) -> Participation:
        """Who may take part, for a method with privacy; refuses what makes its claim wrong."""
        return self.method.privacy.participation(self.sampler, self.population, self.rounds)

    def weights(self, ids: Sequence[int], examples: Sequence[int], round: int) -> tuple[float, ...]:
        """Return the weights of clients with this many examples in the mean of a round, not normalised."""
        if self.method.weighting == "sampler" and self.sampler is not None:
            return tuple(self.sampler.mean_weights(ids, round, self.sampling_weights))
        return tuple(float(count) if self.method.weighting == "examples" else 1.0 for count in examples)


def replica_layouts(method: Method, layout: Layout, buffer_layout: Layout | None) -> dict[str, Layout]:
    """Return the layouts of the rows that a server keeps of each client's model, by name; empty if it keeps none."""
    if not method.downlink.server_keeps_rows:
        return {}
    return {ROWS[name]: held for name, held in method.delivered(layout, buffer_layout).items()}


class Averaged(NamedTuple):
    """The running average of the server's models; it is evaluated and saved, but never trained from."""

    x: Tensor
    buffers: Tensor | None


class ServerState(NamedTuple):
    """Everything that changes from round to round and is needed to continue after a restart."""

    round: int
    x: Tensor
    buffers: Tensor | None
    optimizer: Any
    downlink: Any
    accepted: Mapping[int, Accepted]
    control: Tensor | None
    average: Averaged | None
    guard: Past
    secret: str
    """The key of noise and cohorts, for a method with privacy; anyone who has it can remove the noise."""
    spent: Spent
    """What a method with privacy counts for each client."""


class Concluded(NamedTuple):
    """The outcome of a round; without an accepted update there was no step, and the norm is zero."""

    round: int
    accepted: list[int]
    refused: dict[int, str]
    """Client -> why it was refused. Clients that were out of step receive the dense model next."""
    delta_norm: float
    mean: Tensor | None
    """`[d]`, the mean update of the step; None without a step."""
    facts: Facts
    """The facts of the accepted clients."""
    train_loss: float | None
    """The mean of the accepted clients' losses; None if no client was accepted."""
    skipped: str = ""
    """Why there was no step although nothing went wrong: fewer updates were accepted than `min_replies`."""


def start(server: Server, x: Tensor, buffers: Tensor | None = None) -> ServerState:
    """Return the state before the first round, for a model `x [d]` with buffers; refuses an x that is not finite."""
    server.layout.check_finite(x, "model")
    method = server.method
    control = method.control.init(x) if method.control.active else None
    average = None
    if method.average.active:
        average = Averaged(method.average.init(x), None if buffers is None else method.average.init(buffers))
    carried = _carried(server, method, buffers)
    downlink = method.downlink.init(x) if carried is None else method.downlink.init(x, carried)
    secret = new_key() if method.privacy.active and not method.privacy.at_client else ""
    return ServerState(0, x, buffers, method.server.init(x), downlink, {}, control, average, {}, secret, {})


def broadcast(server: Server, state: ServerState) -> Broadcast:
    """Return what a downlink needs to send this state's model to clients."""
    round = state.round + 1
    buffers = _carried(server, server.method.in_round(round, server.rounds), state.buffers)
    return Broadcast(state.x, server.layout, round, server.seed, server.replicas, buffers)


def _carried(server: Server, method: Method, buffers: Tensor | None) -> Part | None:
    """Return the buffers and the method's codec for them, if they travel by the downlink's rule; None otherwise."""
    layout = method.delivered(server.layout, server.buffer_layout).get(BUFFERS)
    if layout is None or buffers is None:
        return None
    return Part(BUFFERS, buffers, layout, method.buffers)


def instruct(server: Server, state: ServerState, cohort: Collection[int]) -> tuple[dict[int, Instruction], ServerState]:
    """Return the instructions of the next round, by client in ascending id, and the state until `conclude_`.

    A message that is lost, in either direction, changes nothing: the next one builds on what the client last said.
    """
    downlink = server.method.in_round(state.round + 1, server.rounds).downlink
    streams, sent = downlink.send(state.downlink, broadcast(server, state), sorted(cohort))
    others = _beside(server, state)
    instructions = {
        client: Instruction(
            state.round + 1, client, server.seed, {**others, **own}, state.accepted.get(client), crc_checked=True
        )
        for client, own in streams.items()
    }
    return instructions, state._replace(downlink=sent)


def resend(server: Server, state: ServerState, refusal: Refusal) -> tuple[Instruction, ServerState]:
    """Return another instruction for a client that refused the first, built on what it holds, and the state."""
    if refusal.round != state.round + 1:
        raise UpdateError(f"a refusal of round {refusal.round} in round {state.round + 1}; it came too late")
    told = server.method.downlink.acknowledge(
        state.downlink, broadcast(server, state), {refusal.client: refusal.held}, closing=False
    )
    instructions, state = instruct(server, state._replace(downlink=told), [refusal.client])
    return instructions[refusal.client], state


def take_answers(
    server: Server,
    state: ServerState,
    cohort: Collection[int],
    answers: Iterable[Reply | Refusal],
    in_order: bool = False,
) -> Intake:
    """Return the intake of a round with these answers; invalid ones are refused with a reason, the others count.

    With `in_order`, replies must come in ascending client id, and only one of them is held in memory at a time.
    `answers` are read a second time if some row may be too long, once the norms of the whole cohort are known.
    """
    answers = list(answers) if isinstance(answers, Iterator) else answers
    intake = _offered(Intake(server, state, cohort, in_order), answers)
    bounds = intake.bounds_by(intake.norms)
    if bounds != intake.bounds and any(_exceed(intake.norms, limits) for limits in (bounds, intake.bounds)):
        intake = _offered(Intake(server, state, cohort, in_order, bounds), answers)
    return intake


def _offered(intake: Intake, answers: Iterable[Reply | Refusal]) -> Intake:
    for answer in answers:
        intake.offer(answer)
    return intake


def _exceed(norms: Norms, bounds: Mapping[str, float]) -> bool:
    """Return whether any row is longer than these bounds allow."""
    return any(not norm <= bounds.get(name, inf) for known in norms.values() for name, norm in known.items())


def conclude_(server: Server, state: ServerState, intake: Intake) -> tuple[ServerState, Concluded]:
    """Return the state after the round, and the round's outcome; an empty intake leaves the model unchanged.

    Overwrites the tensors of the old state.
    """
    round, method, means = state.round + 1, intake.method, intake.means
    accepted = {**state.accepted, **{client: Accepted(round, name) for client, name in intake.digests.items()}}
    told = method.downlink.acknowledge(state.downlink, broadcast(server, state), intake.acks)
    seen = method.guard.observe(state.guard, round, intake.norms)
    facts, loss = intake.facts(), intake.mean_loss()
    spent = method.privacy.observe(state.spent, intake.cohort, len(facts.ids))
    state = state._replace(round=round, accepted=accepted, downlink=told, guard=seen, spent=spent)
    if means is None:
        return state, Concluded(round, [], intake.refused, 0.0, None, facts, None, intake.skipped)
    x, optimizer = method.server.step_(state.optimizer, state.x, means.update)
    if state.control is not None and means.control is not None:
        method.control.step_(state.control, means.control, len(facts.ids), server.population)
    buffers = state.buffers if means.buffers is None else means.buffers
    state = _averaged_(method, state._replace(x=x, optimizer=optimizer, buffers=buffers))
    return state, Concluded(round, list(facts.ids), intake.refused, means.norm, means.update, facts, loss)


def _beside(server: Server, state: ServerState) -> dict[str, bytes]:
    """Return the payloads that instructions carry besides what the downlink sends, by name."""
    vectors = {BUFFERS: state.buffers, CONTROL: state.control}
    layouts = beside_the_model(server.method, server.layout, server.buffer_layout)
    found = ((name, vectors[name], layout) for name, layout in layouts.items())
    return {name: encode(IDENTITY, vector, layout) for name, vector, layout in found if vector is not None}


def _averaged_(method: Method, state: ServerState) -> ServerState:
    """Return the state with its average moved towards the new model, in place."""
    if state.average is None:
        return state
    steps = state.optimizer.t
    method.average.step_(state.average.x, state.x, steps)
    if state.average.buffers is not None and state.buffers is not None:
        method.average.step_(state.average.buffers, state.buffers, steps)
    return state
