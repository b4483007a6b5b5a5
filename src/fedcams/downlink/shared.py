"""One model shared by all clients: the server sends what moves it towards its own; clients that were away catch up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch

from fedcams.bits.positions import note_changes
from fedcams.compress import Compressor
from fedcams.downlink.base import (
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
from fedcams.downlink.catchup import Catchup, Track, Way, expected_size
from fedcams.downlink.message import (
    ADD,
    BUFFERS,
    MODEL,
    SET,
    Held,
    Message,
    as_tensor,
    dense_message,
    dense_size,
    digest_of,
)
from fedcams.layout import Layout
from fedcams.registry import flag, nested, register
from fedcams.sampler import Contacts
from fedcams.wire import pack
from fedcams.wire.estimate import coordinates_changed, payload_bytes

if TYPE_CHECKING:
    from torch import Tensor

UNKNOWN = -1
"""The version of a client whose model the server does not know, or that has none."""


class SharedState(NamedTuple):
    """What the clients of the last round hold, and what the server knows of the others."""

    model: Track
    buffers: Track | None
    """None if buffers do not travel by this downlink's rule."""
    version: int
    """The round of the last change; 0 for the initial model."""
    known: Mapping[int, int]
    """Client -> the version that it said it holds; -1 if the server does not know that model."""
    digests: Mapping[int, str]
    """Version -> digest, for the versions that a client may hold; a simulation has none."""

    @property
    def tracks(self) -> dict[str, Track]:
        """All vectors, by name."""
        return {MODEL: self.model} if self.buffers is None else {MODEL: self.model, BUFFERS: self.buffers}

    @property
    def digest(self) -> str:
        """The digest of what the clients of the last round hold."""
        return digest_of(*(track.w for track in self.tracks.values())).hex()


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
    carries_buffers = True
    examples = ("shared(topk(ratio=1/64))", "shared(blockq)", "shared(sign, warm=true)")
    refused = (
        ("shared", "codec is missing"),
        ("shared(blockq(rounding=stochastic))", "has no bound.*or stateless"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_contractive(self.name, self.codec)

    @property
    def starts_warm(self) -> bool:
        return self.warm

    def init(self, x: Tensor, buffers: Part | None = None) -> SharedState:
        beside = None if buffers is None else _start(buffers.values, buffers.codec)
        return SharedState(_start(x, self.codec), beside, 0, {}, {})

    # -- the server's side ---------------------------------------------------------------------------------------

    def send(
        self, state: SharedState, broadcast: Broadcast, clients: Sequence[int]
    ) -> tuple[dict[int, Streams], SharedState]:
        if not clients:
            return {}, state
        if self.warm and not state.digests and state.version == 0:
            state = state._replace(digests={0: state.digest})
        state = self._advance(state, broadcast)
        if state.version not in state.digests:
            state = state._replace(digests={**state.digests, state.version: state.digest})
        made = {version: self._messages(state, broadcast, version) for version in self._versions(state, clients)}
        return {i: made[self._held(state, i)] for i in clients}, state

    def _messages(self, state: SharedState, broadcast: Broadcast, version: int | None) -> Streams:
        """Return the messages for clients that hold this version; dense ones if its digest is not known."""
        result = Held(state.version, bytes.fromhex(state.digests[state.version]))
        known = version if version in state.digests else None
        base = None if known is None else Held(known, bytes.fromhex(state.digests[known]))
        made = {}
        for name, part in broadcast.parts(self.codec).items():
            way = self.way(state, part.layout, known, name=name)
            if way.kind == "dense":
                message = dense_message(state.tracks[name].w, part.layout, result)
            else:
                message = Message(SET if way.replaces else ADD, base, result, way.payloads())
            made[name] = message.to_bytes()
        return made

    def way(
        self, state: SharedState, layout: Layout, held: int | None, counting: bool = False, name: str = MODEL
    ) -> Way:
        """Return the cheapest way from the version `held`, None for a client without a model, to the current model.

        With `counting`, it has only the size, and nothing is packed. `name` says which vector the layout belongs to.
        """
        return Catchup(state.tracks[name], state.version, layout, counting).cheapest(held)

    def expected(self, state: SharedState, client: int) -> Held | None:
        name = state.digests.get(state.version)  # missing until this version is sent to a client
        return None if name is None else Held(state.version, bytes.fromhex(name))

    def buffers_of(self, state: SharedState, client: int) -> Tensor | None:
        return None if state.buffers is None else state.buffers.w

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
        parts, tracks = broadcast.parts(self.codec), state.tracks
        still = all(torch.equal(part.values, tracks[name].w) for name, part in parts.items())
        if state.version == broadcast.round or still:
            return state
        moved = {name: _moved(tracks[name], part, broadcast) for name, part in parts.items()}
        return state._replace(model=moved[MODEL], buffers=moved.get(BUFFERS), version=broadcast.round)

    def _held(self, state: SharedState, client: int) -> int | None:
        version = state.known.get(client, 0 if self.warm else UNKNOWN)
        return None if version == UNKNOWN else version

    def _versions(self, state: SharedState, clients: Sequence[int]) -> set[int | None]:
        return {self._held(state, i) for i in clients}

    # -- in a simulation -----------------------------------------------------------------------------------------

    def deliver(self, state: SharedState, broadcast: Broadcast, clients: Sequence[int]) -> Delivery:
        state = self._advance(state, broadcast)
        ways = {version: self._ways(state, broadcast, version) for version in self._versions(state, clients)}
        held = [ways[self._held(state, i)] for i in clients]
        sent = [Sent(model.kind, model.size, sum(way.size for way in beside)) for model, *beside in held]
        known = dict(sorted({**state.known, **dict.fromkeys(clients, state.version)}.items()))
        return Delivery(state.model.w, sent, state._replace(known=known), self.buffers_of(state, 0))

    def _ways(self, state: SharedState, broadcast: Broadcast, version: int | None) -> list[Way]:
        """Return how a client that holds this version receives the model, and the buffers if they travel with it."""
        parts = broadcast.parts(self.codec).items()
        return [self.way(state, part.layout, version, counting=True, name=name) for name, part in parts]

    def for_buffers(self, codec: Compressor) -> Self:
        return replace(self, codec=codec)

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

    def common(self, state: SharedState) -> dict[str, Tensor]:
        return {name: track.w for name, track in state.tracks.items()}


def _start(x: Tensor, codec: Compressor) -> Track:
    """Return the track before anything was sent."""
    fields = codec.at(1, 1).fields(Layout.flat(x.numel())).values()
    sparse = bool(codec.schedules()) or all(field.count < x.numel() for field in fields)  # in some rounds
    touched = torch.zeros(x.numel(), dtype=torch.int32, device=x.device) if sparse else None
    return Track(x.clone(), touched, {}, 0)


def _moved(track: Track, part: Part, broadcast: Broadcast) -> Track:
    """Return the track after one delta towards the part's values."""
    w = track.w.clone()
    code = part.move_(w, broadcast.key(name=part.name))
    touched = None if track.touched is None else note_changes(track.touched, track.w, w, broadcast.round)
    log = {**track.log, broadcast.round: as_tensor(pack(part.codec, code, part.layout))}
    return Track(w, touched, *_bounded(log, track.since, dense_size(part.layout)))


def _version(state: SharedState, held: Held | None) -> int:
    """Return the version that has this name; UNKNOWN if there is none."""
    return held.version if held is not None and state.digests.get(held.version) == held.digest.hex() else UNKNOWN


def _bounded(log: Mapping[int, Tensor], since: int, limit: int) -> tuple[dict[int, Tensor], int]:
    """Return the newest deltas that together have at most `limit` bytes, and the version before them."""
    kept: dict[int, Tensor] = {}
    for version in sorted(log, reverse=True):
        limit -= log[version].numel()
        if limit < 0:
            return dict(sorted(kept.items())), version
        kept[version] = log[version]
    return dict(sorted(kept.items())), since
