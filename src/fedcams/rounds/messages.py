"""The two messages in which the halves of a round meet."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedcams.errors import NonCanonical, NonFinite
from fedcams.rounds.frames import Frame

DIGEST = 16
INSTRUCTION = Frame(b"FCMI", f"QQqBQ{DIGEST}s", blobs=2)  # round, client, seed, accepted? round, digest
REPLY = Frame(b"FCMR", "QQQQd", blobs=2)  # round, client, examples, steps, loss


def digest(payload: bytes) -> bytes:
    """Sixteen bytes by which server and client name a payload."""
    return hashlib.blake2b(payload, digest_size=DIGEST).digest()


@dataclass(frozen=True)
class Accepted:
    """The last update of a client that entered the model."""

    round: int
    digest: bytes


@dataclass(frozen=True)
class Instruction:
    """From the server to one client: train from this model. `buffers` is empty when the model has none."""

    round: int
    client: int
    seed: int
    model: bytes
    buffers: bytes = b""
    accepted: Accepted | None = None

    def to_bytes(self) -> bytes:
        """The message as it crosses a network."""
        return b"".join(self.to_parts())

    def to_parts(self) -> list[bytes]:
        """The same bytes in parts; the model is one of them, not copied, so that many messages can share it."""
        last = self.accepted or Accepted(0, bytes(DIGEST))
        head = (self.round, self.client, self.seed, self.accepted is not None, last.round, last.digest)
        return INSTRUCTION.parts(head, self.model, self.buffers)

    @classmethod
    def from_bytes(cls, data: bytes) -> Instruction:
        """The reverse of `to_bytes`; refuses what is damaged."""
        return cls._of(*INSTRUCTION.unpack(data))

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Instruction:
        """The reverse of `to_parts`."""
        return cls._of(*INSTRUCTION.unpack_parts(parts))

    @classmethod
    def _of(cls, head: tuple[Any, ...], blobs: list[bytes]) -> Instruction:
        (round, client, seed, present, last, name), (model, buffers) = head, blobs
        accepted = Accepted(last, name) if present else None
        if present > 1 or (not present and (last or any(name))):
            raise NonCanonical(f"the mark for an accepted update is {present} beside round {last}")
        return cls(round, client, seed, model, buffers, accepted)

    @property
    def size(self) -> int:
        """`len(to_bytes())`."""
        return INSTRUCTION.overhead + len(self.model) + len(self.buffers)


@dataclass(frozen=True)
class Reply:
    """From one client to the server: the compressed update of a round and what the training saw."""

    round: int
    client: int
    payload: bytes
    buffers: bytes
    examples: int
    steps: int
    loss: float

    def to_bytes(self) -> bytes:
        """The message as it crosses a network."""
        return b"".join(self.to_parts())

    def to_parts(self) -> list[bytes]:
        """The same bytes in parts, the payload not copied."""
        head = (self.round, self.client, self.examples, self.steps, self.loss)
        return REPLY.parts(head, self.payload, self.buffers)

    @classmethod
    def from_bytes(cls, data: bytes) -> Reply:
        """The reverse of `to_bytes`; refuses what is damaged."""
        return cls._of(*REPLY.unpack(data))

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Reply:
        """The reverse of `to_parts`."""
        return cls._of(*REPLY.unpack_parts(parts))

    @classmethod
    def _of(cls, head: tuple[Any, ...], blobs: list[bytes]) -> Reply:
        (round, client, examples, steps, loss), (payload, buffers) = head, blobs
        if not math.isfinite(loss):
            raise NonFinite(f"client {client} reports the loss {loss}")
        return cls(round, client, payload, buffers, examples, steps, loss)

    @property
    def size(self) -> int:
        """`len(to_bytes())`."""
        return REPLY.overhead + len(self.payload) + len(self.buffers)

    @functools.cached_property
    def digest(self) -> bytes:
        """The name of this update."""
        return digest(self.payload)
