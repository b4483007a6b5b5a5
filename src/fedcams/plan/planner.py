"""A plan: for every downlink the bytes up and down, the time on a network and the server's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedcams.compress import Compressor
from fedcams.compress.identity import IDENTITY
from fedcams.downlink import Downlink, downlink
from fedcams.layout import Layout
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
"""What is compared unless told otherwise."""


@dataclass(frozen=True)
class Setting:
    """A model of `d` trainable coordinates and `buffers` floating-point ones, and how updates travel."""

    d: int
    buffers: int
    uplink: Compressor
    rounds: int

    @property
    def layout(self) -> Layout:
        """Of the coordinates; names and shapes cost nothing on the wire."""
        return Layout.flat(self.d)


@dataclass(frozen=True)
class Plan:
    """What one downlink costs over a run; bytes are those of all clients."""

    downlink: Downlink
    up: float
    deltas: float
    catchup: float
    dense: float
    rest: float
    """Down as well: buffers and the heads of messages."""
    contacts: float
    memory: float
    """Bytes that the server keeps beside the model and its optimizer."""
    bound: float
    """The part of ‖x - held‖² that one delta may leave behind, by its proof; 0 where it is sent whole."""

    @property
    def down(self) -> float:
        """All bytes down."""
        return self.deltas + self.catchup + self.dense + self.rest

    @property
    def total(self) -> float:
        """Up and down."""
        return self.up + self.down

    def seconds(self, profile: Profile, rounds: int) -> float:
        """Transfers and latency of all rounds, each as long as for an average client of its cohort."""
        down, up = (np.array([size / max(self.contacts, 1e-9)]) for size in (self.down, self.up))
        return rounds * float(profile.seconds(Link(np.zeros(1), down, up, np.zeros(1)))[0])


def plan(setting: Setting, spec: str | Downlink, contacts: Contacts) -> Plan:
    """Return what these contacts cost by this downlink; refuses a downlink that cannot say that before it runs."""
    chosen, layout = downlink(spec), setting.layout
    extra = {"buffers": payload_bytes(IDENTITY, Layout.flat(setting.buffers))} if setting.buffers else {}
    up = reply_size({"update": payload_bytes(setting.uplink, layout), **extra}, chosen.client_keeps_model)
    rest = instruction_size({"model": 0, **extra})
    cost = chosen.cost(layout, contacts, setting.rounds)
    models = (cost.deltas, cost.catchup, cost.dense)
    total = contacts.total
    return Plan(chosen, up * total, *models, rest * total, total, cost.memory, cost.bound)


def recommend(plans: Sequence[Plan], memory: float, bound: float) -> Plan | None:
    """The fewest bytes among those that fit the memory and whose deltas leave no more than `bound` behind."""
    fitting = [one for one in plans if one.memory <= memory and one.bound <= bound]
    return min(fitting, key=lambda one: one.total) if fitting else None
