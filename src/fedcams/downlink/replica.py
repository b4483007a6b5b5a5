"""Replicas: the server keeps each client's model, so a contact costs the same however long the client was away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedcams.compress import Compressor
from fedcams.downlink.base import (
    REPLICA,
    Broadcast,
    Delivery,
    Downlink,
    DownlinkCost,
    Sent,
    bound_of,
    check_contractive,
)
from fedcams.downlink.message import (
    ADD,
    Held,
    Message,
    as_bytes,
    as_tensor,
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


class ReplicaState(NamedTuple):
    """What the server knows about the clients' models; their values are rows of a store."""

    initial: Tensor | None
    """The model that clients hold before their first contact; None if they hold none."""
    digests: Mapping[int, str]
    """Client -> digest of its row; empty if a message cannot build on it. A simulation has no digests."""
    sent: Mapping[int, Tensor]
    """Client -> the message that was sent to it in this round, as bytes, until the round ends."""
    round: int
    """The round of the messages in `sent`."""
    results: Mapping[int, str]
    """Client -> the digest of the model that its message makes."""


@register("replica")
@dataclass(frozen=True)
class Replica(Downlink):
    """Keeps for every client i the model y_i that it holds, and sends C(x - y_i), which both sides add.

    What C loses stays in x - y_i and is sent later. The rows take as much memory as the clients' residuals. y_i changes
    only when the client says that it holds the new model.
    """

    codec: Compressor = nested("compressor", doc="how a difference travels; must be contractive")
    warm: bool = flag(False, doc="clients already hold the initial model, so a first contact sends no dense model")

    client_keeps_model = True
    server_keeps_rows = True
    examples = ("replica(blockq)", "replica(topk(ratio=1/64))", "replica(blockq(bits=2), warm=true)")
    refused = (("replica(randk(ratio=0.5, scaled=true))", "has no bound"), ("replica(topk)", "give either ratio"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_contractive(self.name, self.codec)

    def init(self, x: Tensor) -> ReplicaState:
        return ReplicaState(x.clone() if self.warm else None, {}, {}, 0, {})

    # -- the server's side ---------------------------------------------------------------------------------------

    def send(
        self, state: ReplicaState, broadcast: Broadcast, clients: Sequence[int]
    ) -> tuple[dict[int, bytes], ReplicaState]:
        messages = {client: self._message(state, broadcast, client) for client in clients}
        made = {client: message.to_bytes() for client, message in messages.items()}
        sent = {**state.sent, **{client: as_tensor(data) for client, data in made.items()}}
        results = {**state.results, **{client: message.result.digest.hex() for client, message in messages.items()}}
        return made, state._replace(sent=sent, round=broadcast.round, results=results)

    def _message(self, state: ReplicaState, broadcast: Broadcast, client: int) -> Message:
        base = _base(state, broadcast, client)
        if base is None:
            return dense_message(broadcast.x, broadcast.layout, Held(broadcast.round, digest_of(broadcast.x)))
        row = self._rows(state, broadcast, [client])[0]
        code = self.codec.encode(broadcast.x - row, broadcast.layout, broadcast.key(client))
        after = self.codec.add_to_(row, code, broadcast.layout)
        return Message(ADD, base, Held(broadcast.round, digest_of(after)), [pack(self.codec, code, broadcast.layout)])

    def expected(self, state: ReplicaState, client: int) -> Held | None:
        return Held(state.round, bytes.fromhex(state.results[client])) if client in state.results else None

    def acknowledge(
        self, state: ReplicaState, broadcast: Broadcast, acks: Mapping[int, Held | None], closing: bool = True
    ) -> ReplicaState:
        digests = dict(state.digests)
        for client, held in sorted(acks.items()):
            if closing and held is not None and held == self.expected(state, client):  # a row changes once per round
                self._follow(state, broadcast, client)
                digests[client] = held.digest.hex()
            elif held is None or held != _base(state, broadcast, client):
                digests[client] = ""  # its row cannot be used until it has received the dense model
        state = state._replace(digests=dict(sorted(digests.items())))
        return state._replace(sent={}, results={}) if closing else state

    def _follow(self, state: ReplicaState, broadcast: Broadcast, client: int) -> None:
        """Apply the message that the client acknowledged to its row."""
        message = Message.from_bytes(as_bytes(state.sent[client]))
        row = None if message.base is None else self._rows(state, broadcast, [client])[0].cpu()
        _store(broadcast).commit([client], {REPLICA: message.apply(row, broadcast.layout)[None]}, broadcast.round)

    def _rows(self, state: ReplicaState, broadcast: Broadcast, clients: Sequence[int]) -> Tensor:
        """Return what these clients hold `[C, d]`, on the device of x: the initial model for those not seen."""
        store = _store(broadcast)
        rows = store.gather(REPLICA, clients).to(broadcast.x.device)
        for row, client in zip(rows, clients, strict=True):
            if store.round_of(client) is None and state.initial is not None:
                row.copy_(state.initial)
        return rows

    # -- in a simulation -----------------------------------------------------------------------------------------

    def deliver(self, state: ReplicaState, broadcast: Broadcast, clients: Sequence[int]) -> Delivery:
        store, dense = _store(broadcast), dense_size(broadcast.layout)
        rows = self._rows(state, broadcast, clients)
        there = [i for i, client in enumerate(clients) if self.warm or store.round_of(client) is not None]
        new = [i for i in range(len(clients)) if i not in there]
        rows[new] = broadcast.x
        sent = [Sent("dense", dense)] * len(clients)
        if there:
            base = rows[there]
            code = self.codec.encode(broadcast.x - base, broadcast.layout, [broadcast.key(clients[i]) for i in there])
            rows[there] = self.codec.add_to_(base, code, broadcast.layout)
            for i, payload in zip(there, sizes(self.codec, code, broadcast.layout), strict=True):
                sent[i] = Sent("delta", message_size([payload]))
        store.commit(clients, {REPLICA: rows}, broadcast.round)
        return Delivery(rows, sent, state)

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
    """Return what the client is known to hold; None if the server does not have the same model."""
    version, name = _store(broadcast).round_of(client), state.digests.get(client)
    if version is not None:
        return Held(version, bytes.fromhex(name)) if name else None
    if state.initial is None or name == "":
        return None
    return Held(0, digest_of(state.initial))
