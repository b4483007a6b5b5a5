"""The messages in which the halves of a round meet: an instruction, and a reply or a refusal."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedcams.bits.checksum import SEALED
from fedcams.downlink.versions import DIGEST, Held
from fedcams.errors import NonCanonical, NonFinite
from fedcams.wire.frames import Frame

INSTRUCTION = Frame(b"FCMI", f"QQqBQ{DIGEST}s", blobs=2)  # round, client, seed, accepted? round, digest
REPLY = Frame(b"FCMR", "QQQQd", blobs=2)  # round, client, examples, steps, loss
REPLY_HOLDING = Frame(b"FCMH", f"QQQQdQ{DIGEST}s", blobs=2)  # the same, and the version and digest of what is held
REFUSAL = Frame(b"FCMX", f"QQBQ{DIGEST}s", blobs=1)  # round, client, held? version, digest; why


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
    sealed: bool = field(default=False, compare=False)
    """Whether the model is known to end in its own checksum: it need not be read once more to find that out."""

    def to_bytes(self) -> bytes:
        """The message as it crosses a network."""
        return b"".join(self.to_parts())

    def to_parts(self) -> list[bytes]:
        """The same bytes in parts; the model is one of them, not copied, so that many messages can share it."""
        last = self.accepted or Accepted(0, bytes(DIGEST))
        head = (self.round, self.client, self.seed, self.accepted is not None, last.round, last.digest)
        return INSTRUCTION.parts(head, self.model, self.buffers, first=SEALED if self.sealed else None)

    @classmethod
    def from_bytes(cls, data: bytes) -> Instruction:
        """The reverse of `to_bytes`; refuses what is damaged."""
        return cls._of(*INSTRUCTION.unpack(data))

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Instruction:
        """The reverse of `to_parts`."""
        head, blobs, first = INSTRUCTION.unpack_parts(parts)
        return dataclasses.replace(cls._of(head, blobs), sealed=first == SEALED)

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
    """From one client to the server: the compressed update of a round and what the training saw.

    `held` names the model that it was trained from, where clients keep theirs.
    """

    round: int
    client: int
    payload: bytes
    buffers: bytes
    examples: int
    steps: int
    loss: float
    held: Held | None = None

    def to_bytes(self) -> bytes:
        """The message as it crosses a network."""
        return b"".join(self.to_parts())

    def to_parts(self) -> list[bytes]:
        """The same bytes in parts, the payload not copied."""
        head = (self.round, self.client, self.examples, self.steps, self.loss, *(self.held or ()))
        return self._frame.parts(head, self.payload, self.buffers)

    @classmethod
    def from_bytes(cls, data: bytes) -> Reply:
        """The reverse of `to_bytes`; refuses what is damaged."""
        return cls._of(*_reply_frame(data).unpack(data))

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Reply:
        """The reverse of `to_parts`."""
        head, blobs, _ = _reply_frame(parts[0] if parts else b"").unpack_parts(parts)
        return cls._of(head, blobs)

    @classmethod
    def _of(cls, head: tuple[Any, ...], blobs: list[bytes]) -> Reply:
        (round, client, examples, steps, loss, *held), (payload, buffers) = head, blobs
        if not math.isfinite(loss):
            raise NonFinite(f"client {client} reports the loss {loss}")
        return cls(round, client, payload, buffers, examples, steps, loss, Held(*held) if held else None)

    @property
    def size(self) -> int:
        """`len(to_bytes())`."""
        return self._frame.overhead + len(self.payload) + len(self.buffers)

    @property
    def _frame(self) -> Frame:
        return reply_frame(self.held is not None)

    @functools.cached_property
    def digest(self) -> bytes:
        """The name of this update."""
        return digest(self.payload)


def reply_frame(holding: bool) -> Frame:
    """The frame of a reply from a client that keeps its model, or of one that does not."""
    return REPLY_HOLDING if holding else REPLY


def _reply_frame(start: bytes) -> Frame:
    """That of the reply that starts like this."""
    return reply_frame(start[:4] == REPLY_HOLDING.magic)


@dataclass(frozen=True)
class Refusal:
    """From one client to the server: the instruction builds on something that the client does not hold."""

    round: int
    client: int
    held: Held | None
    """What it holds instead; None for nothing sound."""
    reason: str

    def to_bytes(self) -> bytes:
        """The message as it crosses a network."""
        head = (self.round, self.client, self.held is not None, *(self.held or (0, bytes(DIGEST))))
        return REFUSAL.pack(head, self.reason.encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> Refusal:
        """The reverse of `to_bytes`; refuses what is damaged."""
        (round, client, present, version, name), (reason,) = REFUSAL.unpack(data)
        if present > 1 or (not present and (version or any(name))):
            raise NonCanonical(f"the mark for what is held is {present} beside version {version}")
        try:
            text = reason.decode()
        except UnicodeDecodeError as error:
            raise NonCanonical(f"the reason is not UTF-8: {error}") from None
        return cls(round, client, Held(version, name) if present else None, text)


def answer_from_bytes(data: bytes) -> Reply | Refusal:
    """What a client sent: a reply or a refusal."""
    return Refusal.from_bytes(data) if data[:4] == REFUSAL.magic else Reply.from_bytes(data)


def answer_from_parts(parts: Sequence[bytes]) -> Reply | Refusal:
    """The same for a message in parts."""
    refused = bool(parts) and parts[0][:4] == REFUSAL.magic
    return Refusal.from_bytes(b"".join(parts)) if refused else Reply.from_parts(parts)
