"""Plans: the bytes up and down, the time on a network and the server's memory for each downlink."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedcams.compress import Compressor
from fedcams.compress.identity import IDENTITY
from fedcams.downlink import Downlink, DownlinkCost, downlink
from fedcams.errors import SpecError
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
"""The downlinks that are compared by default."""


@dataclass(frozen=True)
class Setting:
    """What is planned for: a model of `d` parameters and `buffers` buffer values, the codecs and the rounds.

    Examples:
        >>> import fedcams
        >>> from fedcams.plan import Setting
        >>> Setting(d=1_000_000, buffers=0, uplink=fedcams.compressor("sign"), rounds=100).layout.d
        1000000
    """

    d: int
    buffers: int
    uplink: Compressor
    rounds: int
    buffer_codec: Compressor = IDENTITY
    """How buffers travel: up as `Method.buffers` says and, if it compresses them, down by the downlink's rule."""

    @property
    def layout(self) -> Layout:
        """The layout of the parameters as one vector; what is sent once per tensor is left out."""
        return Layout.flat(self.d)


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
    """Return what a run costs with a downlink.

    Arguments:
        setting: the model's size, the codecs and the rounds.
        spec: the downlink, or its spec string.
        contacts: how often clients take part.

    Returns:
        Bytes over all clients, the server's memory and the proven bound.

    Raises:
        SpecError: for a schedule, and for a downlink without an estimate.

    Examples:
        >>> import fedcams
        >>> from fedcams.plan import Setting, expected_contacts, plan
        >>> setting = Setting(d=1_000_000, buffers=0, uplink=fedcams.compressor("sign"), rounds=100)
        >>> cost = plan(setting, "replica(blockq)", expected_contacts(100, 10, 100))
        >>> cost.down < plan(setting, "none", expected_contacts(100, 10, 100)).down
        True
    """
    chosen, layout, total = downlink(spec), setting.layout, contacts.total
    for name, piece in {"uplink": setting.uplink, "downlink": chosen, "buffers": setting.buffer_codec}.items():
        if piece.schedules():
            raise SpecError(f"{name}={piece}: a plan needs numbers that do not change; give one in place of a schedule")
    codec, beside = setting.buffer_codec, Layout.flat(setting.buffers) if setting.buffers else None
    extra = {} if beside is None else {"buffers": payload_bytes(codec, beside)}
    up = reply_size({"update": payload_bytes(setting.uplink, layout), **extra}, chosen.client_keeps_model)
    cost = chosen.cost(layout, contacts, setting.rounds)
    carried = _cost_of_buffers(chosen, codec, beside, contacts, setting.rounds)
    rest = instruction_size({"model": 0}) * total + carried.deltas + carried.catchup + carried.dense
    models = (cost.deltas, cost.catchup, cost.dense)
    return Plan(chosen, up * total, *models, rest, total, cost.memory + carried.memory, cost.bound)


def _cost_of_buffers(
    chosen: Downlink, codec: Compressor, layout: Layout | None, contacts: Contacts, rounds: int
) -> DownlinkCost:
    """Return what buffers cost on their way down: by the downlink's rule if they are compressed, else dense."""
    if layout is None:
        return DownlinkCost(0.0, 0.0, 0.0)
    if codec == IDENTITY or not chosen.carries_buffers:
        return DownlinkCost(0.0, 0.0, payload_bytes(IDENTITY, layout) * contacts.total)
    return chosen.for_buffers(codec).cost(layout, contacts, rounds)


def recommend(plans: Sequence[Plan], memory: float, bound: float) -> Plan | None:
    """Return the plan with the fewest bytes among those within the limits.

    Arguments:
        plans: what different downlinks cost.
        memory: the bytes that the server can keep for its clients.
        bound: the largest proven bound to accept.

    Returns:
        The plan, or None if none is within the limits.

    Examples:
        >>> import fedcams
        >>> from fedcams.plan import CANDIDATES, Setting, expected_contacts, plan, recommend
        >>> setting = Setting(d=1_000_000, buffers=0, uplink=fedcams.compressor("sign"), rounds=100)
        >>> plans = [plan(setting, spec, expected_contacts(100, 10, 100)) for spec in CANDIDATES]
        >>> str(recommend(plans, memory=1e9, bound=0.9).downlink)
        'replica(blockq(bits=2))'
    """
    fitting = [one for one in plans if one.memory <= memory and one.bound <= bound]
    return min(fitting, key=lambda one: one.total) if fitting else None
