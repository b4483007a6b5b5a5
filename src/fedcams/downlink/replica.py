"""Replicas: the server keeps each client's model, so a contact costs the same however long the client was away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from fedcams.compress import Compressor
from fedcams.downlink.base import (
    ROWS,
    Broadcast,
    Delivery,
    Downlink,
    DownlinkCost,
    Part,
    Sent,
    Streams,
    bound_of,
    check_contractive,
)
from fedcams.downlink.catchup import Kind
from fedcams.downlink.message import (
    ADD,
    BUFFERS,
    MODEL,
    Held,
    Message,
    apply_messages,
    as_bytes,
    as_tensor,
    base_of,
    dense_message,
    dense_size,
    digest_of,
    message_size,
)
from fedcams.layout import Layout
from fedcams.registry import flag, nested, register
from fedcams.rows import RowStore
from fedcams.sampler import Contacts
from fedcams.wire import pack, sizes
from fedcams.wire.estimate import payload_bytes

if TYPE_CHECKING:
    from torch import Tensor


class ReplicaState(NamedTuple):
    """What the server knows about the clients' models; their values are rows of a store."""

    initial: Mapping[str, Tensor]
    """What clients hold before their first contact, by name; empty if they hold nothing."""
    digests: Mapping[int, str]
    """Client -> digest of its rows; empty if a message cannot build on them. A simulation has no digests."""
    sent: Mapping[int, Mapping[str, Tensor]]
    """Client -> the messages that were sent to it in this round, as bytes by name, until the round ends."""
    round: int
    """The round of the messages in `sent`."""
    results: Mapping[int, str]
    """Client -> the digest of what its messages make."""
    buffers: Mapping[int, Tensor]
    """Client -> the buffers `[b]` that its messages make, until the round ends."""


@register("replica")
@dataclass(frozen=True)
class Replica(Downlink):
    """Keeps for every client i the model y_i that it holds, and sends C(x - y_i), which both sides add.

    What C loses stays in x - y_i and is sent later. The rows take as much memory as the clients' residuals. y_i changes
    only when the client reports that it holds the new model.
    """

    codec: Compressor = nested("compressor", doc="how a difference travels; must be contractive")
    warm: bool = flag(False, doc="clients already hold the initial model, so a first contact sends no dense model")

    client_keeps_model = True
    server_keeps_rows = True
    carries_buffers = True
    hides_cohorts = True
    examples = ("replica(blockq)", "replica(topk(ratio=1/64))", "replica(blockq(bits=2), warm=true)")
    refused = (("replica(randk(ratio=0.5, scaled=true))", "has no bound"), ("replica(topk)", "give either ratio"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_contractive(self.name, self.codec)

    @property
    def starts_warm(self) -> bool:
        return self.warm

    def init(self, x: Tensor, buffers: Part | None = None) -> ReplicaState:
        given = {MODEL: x} | ({} if buffers is None else {BUFFERS: buffers.values})
        initial = {name: vector.clone() for name, vector in given.items()} if self.warm else {}
        return ReplicaState(initial, {}, {}, 0, {}, {})

    # -- the server's side ---------------------------------------------------------------------------------------

    def send(
        self, state: ReplicaState, broadcast: Broadcast, clients: Sequence[int]
    ) -> tuple[dict[int, Streams], ReplicaState]:
        streams: dict[int, Streams] = {}
        sent, results, buffers = dict(state.sent), dict(state.results), dict(state.buffers)
        for client in clients:
            messages, after = self._messages(state, broadcast, client)
            streams[client] = {name: message.to_bytes() for name, message in messages.items()}
            sent[client] = {name: as_tensor(data) for name, data in streams[client].items()}
            results[client] = messages[MODEL].result.digest.hex()
            buffers |= {client: after[BUFFERS]} if BUFFERS in after else {}
        return streams, state._replace(sent=sent, round=broadcast.round, results=results, buffers=buffers)

    def _messages(
        self, state: ReplicaState, broadcast: Broadcast, client: int
    ) -> tuple[dict[str, Message], dict[str, Tensor]]:
        """Return the messages for a client, and what it holds once it has received them, by name."""
        parts, base = broadcast.parts(self.codec), _base(state, broadcast, client)
        if base is None:
            after = {name: part.values for name, part in parts.items()}
            result = Held(broadcast.round, digest_of(*after.values()))
            return {name: dense_message(part.values, part.layout, result) for name, part in parts.items()}, after
        after = {name: self._rows(state, broadcast, part, [client])[0] for name, part in parts.items()}
        codes = {name: part.move_(after[name], broadcast.key(client, name)) for name, part in parts.items()}
        result = Held(broadcast.round, digest_of(*after.values()))
        payloads = {name: pack(part.codec, codes[name], part.layout) for name, part in parts.items()}
        return {name: Message(ADD, base, result, [payload]) for name, payload in payloads.items()}, after

    def expected(self, state: ReplicaState, client: int) -> Held | None:
        return Held(state.round, bytes.fromhex(state.results[client])) if client in state.results else None

    def buffers_of(self, state: ReplicaState, client: int) -> Tensor | None:
        return state.buffers.get(client)

    def acknowledge(
        self, state: ReplicaState, broadcast: Broadcast, acks: Mapping[int, Held | None], closing: bool = True
    ) -> ReplicaState:
        digests = dict(state.digests)
        for client, held in sorted(acks.items()):
            if closing and held is not None and held == self.expected(state, client):  # rows change once per round
                self._follow(state, broadcast, client)
                digests[client] = held.digest.hex()
            elif held is None or held != _base(state, broadcast, client):
                digests[client] = ""  # its rows cannot be used until it has received the dense model
        state = state._replace(digests=dict(sorted(digests.items())))
        return state._replace(sent={}, results={}, buffers={}) if closing else state

    def _follow(self, state: ReplicaState, broadcast: Broadcast, client: int) -> None:
        """Apply the messages that the client acknowledged to its rows."""
        parts = broadcast.parts(self.codec)
        messages = {name: Message.from_bytes(as_bytes(data)) for name, data in state.sent[client].items()}
        known = {} if base_of(messages) is None else parts
        base = {name: self._rows(state, broadcast, part, [client])[0].cpu() for name, part in known.items()}
        after = apply_messages(messages, base, {name: part.layout for name, part in parts.items()})
        rows = {ROWS[name]: vector[None] for name, vector in after.items()}
        _store(broadcast).commit([client], rows, broadcast.round)

    def _rows(self, state: ReplicaState, broadcast: Broadcast, part: Part, clients: Sequence[int]) -> Tensor:
        """Return what these clients hold `[C, d]`, on the device of x: the initial vector for those not seen."""
        store = _store(broadcast)
        rows = store.gather(ROWS[part.name], clients).to(part.values.device)
        for row, client in zip(rows, clients, strict=True):
            if store.round_of(client) is None and part.name in state.initial:
                row.copy_(state.initial[part.name])
        return rows

    # -- in a simulation -----------------------------------------------------------------------------------------

    def deliver(self, state: ReplicaState, broadcast: Broadcast, clients: Sequence[int]) -> Delivery:
        store = _store(broadcast)
        holding = [i for i, client in enumerate(clients) if self.warm or store.round_of(client) is not None]
        kinds: list[Kind] = ["delta" if i in holding else "dense" for i in range(len(clients))]
        parts = broadcast.parts(self.codec)
        made = {name: self._moved(state, broadcast, part, clients, holding) for name, part in parts.items()}
        store.commit(clients, {ROWS[name]: rows for name, (rows, _) in made.items()}, broadcast.round)
        counts = [counts for _, counts in made.values()]
        sent = [Sent(kind, *each) for kind, *each in zip(kinds, *counts, strict=True)]
        buffers = made[BUFFERS][0] if BUFFERS in made else None
        held = {} if buffers is None else dict(zip(clients, buffers, strict=True))
        return Delivery(made[MODEL][0], sent, state._replace(buffers=held), buffers)

    def _moved(
        self, state: ReplicaState, broadcast: Broadcast, part: Part, clients: Sequence[int], holding: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """Return what these clients hold afterwards `[C, d]`, and the bytes of each one's message.

        `holding` are the places of those that hold something; the others receive the dense vector.
        """
        rows, counts = self._rows(state, broadcast, part, clients), [dense_size(part.layout)] * len(clients)
        rows[[i for i in range(len(clients)) if i not in holding]] = part.values
        if holding:
            moved = rows[holding]
            code = part.move_(moved, [broadcast.key(clients[i], part.name) for i in holding])
            rows[holding] = moved
            for i, payload in zip(holding, sizes(part.codec, code, part.layout), strict=True):
                counts[i] = message_size([payload])
        return rows, counts

    def for_buffers(self, codec: Compressor) -> Self:
        return replace(self, codec=codec)

    def paper_bits(self, layout: Layout) -> int:
        return self.codec.paper_bits(layout)

    def cost(self, layout: Layout, contacts: Contacts, rounds: int) -> DownlinkCost:
        """Return the cost of one delta per contact, whatever was missed; first contacts are dense unless `warm`."""
        delta, again = message_size([payload_bytes(self.codec, layout)]), float(contacts.gaps.sum())
        return DownlinkCost(
            deltas=delta * (again + self.warm * contacts.seen),
            catchup=0.0,
            dense=dense_size(layout) * contacts.seen * (not self.warm),
            memory=4.0 * layout.d * (contacts.seen + self.warm),  # a row for each client, and the initial model
            bound=bound_of(self.codec, layout),
        )


def _store(broadcast: Broadcast) -> RowStore:
    assert broadcast.replicas is not None, "a server with this downlink has a store"
    return broadcast.replicas


def _base(state: ReplicaState, broadcast: Broadcast, client: int) -> Held | None:
    """Return the name of what the client is known to hold; None if the server does not have the same."""
    version, name = _store(broadcast).round_of(client), state.digests.get(client)
    if version is not None:
        return Held(version, bytes.fromhex(name)) if name else None
    if not state.initial or name == "":
        return None
    return Held(0, digest_of(*state.initial.values()))
