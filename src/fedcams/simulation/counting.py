"""The bytes that a simulated round would have sent: equal to the lengths of its messages, without making them."""

from __future__ import annotations

from fedcams.compress.identity import IDENTITY
from fedcams.downlink import Delivery
from fedcams.layout import Layout
from fedcams.method import BUFFERS, CONTROL, Method
from fedcams.rounds.cohort import Outgoing, streams_up
from fedcams.rounds.messages import MODEL, instruction_size, refusal_size, reply_size
from fedcams.rounds.server import Server
from fedcams.wire import sizes
from fedcams.wire.payload import fixed_payload_size

KINDS = {"delta": "deltas", "catchup": "catchup", "dense": "dense"}
"""How a model may travel to a client -> the ending of the record's key for its bytes."""


def count_bytes(server: Server, method: Method, cohort: int, outgoing: Outgoing, delivery: Delivery) -> dict[str, int]:
    """Return the record's byte counts and paper bits of a round with a cohort of this size."""
    up, down = _up(server, method, outgoing), _beside_the_model(server, method)
    heads = instruction_size({MODEL: 0, **dict.fromkeys(down, 0)})
    kinds = {kind: sum(size for found, size in delivery.sent if found == kind) for kind in KINDS}
    return {
        "wire_up": sum(up.values()) + _heads_up(method, outgoing, up),
        "wire_down": cohort * (heads + sum(down.values())) + sum(kinds.values()),
        "wire_up_buffers": up.get(BUFFERS, 0),
        "wire_down_buffers": cohort * down.get(BUFFERS, 0),
        "paper_bits_up": method.uplink.paper_bits(server.layout),
        "paper_bits_down": method.downlink.paper_bits(server.layout),
        **{f"wire_down_{ending}": kinds[kind] for kind, ending in KINDS.items()},
    }


def _up(server: Server, method: Method, outgoing: Outgoing) -> dict[str, int]:
    """Bytes of each stream, over all clients that sent one."""
    layouts = {name: stream.layout for name, stream in streams_up(method, server.layout, server.buffer_layout).items()}
    return {name: sum(sizes(codec, code, layouts[name])) for name, (codec, code) in outgoing.arrival.codes.items()}


def _heads_up(method: Method, outgoing: Outgoing, up: dict[str, int]) -> int:
    """Bytes of the heads of replies, and of refusals, which are sent in place of a reply."""
    heads = reply_size(dict.fromkeys(up, 0), method.downlink.client_keeps_model) if up else 0
    refusals = sum(refusal_size(why) for why in outgoing.refused.values())
    return len(outgoing.arrival) * heads + refusals


def _beside_the_model(server: Server, method: Method) -> dict[str, int]:
    """Bytes of what one instruction carries beside the model."""
    layouts: dict[str, Layout | None] = {BUFFERS: server.buffer_layout}
    if method.control.active:
        layouts[CONTROL] = server.layout
    return {name: fixed_payload_size(IDENTITY, layout) for name, layout in layouts.items() if layout is not None}
