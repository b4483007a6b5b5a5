"""Messages to clients that keep their model: how to make the new model from the held one, and how to verify it.

Server and client name a model by its version and digest (`Held`). A message is a frame (`fedcams.wire.frames`) with the
magic `FCMM`. Its head is the kind (1 byte), whether it builds on a model (1), the version (8) and digest (16) of that
model, and those of the result. Its one blob is a sequence of payloads, each preceded by its length (8).

    dense   one `identity` payload: the model
    add     any number of payloads, to be decoded and added in this order; none if nothing has changed
    set     one `topk` payload: new values for the coordinates at its positions

Compressed buffers travel as a second message next to the model's. Both name the same base and the same result: what a
client holds is the model and its buffers together.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from fedcams.bits.parallel import map_threads
from fedcams.buffers import add_change
from fedcams.compress.identity import IDENTITY
from fedcams.compress.topk import TopK
from fedcams.errors import FedcamsError, NonCanonical, Truncated
from fedcams.layout import Layout
from fedcams.wire import decode, encode, unpack
from fedcams.wire.estimate import payload_bytes
from fedcams.wire.frames import Frame

if TYPE_CHECKING:
    from torch import Tensor

MODEL, BUFFERS = "model", "buffers"
"""The names of what a client may hold."""
DIGEST = 16
PIECE = 2**18
"""How many values of a model are hashed at a time."""
DENSE, ADD, SET = range(3)
FRAME = Frame(b"FCMM", f"BBQ{DIGEST}sQ{DIGEST}s", blobs=1)
LENGTH = struct.Struct("<Q")


class Held(NamedTuple):
    """The name of what a client holds: the round it came in (0: before the first), and a digest of its bits."""

    version: int
    digest: bytes

    def __str__(self) -> str:
        return f"version {self.version} ({self.digest.hex()[:8]})"


class OutOfStep(FedcamsError):
    """A message builds on a model that the client does not hold; sending the dense model fixes it."""

    def __init__(self, text: str, held: Held | None) -> None:
        super().__init__(text)
        self.held = held
        """What the client does hold; None for nothing usable."""


NOTHING = Held(0, bytes(DIGEST))


def digest_of(*vectors: Tensor) -> bytes:
    """Return a 16-byte digest of all bits of a model `[d]`, or of a model and its buffers.

    That of one vector is BLAKE2b of the digests of its pieces; that of two is BLAKE2b of their digests.
    """
    if len(vectors) > 1:
        return _digest(b"".join(map(digest_of, vectors)), b"fedcams.held")
    data = vectors[0].detach().cpu().contiguous().numpy().data
    pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
    return _digest(b"".join(map_threads(pieces, lambda piece: _digest(piece, b"fedcams.piece"))), b"fedcams.model")


def _digest(data: bytes | memoryview, purpose: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST, person=purpose).digest()


@dataclass(frozen=True)
class Message:
    """A message with a model or its buffers, for a client that keeps them."""

    kind: int
    base: Held | None
    """What it builds on; None for the dense model."""
    result: Held
    payloads: Sequence[bytes]

    def to_bytes(self) -> bytes:
        """Return the message as bytes, as an instruction carries it."""
        head = (self.kind, self.base is not None, *(self.base or NOTHING), *self.result)
        return FRAME.pack(head, join_payloads(self.payloads))

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        """Return the message that `to_bytes` wrote; a WireError says what is wrong with it."""
        (kind, present, base, base_digest, version, digest), (body,) = FRAME.unpack(data)
        named = Held(base, base_digest)
        if kind not in (DENSE, ADD, SET) or present != (kind != DENSE) or (not present and named != NOTHING):
            raise NonCanonical(f"a model message of kind {kind} with the flag {present} for what it builds on")
        payloads = split_payloads(body)
        if kind != ADD and len(payloads) != 1:
            raise NonCanonical(f"a model message of kind {kind} with {len(payloads)} payloads; expected one")
        return cls(kind, named if present else None, Held(version, digest), payloads)

    def apply(self, base: Tensor | None, layout: Layout, name: str = MODEL) -> Tensor:
        """Return the vector `[d]` that this message makes from `base [d]`, in new memory.

        `name` says what it is: changes of buffers are in their own units, see `fedcams.buffers`.
        """
        if self.kind == DENSE:
            return decode(self.payloads[0], layout)
        assert base is not None, "only the dense model has no base"
        vector = base.clone()
        for payload in self.payloads:
            if self.kind == SET:
                _set_(vector, payload, layout)
            elif name == BUFFERS:
                vector = add_change(vector, decode(payload, layout), layout)
            else:
                _add_(vector, payload, layout)
        return vector


def base_of(messages: Mapping[str, Message]) -> Held | None:
    """Return what the messages of one instruction build on, by name; None if all of them are dense.

    Refuses messages that do not name the same base and result.
    """
    bases = {message.base for message in messages.values()} - {None}
    if len(bases) > 1 or len({message.result for message in messages.values()}) > 1:
        raise NonCanonical(f"the messages of {' and '.join(messages)} build on, or lead to, different models")
    return next(iter(bases), None)


def apply_messages(
    messages: Mapping[str, Message], base: Mapping[str, Tensor], layouts: Mapping[str, Layout]
) -> dict[str, Tensor]:
    """Return what the messages of one instruction make from `base`, name -> `[d]`, in new memory.

    Raises OutOfStep if the digest of all of it is not the one that the messages name.
    """
    made = {name: messages[name].apply(base.get(name), layout, name) for name, layout in layouts.items()}
    result = messages[MODEL].result
    if digest_of(*made.values()) != result.digest:
        raise OutOfStep(f"applied to what is held, the message does not give {result}; send the dense model", None)
    return made


def dense_message(x: Tensor, layout: Layout, result: Held) -> Message:
    """Return the message with the whole vector `x [d]`, for clients that hold nothing usable; `result` names it."""
    return Message(DENSE, None, result, [encode(IDENTITY, x, layout)])


def dense_size(layout: Layout) -> int:
    """Return the length of a message with the whole model."""
    return message_size([payload_bytes(IDENTITY, layout)])


def message_size(payloads: Sequence[int]) -> int:
    """Return the length of a message with payloads of these lengths."""
    return FRAME.overhead + sum(payloads) + LENGTH.size * len(payloads)


def join_payloads(payloads: Sequence[bytes]) -> list[bytes]:
    """Return payloads with the length before each, in pieces."""
    return [part for payload in payloads for part in (LENGTH.pack(len(payload)), payload)]


def split_payloads(body: bytes) -> list[bytes]:
    """Return the payloads that `join_payloads` joined; a WireError says what is wrong."""
    payloads, at = [], 0
    while at < len(body):
        if at + LENGTH.size > len(body):
            raise Truncated(f"{len(body) - at} bytes are left, but the length of a payload takes {LENGTH.size}")
        (length,) = LENGTH.unpack_from(body, at)
        at += LENGTH.size
        if at + length > len(body):
            raise Truncated(f"the next payload has {length} bytes, but {len(body) - at} are left")
        payloads.append(body[at : at + length])
        at += length
    return payloads


def _add_(model: Tensor, payload: bytes, layout: Layout) -> None:
    read = unpack(payload, layout)
    read.compressor.add_to_(model, read.code, layout)


def _set_(model: Tensor, payload: bytes, layout: Layout) -> None:
    read = unpack(payload, layout)
    if read.compressor != replacing(len(read.code.get("position", ()))):
        raise NonCanonical(f"values to set travel as topk(k=...), not as {read.compressor}")
    model[read.code["position"]] = read.code["value"]


def replacing(count: int) -> TopK:
    """Return the compressor by which `count` values to set travel."""
    return TopK(k=max(1, count))


def as_tensor(data: bytes) -> Tensor:
    """Return bytes as a uint8 tensor, which a checkpoint can hold."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> bytes:
    """Return the bytes that `as_tensor` turned into a tensor."""
    return tensor.cpu().numpy().tobytes()
