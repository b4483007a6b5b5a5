"""One model shared by all clients: the server sends what moves it towards its own; clients that were away catch up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcams.bits.positions import note_changes
from fedcams.compress import Compressor
from fedcams.downlink.base import Broadcast, Delivery, Downlink, DownlinkCost, Sent, bound_of, check_contractive
from fedcams.downlink.catchup import Catchup, Way, expected_size
from fedcams.downlink.message import ADD, SET, Held, Message, as_tensor, dense_message, dense_size, digest_of
from fedcams.layout import Layout
from fedcams.registry import flag, nested, register
from fedcams.sampler import Contacts
from fedcams.wire import pack
from fedcams.wire.estimate import coordinates_changed, payload_bytes

NOTHING = -1


class SharedState(NamedTuple):
    """The model that the clients of the last round hold, and what brings the others up to date."""

    w: Tensor
    """The broadcast model `[d]`."""
    version: int
    """The round of its last change; 0 for the initial model."""
    touched: Tensor | None
    """int32 `[d]`, the version in which each coordinate last changed; None if every delta changes all of them."""
    log: Mapping[int, Tensor]
    """Version -> the payload, as bytes, that led to it; in total no larger than a dense model, which beats more."""
    since: int
    """The log has all deltas after this version."""
    known: Mapping[int, int]
    """Client -> the version that it said it holds; -1 if the server does not know that model."""
    digests: Mapping[int, str]
    """Version -> digest, for the versions that a client may hold; a simulation has none."""


@register("shared")
@dataclass(frozen=True)
class Shared(Downlink):
    """Keeps the server's x and one model w that clients share; each round sends C(x - w), which all sides add to w.

    What C loses stays in x - w and is sent later. A client that was away receives whatever is cheapest: the deltas that
    it missed, the current values of the coordinates that they changed, or the dense w. Afterwards its w equals the
    server's, bit for bit.
    """

    codec: Compressor = nested("compressor", doc="how a delta travels; must be contractive")
    warm: bool = flag(False, doc="clients already hold the initial model, so a first contact sends no dense model")

    client_keeps_model = True
    examples = ("shared(topk(ratio=1/64))", "shared(blockq)", "shared(sign, warm=true)")
    refused = (
        ("shared", "codec is missing"),
        ("shared(blockq(rounding=stochastic))", "has no bound.*or stateless"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_contractive(self.name, self.codec)

    def init(self, x: Tensor) -> SharedState:
        fields = self.codec.at(1, 1).fields(Layout.flat(x.numel())).values()
        sparse = bool(self.codec.schedules()) or all(field.count < x.numel() for field in fields)  # in some rounds
        touched = torch.zeros(x.numel(), dtype=torch.int32, device=x.device) if sparse else None
        return SharedState(x.clone(), 0, touched, {}, 0, {}, {})

    # -- the server's side ---------------------------------------------------------------------------------------

    def send(
        self, state: SharedState, broadcast: Broadcast, clients: Sequence[int]
    ) -> tuple[dict[int, bytes], SharedState]:
        if not clients:
            return {}, state
        digests = state.digests
        if self.warm and not digests and state.version == 0:
            digests = {0: digest_of(state.w).hex()}
        state = self._advance(state._replace(digests=digests), broadcast)
        if state.version not in state.digests:
            state = state._replace(digests={**state.digests, state.version: digest_of(state.w).hex()})
        made = {version: self._message(state, broadcast, version) for version in self._versions(state, clients)}
        return {i: made[self._held(state, i)] for i in clients}, state

    def _message(self, state: SharedState, broadcast: Broadcast, version: int | None) -> bytes:
        """Return the message for clients that hold this version; the dense model if its digest is not known."""
        result = Held(state.version, bytes.fromhex(state.digests[state.version]))
        if version is None or version not in state.digests:
            return dense_message(state.w, broadcast.layout, result).to_bytes()
        base = Held(version, bytes.fromhex(state.digests[version]))
        way = self.way(state, broadcast.layout, version)
        if way.kind == "dense":
            return dense_message(state.w, broadcast.layout, result).to_bytes()
        return Message(SET if way.replaces else ADD, base, result, way.payloads()).to_bytes()

    def way(self, state: SharedState, layout: Layout, held: int | None, counting: bool = False) -> Way:
        """Return the cheapest way from the version `held`, None for a client without a model, to the current model.

        With `counting`, it has only the size, and nothing is packed.
        """
        kept = (state.w, state.version, state.touched, state.log, state.since)
        return Catchup(*kept, layout, counting).cheapest(held)

    def expected(self, state: SharedState, client: int) -> Held | None:
        name = state.digests.get(state.version)  # missing until this version is sent to a client
        return None if name is None else Held(state.version, bytes.fromhex(name))

    def acknowledge(
        self, state: SharedState, broadcast: Broadcast, acks: Mapping[int, Held | None], closing: bool = True
    ) -> SharedState:
        said = {client: _version(state, held) for client, held in acks.items()}
        known = dict(sorted({**state.known, **said}.items()))
        state = state._replace(known=known)
        needed = {*known.values(), state.version, *([0] if self.warm else [])}
        return state._replace(digests={v: name for v, name in state.digests.items() if v in needed})

    def _advance(self, state: SharedState, broadcast: Broadcast) -> SharedState:
        """Return the state with w moved by C(x - w), once per round; nothing changes while x equals w."""
        if state.version == broadcast.round or torch.equal(broadcast.x, state.w):
            return state
        code = self.codec.encode(broadcast.x - state.w, broadcast.layout, broadcast.key())
        w = self.codec.add_to_(state.w.clone(), code, broadcast.layout)
        touched = None if state.touched is None else note_changes(state.touched, state.w, w, broadcast.round)
        log = {**state.log, broadcast.round: as_tensor(pack(self.codec, code, broadcast.layout))}
        log, since = _bounded(log, state.since, dense_size(broadcast.layout))
        return state._replace(w=w, version=broadcast.round, touched=touched, log=log, since=since)

    def _held(self, state: SharedState, client: int) -> int | None:
        version = state.known.get(client, 0 if self.warm else NOTHING)
        return None if version == NOTHING else version

    def _versions(self, state: SharedState, clients: Sequence[int]) -> set[int | None]:
        return {self._held(state, i) for i in clients}

    # -- in a simulation -----------------------------------------------------------------------------------------

    def deliver(self, state: SharedState, broadcast: Broadcast, clients: Sequence[int]) -> Delivery:
        state = self._advance(state, broadcast)
        ways = {
            version: self.way(state, broadcast.layout, version, counting=True)
            for version in self._versions(state, clients)
        }
        sent = [Sent(way.kind, way.size) for way in (ways[self._held(state, i)] for i in clients)]
        known = dict(sorted({**state.known, **dict.fromkeys(clients, state.version)}.items()))
        return Delivery(state.w, sent, state._replace(known=known))

    def paper_bits(self, layout: Layout) -> int:
        return self.codec.paper_bits(layout)

    def cost(self, layout: Layout, contacts: Contacts, rounds: int) -> DownlinkCost:
        """Return the cost: a return after g rounds misses g deltas, a warm first contact in round t misses t - 1."""
        dense, missed = dense_size(layout), np.arange(rounds)
        sizes = np.array([expected_size(self.codec, layout, count) for count in missed.tolist()])
        spent = (contacts.gaps + contacts.first[1:] * self.warm) * sizes
        whole, first = sizes >= dense, dense * contacts.seen * (not self.warm)
        parts = spent[~whole & (missed < 2)], spent[~whole & (missed > 1)], spent[whole]
        deltas, catchup, again = (float(part.sum()) for part in parts)
        return DownlinkCost(
            deltas, catchup, again + first, self._expected_memory(layout, rounds), bound_of(self.codec, layout)
        )

    def _expected_memory(self, layout: Layout, rounds: int) -> float:
        """Return the bytes of w, of the versions in which its coordinates changed, and of the log."""
        row, delta = 4.0 * layout.d, payload_bytes(self.codec, layout)
        log = min(delta * max(0, rounds - 1), dense_size(layout) // delta * delta)
        return row + row * (coordinates_changed(self.codec, layout) is not None) + log

    def common(self, state: SharedState) -> Tensor:
        return state.w


def _version(state: SharedState, held: Held | None) -> int:
    """Return the version that has this name; NOTHING if there is none."""
    return held.version if held is not None and state.digests.get(held.version) == held.digest.hex() else NOTHING


def _bounded(log: Mapping[int, Tensor], since: int, limit: int) -> tuple[dict[int, Tensor], int]:
    """Return the newest deltas that together have at most `limit` bytes, and the version before them."""
    kept: dict[int, Tensor] = {}
    for version in sorted(log, reverse=True):
        limit -= log[version].numel()
        if limit < 0:
            return dict(sorted(kept.items())), version
        kept[version] = log[version]
    return dict(sorted(kept.items())), since
