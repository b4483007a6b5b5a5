"""No compression: every client receives the dense model in every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedcams.compress.identity import IDENTITY
from fedcams.downlink.base import Broadcast, Delivery, Downlink, DownlinkCost, Sent, Streams
from fedcams.downlink.message import MODEL
from fedcams.layout import Layout
from fedcams.registry import register
from fedcams.sampler import Contacts
from fedcams.wire import pack, size
from fedcams.wire.estimate import payload_bytes


@register("none")
@dataclass(frozen=True)
class NoDownlink(Downlink):
    """Sends the model as float32 to every client in every round; neither side keeps anything."""

    hides_cohorts = True
    examples = ("none",)

    def send(self, state: None, broadcast: Broadcast, clients: Sequence[int]) -> tuple[dict[int, Streams], None]:
        broadcast.layout.check_finite(broadcast.x, "model")
        dense = pack(IDENTITY, {"values": broadcast.x}, broadcast.layout)  # not encode, which copies x first
        return {client: {MODEL: dense} for client in clients}, None

    def deliver(self, state: None, broadcast: Broadcast, clients: Sequence[int]) -> Delivery:
        return Delivery(
            broadcast.x, [Sent("dense", size(IDENTITY, {"values": broadcast.x}, broadcast.layout))] * len(clients), None
        )

    def paper_bits(self, layout: Layout) -> int:
        return IDENTITY.paper_bits(layout)

    def cost(self, layout: Layout, contacts: Contacts, rounds: int) -> DownlinkCost:
        return DownlinkCost(deltas=0.0, catchup=0.0, dense=payload_bytes(IDENTITY, layout) * contacts.total)
