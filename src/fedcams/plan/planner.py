"""Plans: the bytes up and down, the time on a network and the server's memory for each downlink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedcams.compress import Compressor
from fedcams.compress.identity import IDENTITY
from fedcams.downlink import Downlink, downlink
from fedcams.layout import Layout
from fedcams.registry import params
from fedcams.report.profiles import Link, Profile
from fedcams.rounds.messages import instruction_size, reply_size
from fedcams.sampler import Contacts
from fedcams.wire.estimate import payload_bytes

CANDIDATES = (
    "none",
    "stateless",
    "shared(blockq)",
    "shared(topk(ratio=1/16))",
    "shared(topk(ratio=1/64))",
    "replica(blockq)",
    "replica(blockq(bits=2))",
)
"""The downlinks that are compared by default."""


@dataclass(frozen=True)
class Setting:
    """What is planned for: a model of `d` parameters and `buffers` buffer values, their codecs and the rounds."""

    d: int
    buffers: int
    uplink: Compressor
    rounds: int
    buffer_codec: Compressor = IDENTITY

    @property
    def layout(self) -> Layout:
        """The layout of the parameters as one vector; what is sent once per tensor is left out."""
        return Layout.flat(self.d)

    @property
    def buffer_layout(self) -> Layout:
        """The layout of the buffers as one vector; refuses to be made for none."""
        return Layout.flat(self.buffers)


@dataclass(frozen=True)
class Plan:
    """What one downlink costs over a run; bytes are totals over all clients."""

    downlink: Downlink
    up: float
    deltas: float
    catchup: float
    dense: float
    rest: float
    """Other bytes down: buffers and message headers."""
    contacts: float
    memory: float
    """Bytes that the server stores in addition to the model and its optimizer."""
    bound: float
    """The proven bound on the part of ‖x - held‖² that remains after one delta; 0 if the model is sent whole."""

    @property
    def down(self) -> float:
        """All bytes from the server to clients."""
        return self.deltas + self.catchup + self.dense + self.rest

    @property
    def total(self) -> float:
        """All bytes, up and down."""
        return self.up + self.down

    def seconds(self, profile: Profile, rounds: int = 1) -> float:
        """Return the seconds of transfers and latency on this network over `rounds` rounds, for an average client."""
        down, up = (np.array([size / max(self.contacts, 1e-9)]) for size in (self.down, self.up))
        return rounds * float(profile.seconds(Link(np.zeros(1), np.zeros(1), down, up, np.zeros(1)))[0])


def plan(setting: Setting, spec: str | Downlink, contacts: Contacts) -> Plan:
    """Return what these contacts cost with this downlink; refuses a downlink that cannot estimate its cost."""
    chosen, layout = downlink(spec), setting.layout
    extra = {"buffers": payload_bytes(setting.buffer_codec, setting.buffer_layout)} if setting.buffers else {}
    up = reply_size({"update": payload_bytes(setting.uplink, layout), **extra}, chosen.client_keeps_model)
    cost, total = chosen.cost(layout, contacts, setting.rounds), contacts.total
    models = (cost.deltas, cost.catchup, cost.dense)
    rest, memory = _buffers_down(setting, chosen, contacts)
    heads = instruction_size({"model": 0, **extra}) - sum(extra.values())
    return Plan(chosen, up * total, *models, rest + heads * total, total, cost.memory + memory, cost.bound)


def _buffers_down(setting: Setting, chosen: Downlink, contacts: Contacts) -> tuple[float, float]:
    """Return the bytes of buffers to all clients, and those that the server keeps for them.

    Uncompressed ones go dense beside the model, others by the downlink's rule: with their own codec if it keeps what
    the codec loses, else with that of the model.
    """
    if not setting.buffers:
        return 0.0, 0.0
    if setting.buffer_codec == IDENTITY or not chosen.carries_buffers:
        return payload_bytes(IDENTITY, setting.buffer_layout) * contacts.total, 0.0
    fields = {key: getattr(chosen, key) for key in params(type(chosen))}
    own = {"codec": setting.buffer_codec} if chosen.client_keeps_model and "codec" in fields else {}
    cost = type(chosen)(**{**fields, **own}).cost(setting.buffer_layout, contacts, setting.rounds)
    return cost.deltas + cost.catchup + cost.dense, cost.memory


def recommend(plans: Sequence[Plan], memory: float, bound: float) -> Plan | None:
    """Return the plan with the fewest bytes among those within `memory` bytes and `bound`; None if there is none."""
    fitting = [one for one in plans if one.memory <= memory and one.bound <= bound]
    return min(fitting, key=lambda one: one.total) if fitting else None
