"""The bytes that a simulated round would have sent: the lengths of its messages, found without making them."""

from __future__ import annotations

from fedcams.compress.identity import IDENTITY
from fedcams.downlink import MODEL, Delivery, Sent
from fedcams.method import BUFFERS, Method
from fedcams.rounds.cohort import Outgoing, beside_the_model, streams_up
from fedcams.rounds.messages import instruction_size, refusal_size, reply_size
from fedcams.rounds.server import Server
from fedcams.wire import sizes
from fedcams.wire.estimate import payload_bytes

KINDS = {"delta": "deltas", "catchup": "catchup", "dense": "dense"}
"""How a model travels to a client -> the ending of the record's key for its bytes."""


def count_bytes(server: Server, method: Method, outgoing: Outgoing, delivery: Delivery) -> dict[str, int]:
    """Return the byte counts and paper bits of a round, by their keys in the record."""
    up, beside = _up(server, method, outgoing), _beside(server, method)
    down = [_down(sent) | beside for sent in delivery.sent]
    kinds = {kind: sum(sent.size for sent in delivery.sent if sent.kind == kind) for kind in KINDS}
    holding = method.downlink.client_keeps_model
    replies = [reply_size(dict(zip(up, each, strict=True)), holding) for each in zip(*up.values(), strict=True)]
    return {
        "wire_up": sum(replies) + sum(refusal_size(why) for why in outgoing.refused.values()),
        "wire_down": sum(map(instruction_size, down)),
        "wire_up_buffers": sum(up.get(BUFFERS, [])),
        "wire_down_buffers": sum(streams.get(BUFFERS, 0) for streams in down),
        "paper_bits_up": method.uplink.paper_bits(server.layout),
        "paper_bits_down": method.downlink.paper_bits(server.layout),
        **{f"wire_down_{ending}": kinds[kind] for kind, ending in KINDS.items()},
    }


def _up(server: Server, method: Method, outgoing: Outgoing) -> dict[str, list[int]]:
    """Return the bytes of each stream, per client that sent it."""
    layouts = {name: stream.layout for name, stream in streams_up(method, server.layout, server.buffer_layout).items()}
    return {name: sizes(codec, code, layouts[name]) for name, (codec, code) in outgoing.arrival.codes.items()}


def _down(sent: Sent) -> dict[str, int]:
    """Return the bytes of what the downlink sends to one client, by name."""
    return {MODEL: sent.size} | ({BUFFERS: sent.buffers} if sent.buffers else {})


def _beside(server: Server, method: Method) -> dict[str, int]:
    """Return the bytes of what one instruction carries besides what the downlink sends, by name."""
    layouts = beside_the_model(method, server.layout, server.buffer_layout)
    return {name: payload_bytes(IDENTITY, layout) for name, layout in layouts.items()}
