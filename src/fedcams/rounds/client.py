"""The client's side of a round: train from what was received, encode what to send, keep what the server accepts.

Everything works on rows `[C, d]`: a simulation has one row per client of the cohort, a site has one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from fedcams.buffers import change_between
from fedcams.compress import Code, Compressor
from fedcams.compress.identity import IDENTITY
from fedcams.downlink import MODEL, Held, HeldStore, OutOfStep
from fedcams.engines import CohortUpdate
from fedcams.errors import LayoutError, UpdateError
from fedcams.feedback import encode_with_feedback_
from fedcams.keys import derive
from fedcams.layout import Layout
from fedcams.method import BUFFERS, CONTROL, RESIDUAL, Method
from fedcams.rounds.cohort import Arrival, Outgoing, Received, beside_the_model, check_returned, some_rows
from fedcams.rounds.messages import UPDATE, Instruction, Refusal, Reply, expect_streams
from fedcams.rounds.private import NoiseKeys, check_buffers, with_noise_
from fedcams.rounds.sending import Sending, not_finite, unsound
from fedcams.rows import RowStore
from fedcams.transforms import Facts
from fedcams.wire import decode, pack

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Client:
    """What clients need besides their data: the method, the model's layouts, and the store of their rows."""

    method: Method
    layout: Layout
    buffer_layout: Layout | None = None
    rows: RowStore | None = None
    """The rows that `method.memory` names, for every client; in memory unless given."""
    held: HeldStore | None = None
    """Where clients keep their model, for downlinks that need it."""
    rounds: int | None = None
    """The number of rounds in the run, for schedules that depend on it."""
    population: int = 0
    """The number of clients; 0 if it is not known."""
    noise_keys: NoiseKeys | None = None
    """The keys of the clients' noise, for methods in which clients add it."""

    def __post_init__(self) -> None:
        self.method.check_rounds(self.rounds)
        check_buffers(self.method, self.buffer_layout)
        needed = self.method.memory(self.layout, self.buffer_layout)
        if self.rows is None and needed:
            object.__setattr__(self, "rows", RowStore.in_memory(needed))
        if self.rows is not None and dict(self.rows.layouts) != needed:
            theirs, ours = (
                ", ".join(f"{name} with d={layout.d}" for name, layout in layouts.items()) or "nothing"
                for layouts in (self.rows.layouts, needed)
            )
            raise LayoutError(f"rows has {theirs}, but this method and model need {ours}; give a store made for them")

    def keeps(self, name: str) -> bool:
        """Return whether clients keep a row of this name."""
        return self.rows is not None and name in self.rows.layouts

    def add_kept_(self, name: str, ids: Sequence[int], rows: Tensor) -> None:
        """Add what these clients keep under this name to `rows [C, d]`, in place; nothing if they keep no such row."""
        if self.rows is not None and self.keeps(name):
            self.rows.add_to_(name, ids, rows)

    def controls(self, ids: Sequence[int], device: torch.device) -> Tensor:
        """Return the control variates of these clients `[C, d]` on a device; only for a method that has them."""
        assert self.rows is not None, "a method with control variates has a store"
        return self.rows.gather(CONTROL, ids).to(device)


# -- on rows -----------------------------------------------------------------------------------------------------------


def shift_of(client: Client, ids: Sequence[int], control: Tensor | None) -> Tensor | None:
    """Return what the method's control variates add to every gradient of these clients `[C, d]`; None without them."""
    if control is None:
        return None
    rows = client.controls(ids, control.device)
    shift = client.method.control.shift(control, rows)
    check_returned(f"{client.method.control}: shift", shift, rows)
    return shift


def respond_(
    client: Client,
    ids: Sequence[int],
    received: Received,
    trained: CohortUpdate,
    round: int,
    seed: int,
    needs: Collection[str] = (),
) -> Outgoing:
    """Return what these clients send after training; overwrites `trained.delta`, whose memory the residuals use.

    A client whose loss, buffers or update is not finite sends a refusal instead, or noise alone if clients add noise;
    the others are not affected. No row is stored before `commit`. `needs` is what probes need of it: with `error`, the
    relative compression errors are measured, and with `mean_h`, updates and messages are copied.
    """
    method = client.method.in_round(round, client.rounds)
    losses = trained.loss.tolist()
    examples, steps, ones = tuple(trained.examples), tuple(trained.steps), (1.0,) * len(ids)
    facts = Facts(round, seed, tuple(ids), examples, steps, ones, trained.rate, client.population)
    sending = Sending(method, facts, losses, trained.delta.detach(), trained.buffers, received, {})
    failed = unsound(ids, losses, trained.buffers, client.buffer_layout)
    sending = sending.without({} if method.privacy.at_client else failed)
    if not sending.facts.ids:
        return sending.nothing()
    sending = _message_(client, sending, failed, needs)
    try:
        return _encode_(client, sending, needs)
    except UpdateError:
        bad = _overflows(client, sending)
        if not bad:
            raise
        sending = sending.without(bad)
        return _encode_(client, sending, needs) if sending.facts.ids else sending.nothing()


def _message_(client: Client, sending: Sending, failed: Collection[int], needs: Collection[str]) -> Sending:
    """Turn updates into what is encoded, in place: transform them, add noise if clients do, and add the residual."""
    method, change = sending.method, _control_change(client, sending)
    for transform in method.transforms:
        transform.update_(sending.h, sending.facts, client.layout)
    if method.privacy.at_client:
        sending = with_noise_(sending, failed, client.rounds, client.noise_keys)
    sending = replace(sending, change=change, updates=sending.h.clone() if "mean_h" in needs else None)
    client.add_kept_(RESIDUAL, sending.facts.ids, sending.h)
    for transform in method.transforms:
        transform.message_(sending.h, sending.facts, client.layout)
    method.privacy.clip_(sending.h)
    return sending


def commit(client: Client, outgoing: Outgoing, accepted: Collection[int]) -> None:
    """Store the new rows of the `accepted` clients, once the server has accepted them; other rows do not change."""
    ids = outgoing.arrival.facts.ids
    places = [place for place, client_id in enumerate(ids) if client_id in accepted]
    if client.rows is not None and outgoing.rows and places:
        rows = {name: some_rows(values, places) for name, values in outgoing.rows.items()}
        client.rows.commit([ids[place] for place in places], rows, outgoing.arrival.facts.round)


def _overflows(client: Client, sending: Sending) -> dict[int, str]:
    """Return client -> what is wrong, for clients whose message has a part that is not finite."""
    ids = sending.facts.ids
    found = {} if sending.change is None else not_finite(ids, sending.change, client.layout)
    if client.buffer_layout is not None and sending.buffers is not None:
        found |= not_finite(ids, _buffer_message(client, sending), client.buffer_layout)
    return {**found, **not_finite(ids, sending.h, client.layout)}


def _control_change(client: Client, sending: Sending) -> Tensor | None:
    """Return the change of the clients' control variates `[C, d]`; None without them."""
    control = sending.received.control
    if control is None:
        return None
    old = client.controls(sending.facts.ids, control.device)
    sums = torch.tensor([steps * sending.facts.rate for steps in sending.facts.steps], dtype=torch.float64)
    change = sending.method.control.change(control, old, sending.h, sums.to(control.device))
    check_returned(f"{sending.method.control}: change", change, old)
    return change


def _encode_(client: Client, sending: Sending, needs: Collection[str]) -> Outgoing:
    """Encode everything that travels; the update comes last: it overwrites h, which must survive a failure before."""
    method, facts = sending.method, sending.facts
    keys = [derive(facts.seed, "uplink", facts.round, client_id) for client_id in facts.ids]
    codes: dict[str, tuple[Compressor, Code]] = {}
    rows: dict[str, Tensor] = {}
    if client.buffer_layout is not None and sending.buffers is not None:
        buffers, rest = _encode_buffers(client, sending)
        codes[BUFFERS] = (method.buffers, buffers)
        rows |= {} if rest is None else {BUFFERS: rest}
    if sending.change is not None:
        codec = method.control.codec
        change = codec.encode(sending.change, client.layout, keys)
        codes[CONTROL] = (codec, change)
        old = client.controls(facts.ids, sending.change.device)
        rows[CONTROL] = codec.add_to_(old, change, client.layout)  # adds exactly what the server decodes
    changed = bool(method.transforms) or method.privacy.active
    messages = sending.h.clone() if sending.updates is not None and changed else None
    code, residual, errors = encode_with_feedback_(
        method.uplink, client.layout, sending.h, keys, client.keeps(RESIDUAL), "error" in needs
    )
    codes[UPDATE] = (method.uplink, code)
    rows |= {} if residual is None else {RESIDUAL: residual}
    arrival = Arrival(facts, tuple(sending.losses), codes)
    return Outgoing(arrival, rows, errors, sending.refused, sending.updates, messages)


def _encode_buffers(client: Client, sending: Sending) -> tuple[Code, Tensor | None]:
    """Return the code of the buffers, or of their change if it is compressed, and what compression loses."""
    assert client.buffer_layout is not None
    h = _buffer_message(client, sending)
    codec, facts = sending.method.buffers, sending.facts
    if codec == IDENTITY:
        return {"values": h}, None
    keys = [derive(facts.seed, "buffers", facts.round, client_id) for client_id in facts.ids]
    code, rest, _ = encode_with_feedback_(codec, client.buffer_layout, h, keys, client.keeps(BUFFERS))
    return code, rest


def _buffer_message(client: Client, sending: Sending) -> Tensor:
    """Return what is encoded for the buffers `[C, b]`: the buffers, or their change plus what was lost before."""
    assert sending.buffers is not None
    assert sending.received.buffers is not None
    if sending.method.buffers == IDENTITY:
        return sending.buffers
    assert client.buffer_layout is not None
    h = change_between(sending.received.buffers, sending.buffers, client.buffer_layout)
    client.add_kept_(BUFFERS, sending.facts.ids, h)
    return h


# -- as messages -------------------------------------------------------------------------------------------------------


class ClientUpdate(NamedTuple):
    """The result of one client's training: the change of the parameters `[d]`, the buffers, and its facts."""

    delta: Tensor
    buffers: Tensor | None
    examples: int
    steps: int
    loss: float

    def as_cohort(self, rate: float) -> CohortUpdate:
        """Return the update as that of a cohort of one, trained with this local learning rate."""
        buffers, loss = self.buffers, torch.tensor([self.loss], dtype=torch.float64)
        rows = None if buffers is None else buffers[None]
        return CohortUpdate(self.delta[None], rows, loss, [self.examples], [self.steps], rate)


Train = Callable[[Received, Instruction, "Tensor | None", float], ClientUpdate]
"""(what was received, instruction, shift of the gradients `[d]` or None, local rate) -> ClientUpdate. Shuffles and
augmentation depend only on the instruction's seed, round and client. It may overwrite the model that it is given."""


def answer(client: Client, instruction: Instruction, train: Train) -> tuple[Reply | Refusal, Outgoing | None]:
    """Train one client and return its reply, or its refusal; no row is stored until the outgoing update is committed.

    A client that keeps its model stages the received one first, so that it survives a kill. It refuses an instruction
    that builds on a model that it does not hold, and the result of its own training if that is not finite.
    """
    who, round = instruction.client, instruction.round
    delivered = client.method.delivered(client.layout, client.buffer_layout)
    beside = beside_the_model(client.method, client.layout, client.buffer_layout)
    expect_streams(instruction, {*delivered, *beside})
    streams = {name: instruction.streams[name] for name in delivered}
    try:
        vectors, held = client.method.downlink.receive(streams, delivered, client.held, who, instruction.crc_checked)
    except OutOfStep as error:
        return Refusal(round, who, error.held, str(error)), None
    vectors |= {name: decode(instruction.streams[name], layout) for name, layout in beside.items()}
    received = Received(vectors[MODEL], vectors.get(BUFFERS), vectors.get(CONTROL))
    shift = shift_of(client, [who], received.control)
    rate = float(client.method.in_round(round, client.rounds).local.lr)
    trained = train(received, instruction, None if shift is None else shift[0], rate).as_cohort(rate)
    outgoing = respond_(client, [who], received, trained, round, instruction.seed)
    if outgoing.refused:
        return Refusal(round, who, held, outgoing.refused[who]), None
    return reply_of(outgoing, client.layout, client.buffer_layout, held), outgoing


def is_accepted(sent: Reply, instruction: Instruction) -> bool:
    """Return whether the instruction names this reply as the last one accepted."""
    last = instruction.accepted
    return last is not None and (last.round, last.digest) == (sent.round, sent.digest)


def reply_of(outgoing: Outgoing, layout: Layout, buffer_layout: Layout | None, held: Held | None) -> Reply:
    """Return the message with one client's outgoing update; `held` names the model that it was trained from."""
    facts = outgoing.arrival.facts
    streams = {
        name: pack(
            codec,
            {field: tensor[0] for field, tensor in code.items()},
            buffer_layout if name == BUFFERS and buffer_layout is not None else layout,
        )
        for name, (codec, code) in outgoing.arrival.codes.items()
    }
    about = (facts.examples[0], facts.steps[0], outgoing.arrival.losses[0])
    return Reply(facts.round, facts.ids[0], streams, *about, held)
