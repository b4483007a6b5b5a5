"""The messages in which the halves of a round meet: an instruction, and a reply or a refusal.

Instructions and replies carry named streams, each the payload of one vector. `model` and `buffers` down, `update` and
`buffers` up are the usual ones; methods may add others, such as `control`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedcams.bits.checksum import CRC_RESIDUE
from fedcams.downlink.message import DIGEST, Held
from fedcams.errors import NonCanonical, NonFinite, UnknownVersion, WrongStreams
from fedcams.wire.frames import Frame, magic_of
from fedcams.wire.streams import LENGTH, StreamFrame, in_order

PROTOCOL = 2
"""What peers must agree on: the bytes of messages, what they mean, and the digest that names a reply."""
RELEASES = {1: "fedcams 0.1", 2: "fedcams 0.2"}
"""Protocol -> who speaks it."""

MODEL, UPDATE, BUFFERS = "model", "update", "buffers"
_REPLY = "QQQQd"  # round, client, examples, steps, loss
INSTRUCTION = StreamFrame(
    b"FCMI", b"FCNI", f"QQqBQ{DIGEST}s", MODEL, BUFFERS
)  # round, client, seed, accepted? round, digest
REPLY = StreamFrame(b"FCMR", b"FCNR", _REPLY, UPDATE, BUFFERS)
REPLY_HOLDING = StreamFrame(
    b"FCMH", b"FCNH", f"{_REPLY}Q{DIGEST}s", UPDATE, BUFFERS
)  # and version and digest of what is held
REFUSAL = Frame(b"FCMX", f"QQBQ{DIGEST}s", blobs=1)  # round, client, held? version, digest; why


def check_protocol(said: object, who: str) -> None:
    """Refuses a peer of another version by name.

    `said` is the protocol that the peer states, or None if it states none, as fedcams 0.1 does not; `who` names the
    peer, such as "node 12". Raises UnknownVersion, which says who has to update.
    """
    theirs = 1 if said is None else said
    if isinstance(theirs, bool) or not isinstance(theirs, int):
        raise UnknownVersion(f"{who} states the protocol {said!r}; expected {PROTOCOL}: install fedcams 0.2 there")
    if theirs != PROTOCOL:
        release, which = RELEASES.get(theirs, "another fedcams"), "it" if theirs < PROTOCOL else "this side"
        raise UnknownVersion(
            f"{who} speaks protocol {theirs} ({release}); this is protocol {PROTOCOL} ({RELEASES[PROTOCOL]}): "
            f"update {which}"
        )


def instruction_size(sizes: Mapping[str, int]) -> int:
    """Return the bytes of an instruction whose streams (name -> bytes of the payload) have these sizes.

    Refuses sets of streams that no instruction can carry.
    """
    return INSTRUCTION.size(sizes)


def reply_size(sizes: Mapping[str, int], holding: bool) -> int:
    """Return the bytes of a reply whose streams (name -> bytes of the payload) have these sizes.

    `holding` says whether the client keeps its model and names it. Refuses sets of streams that no reply can carry.
    """
    return _reply_frame(holding).size(sizes)


def refusal_size(reason: str) -> int:
    """Return the bytes of a refusal with this reason."""
    return REFUSAL.overhead + len(reason.encode())


@dataclass(frozen=True)
class Accepted:
    """The last update of a client that entered the model."""

    round: int
    digest: bytes


@dataclass(frozen=True)
class Instruction:
    """From the server to one client: train from this model.

    `streams` maps names to payloads and is kept in ascending order of names: `model`, `buffers` where the model has
    some, and what else the method sends. Refused: no stream or more than 16, a name other than 1 to 32 of a-z, 0-9, _
    and -, and an empty payload of anything but the model.
    """

    round: int
    client: int
    seed: int
    streams: Mapping[str, bytes]
    accepted: Accepted | None = None
    crc_checked: bool = field(default=False, compare=False)
    """Whether the model is known to end in its own checksum: it need not be read once more to find that out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "streams", in_order(self.streams, MODEL))

    def to_bytes(self) -> bytes:
        """Return the message as it crosses a network."""
        return b"".join(self.to_parts())

    def to_parts(self) -> list[bytes]:
        """Return the same bytes in parts; each payload is one of them, not copied, so that messages can share it."""
        last = self.accepted or Accepted(0, bytes(DIGEST))
        head = (self.round, self.client, self.seed, self.accepted is not None, last.round, last.digest)
        return INSTRUCTION.parts(head, self.streams, known={MODEL: CRC_RESIDUE} if self.crc_checked else {})

    @classmethod
    def from_bytes(cls, data: bytes) -> Instruction:
        """Read what `to_bytes` wrote; raises the WireError that says what is wrong."""
        return cls._of(*INSTRUCTION.unpack(data))

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Instruction:
        """Read what `to_parts` wrote, payloads not copied; raises the WireError that says what is wrong."""
        head, streams, checksums = INSTRUCTION.unpack_parts(parts)
        return dataclasses.replace(cls._of(head, streams), crc_checked=checksums.get(MODEL) == CRC_RESIDUE)

    @classmethod
    def _of(cls, head: tuple[Any, ...], streams: dict[str, bytes]) -> Instruction:
        round, client, seed, present, last, name = head
        accepted = Accepted(last, name) if present else None
        if present > 1 or (not present and (last or any(name))):
            raise NonCanonical(f"the mark for an accepted update is {present} beside round {last}")
        return cls(round, client, seed, streams, accepted)

    @property
    def size(self) -> int:
        """`len(to_bytes())`, without making them."""
        return INSTRUCTION.size(_sizes(self.streams))


@dataclass(frozen=True)
class Reply:
    """From one client to the server: the compressed update of a round and what the training saw.

    `streams` maps names to payloads, as in an Instruction: `update`, `buffers` where the model has some, and what else
    the method sends. `held` names the model that it was trained from, where clients keep theirs.
    """

    round: int
    client: int
    streams: Mapping[str, bytes]
    examples: int
    steps: int
    loss: float
    held: Held | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "streams", in_order(self.streams, UPDATE))

    def to_bytes(self) -> bytes:
        """Return the message as it crosses a network."""
        return b"".join(self.to_parts())

    def to_parts(self) -> list[bytes]:
        """Return the same bytes in parts, the payloads not copied."""
        head = (self.round, self.client, self.examples, self.steps, self.loss, *(self.held or ()))
        return self._frame.parts(head, self.streams, known={})

    @classmethod
    def from_bytes(cls, data: bytes) -> Reply:
        """Read what `to_bytes` wrote; raises the WireError that says what is wrong."""
        return cls._of(*_reply_frame(data[:4] in REPLY_HOLDING.magics).unpack(data))

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Reply:
        """Read what `to_parts` wrote, payloads not copied; raises the WireError that says what is wrong."""
        head, streams, _ = _reply_frame(magic_of(parts) in REPLY_HOLDING.magics).unpack_parts(parts)
        return cls._of(head, streams)

    @classmethod
    def _of(cls, head: tuple[Any, ...], streams: dict[str, bytes]) -> Reply:
        round, client, examples, steps, loss, *held = head
        if not math.isfinite(loss):
            raise NonFinite(f"client {client} reports the loss {loss}")
        return cls(round, client, streams, examples, steps, loss, Held(*held) if held else None)

    @property
    def size(self) -> int:
        """`len(to_bytes())`, without making them."""
        return self._frame.size(_sizes(self.streams))

    @property
    def _frame(self) -> StreamFrame:
        return _reply_frame(self.held is not None)

    @functools.cached_property
    def digest(self) -> bytes:
        """Sixteen bytes by which server and client name this reply; they cover every payload and its name."""
        return digest(self.streams)


def digest(streams: Mapping[str, bytes]) -> bytes:
    """Return 16 bytes, BLAKE2b of each stream in ascending order: length (1) of its name, name, length (8), payload."""
    made = hashlib.blake2b(digest_size=DIGEST, person=b"fedcams.reply")
    for name in sorted(streams):
        made.update(bytes([len(name)]) + name.encode() + LENGTH.pack(len(streams[name])))
        made.update(streams[name])
    return made.digest()


def expect_streams(message: Instruction | Reply, names: Collection[str]) -> None:
    """Refuses by WrongStreams a message that carries other streams than these."""
    if set(message.streams) != set(names):
        found, wanted = (", ".join(sorted(some)) for some in (message.streams, names))
        what = "a reply from" if isinstance(message, Reply) else "an instruction for"
        raise WrongStreams(f"{what} client {message.client} carries {found}; expected {wanted}")


def _sizes(streams: Mapping[str, bytes]) -> dict[str, int]:
    return {name: len(payload) for name, payload in streams.items()}


def _reply_frame(holding: bool) -> StreamFrame:
    """Of a reply from a client that keeps its model, or from one that does not."""
    return REPLY_HOLDING if holding else REPLY


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
    refused = magic_of(parts) == REFUSAL.magic
    return Refusal.from_bytes(b"".join(parts)) if refused else Reply.from_parts(parts)
