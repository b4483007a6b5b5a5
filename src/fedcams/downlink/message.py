"""What a client gets that keeps its model: how to make the new one from the one it holds, and how to tell that it did.

Server and client name a model by its version and digest (`Held`). A message is a frame (`fedcams.wire.frames`) with
magic `FCMM`; its head is the kind (1), whether it builds on something (1), the version (8) and digest (16) of what it
builds on, and those of the result; its one byte string is a sequence of payloads, each after its length (8).

    dense   one `identity` payload: the model
    add     any number of payloads, to be decoded and added in this order; none where nothing has changed
    set     one `topk` payload: values to be put in place of those at their positions
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedcams.bits.parallel import map_threads
from fedcams.compress import compressor
from fedcams.compress.identity import IDENTITY
from fedcams.compress.topk import TopK
from fedcams.errors import FedcamsError, NonCanonical, Truncated
from fedcams.layout import Layout
from fedcams.wire import decode, encode, unpack
from fedcams.wire.estimate import payload_bytes
from fedcams.wire.frames import Frame

DIGEST = 16
PIECE = 2**18
"""Values of a model that are hashed as one."""
DENSE, ADD, SET = range(3)
FRAME = Frame(b"FCMM", f"BBQ{DIGEST}sQ{DIGEST}s", blobs=1)
LENGTH = struct.Struct("<Q")


class Held(NamedTuple):
    """A model that a client holds: the round it came in (0: before the first), and what it is, bit for bit."""

    version: int
    digest: bytes

    def __str__(self) -> str:
        return f"version {self.version} ({self.digest.hex()[:8]})"


class OutOfStep(FedcamsError):
    """A message for a client that holds something else than the message builds on; the dense model helps."""

    def __init__(self, text: str, held: Held | None) -> None:
        super().__init__(text)
        self.held = held
        """What the client does hold; None for nothing, or nothing sound."""


NOTHING = Held(0, bytes(DIGEST))


def digest_of(model: Tensor) -> bytes:
    """Sixteen bytes that stand for all bits of a model `[d]`: BLAKE2b of those of its pieces, found side by side."""
    data = model.detach().cpu().contiguous().numpy().data
    pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
    return _digest(b"".join(map_threads(pieces, lambda piece: _digest(piece, b"fedcams.piece"))), b"fedcams.model")


def _digest(data: bytes | memoryview, purpose: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST, person=purpose).digest()


@dataclass(frozen=True)
class Message:
    """A model on its way to a client that keeps it."""

    kind: int
    base: Held | None
    """What it builds on; None for the dense model."""
    result: Held
    payloads: Sequence[bytes]

    def to_bytes(self) -> bytes:
        """As it stands in an instruction."""
        body = [part for payload in self.payloads for part in (LENGTH.pack(len(payload)), payload)]
        return FRAME.pack((self.kind, self.base is not None, *(self.base or NOTHING), *self.result), body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        """The reverse of `to_bytes`; refuses what is damaged."""
        (kind, present, base, base_digest, version, digest), (body,) = FRAME.unpack(data)
        named = Held(base, base_digest)
        if kind not in (DENSE, ADD, SET) or present != (kind != DENSE) or (not present and named != NOTHING):
            raise NonCanonical(f"a model message of kind {kind} with the mark {present} for what it builds on")
        payloads = _split(body)
        if kind != ADD and len(payloads) != 1:
            raise NonCanonical(f"a model message of kind {kind} with {len(payloads)} payloads; it has one")
        return cls(kind, named if present else None, Held(version, digest), payloads)

    def apply(self, base: Tensor | None, layout: Layout) -> Tensor:
        """The model `[d]` that follows from `base [d]`, in memory of its own; refused unless it is as announced."""
        if self.kind == DENSE:
            model = decode(self.payloads[0], layout)
        else:
            assert base is not None, "all but the dense model build on something"
            model = base.clone()
            for payload in self.payloads:
                (_add_ if self.kind == ADD else _set_)(model, payload, layout)
        if digest_of(model) != self.result.digest:
            raise OutOfStep(
                f"applied to what is held, the message does not give {self.result}; ask for all of it", None
            )
        return model


def dense_message(x: Tensor, layout: Layout, result: Held) -> Message:
    """The model itself, for clients of which nothing is known."""
    return Message(DENSE, None, result, [encode(IDENTITY, x, layout)])


def dense_size(layout: Layout) -> int:
    """The length of that message."""
    return message_size([payload_bytes(IDENTITY, layout)])


def message_size(payloads: Sequence[int]) -> int:
    """The length of a message with payloads of these lengths."""
    return FRAME.overhead + sum(payloads) + LENGTH.size * len(payloads)


def _split(body: bytes) -> list[bytes]:
    payloads, at = [], 0
    while at < len(body):
        if at + LENGTH.size > len(body):
            raise Truncated(f"{len(body) - at} bytes are left where the length of a payload takes {LENGTH.size}")
        (length,) = LENGTH.unpack_from(body, at)
        at += LENGTH.size
        if at + length > len(body):
            raise Truncated(f"a payload of {length} bytes is announced, {len(body) - at} are left")
        payloads.append(body[at : at + length])
        at += length
    return payloads


def _add_(model: Tensor, payload: bytes, layout: Layout) -> None:
    read = unpack(payload, layout)
    read.compressor.add_to_(model, read.code, layout)


def _set_(model: Tensor, payload: bytes, layout: Layout) -> None:
    read = unpack(payload, layout)
    if read.compressor != replacing(len(read.code.get("position", ()))):
        raise NonCanonical(f"values to be set travel as topk(k=...), not as {read.compressor}")
    model[read.code["position"]] = read.code["value"]


def replacing(count: int) -> TopK:
    """How `count` values to be set travel."""
    codec = compressor(f"topk(k={max(1, count)})")
    assert isinstance(codec, TopK)
    return codec


def as_tensor(data: bytes) -> Tensor:
    """Bytes as a checkpoint holds them."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> bytes:
    """And back."""
    return tensor.cpu().numpy().tobytes()
