"""A plan: for every downlink the bytes up and down, the time on a network and the server's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedcams.compress import Compressor
from fedcams.compress.identity import IDENTITY
from fedcams.downlink import Downlink, downlink
from fedcams.downlink.message import message_size, replacing
from fedcams.downlink.none import NoDownlink
from fedcams.downlink.replica import Replica
from fedcams.downlink.shared import Shared
from fedcams.downlink.stateless import Stateless
from fedcams.errors import SpecError
from fedcams.layout import Layout
from fedcams.plan.costs import payload_bytes, touched
from fedcams.plan.participation import Contacts
from fedcams.report.profiles import Link, Profile
from fedcams.rounds.messages import instruction_size, reply_size

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
    """What these contacts cost by this downlink."""
    chosen, layout = downlink(spec), setting.layout
    extra = {"buffers": payload_bytes(IDENTITY, Layout.flat(setting.buffers))} if setting.buffers else {}
    up = reply_size({"update": payload_bytes(setting.uplink, layout), **extra}, chosen.client_keeps_model)
    deltas, catchup, dense = _models(chosen, setting, contacts)
    rest = instruction_size({"model": 0, **extra}) * contacts.total
    memory, bound = _memory(chosen, setting, contacts), _bound(chosen, layout)
    return Plan(chosen, up * contacts.total, deltas, catchup, dense, rest, contacts.total, memory, bound)


def recommend(plans: Sequence[Plan], memory: float, bound: float) -> Plan | None:
    """The fewest bytes among those that fit the memory and whose deltas leave no more than `bound` behind."""
    fitting = [one for one in plans if one.memory <= memory and one.bound <= bound]
    return min(fitting, key=lambda one: one.total) if fitting else None


def _models(chosen: Downlink, setting: Setting, contacts: Contacts) -> tuple[float, float, float]:
    """Bytes of models down: deltas, catching up, dense."""
    layout, again = setting.layout, float(contacts.gaps.sum())
    if isinstance(chosen, Stateless):
        return payload_bytes(chosen.codec, layout) * contacts.total, 0.0, 0.0
    if isinstance(chosen, Replica):
        delta, dense = message_size([payload_bytes(chosen.codec, layout)]), _dense(layout)
        return delta * (again + chosen.warm * contacts.seen), 0.0, dense * contacts.seen * (not chosen.warm)
    if isinstance(chosen, Shared):
        return _shared(chosen, setting, contacts)
    if isinstance(chosen, NoDownlink):
        return 0.0, 0.0, payload_bytes(IDENTITY, layout) * contacts.total
    raise SpecError(
        f"{chosen}: what it will send is not known before it runs; plan with none, stateless, shared, replica"
    )


def _shared(chosen: Shared, setting: Setting, contacts: Contacts) -> tuple[float, float, float]:
    """A client that comes back after g rounds missed g deltas; one that starts warm in round t missed t - 1."""
    dense, gap = _dense(setting.layout), np.arange(setting.rounds)
    costs = np.array([_shared_cost(chosen.codec, setting.layout, g) for g in gap.tolist()])
    spent = (contacts.gaps + contacts.first[1:] * chosen.warm) * costs
    whole, first = costs >= dense, dense * contacts.seen * (not chosen.warm)
    parts = spent[~whole & (gap < 2)], spent[~whole & (gap > 1)], spent[whole]
    deltas, catchup, again = (float(part.sum()) for part in parts)
    return deltas, catchup, again + first


def _shared_cost(codec: Compressor, layout: Layout, gap: int) -> float:
    """The cheapest of the missed deltas, the values of what they touched, and the dense model."""
    delta, dense = payload_bytes(codec, layout), _dense(layout)
    costs = [dense]
    if gap * delta <= dense:  # else the log has forgotten the oldest
        costs.append(message_size([delta] * gap))
    if gap > 1 and (each := touched(codec, layout)) is not None:
        union = round(layout.d * (1 - (1 - each / layout.d) ** gap))  # as if each delta chose anew
        costs.append(message_size([payload_bytes(replacing(union), layout)]))
    return min(costs)


def _dense(layout: Layout) -> int:
    return message_size([payload_bytes(IDENTITY, layout)])


def _memory(chosen: Downlink, setting: Setting, contacts: Contacts) -> float:
    """Bytes of the downlink's state at the server."""
    row = 4.0 * setting.d
    if isinstance(chosen, Replica):
        return row * (contacts.seen + chosen.warm)
    if isinstance(chosen, Shared):
        delta = payload_bytes(chosen.codec, setting.layout)
        log = min(delta * max(0, setting.rounds - 1), _dense(setting.layout) // delta * delta)
        return row + row * (touched(chosen.codec, setting.layout) is not None) + log
    return 0.0


def _bound(chosen: Downlink, layout: Layout) -> float:
    codec = getattr(chosen, "codec", None)
    return (codec.squared_error_bound(layout) or 0.0) if codec is not None else 0.0
