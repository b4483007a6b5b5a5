"""The messages between the two sides of a round: an instruction, and a reply or a refusal.

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
from fedcams.downlink.message import BUFFERS, DIGEST, MODEL, Held
from fedcams.errors import NonCanonical, NonFinite, UnknownVersion, WrongStreams
from fedcams.wire.frames import Frame, magic_of
from fedcams.wire.streams import LENGTH, StreamFrame, in_order

PROTOCOL = 2
"""The version that peers must agree on: of the messages' bytes, their meaning, and the digest that names a reply."""
RELEASES = {1: "fedcams 0.1", 2: "fedcams 0.2"}
"""Protocol -> the release that speaks it."""

UPDATE = "update"
_REPLY = "QQQQd"  # round, client, examples, steps, loss
_HOLDING = f"{_REPLY}Q{DIGEST}s"  # and version and digest of what is held
_INSTRUCTION = f"QQqBQ{DIGEST}s"  # round, client, seed, accepted? round, digest
INSTRUCTION = StreamFrame(b"FCMI", b"FCNI", _INSTRUCTION, MODEL, BUFFERS)
REPLY = StreamFrame(b"FCMR", b"FCNR", _REPLY, UPDATE, BUFFERS)
REPLY_HOLDING = StreamFrame(b"FCMH", b"FCNH", _HOLDING, UPDATE, BUFFERS)
REFUSAL = Frame(b"FCMX", f"QQBQ{DIGEST}s", blobs=1)  # round, client, held? version, digest; why


def check_protocol(said: object, who: str) -> None:
    """Refuse a peer that speaks another protocol, naming its release.

    `said` is the protocol that the peer states; None, as from fedcams 0.1, means version 1. `who` names the peer, such
    as "node 12". Raises UnknownVersion, which says which side has to update.
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
    """Return the length of an instruction with payloads of these lengths, by stream; refuses sets it cannot carry."""
    return INSTRUCTION.size(sizes)


def reply_size(sizes: Mapping[str, int], holding: bool) -> int:
    """Return the length of a reply whose streams have payloads of these lengths, by name.

    `holding` says whether the client keeps its model and names it. Refuses sets of streams that no reply can carry.
    """
    return _reply_frame(holding).size(sizes)


def refusal_size(reason: str) -> int:
    """Return the length of a refusal with this reason."""
    return REFUSAL.overhead + len(reason.encode())


@dataclass(frozen=True)
class Accepted:
    """The last update of a client that the server accepted: its round and the digest of its reply."""

    round: int
    digest: bytes


@dataclass(frozen=True)
class Instruction:
    """The server's message to one client: train from this model.

    `streams` maps names to payloads, in ascending order of names: `model`, `buffers` if the model has any, and what
    else the method sends. Refused: no stream or more than 16, names that are not 1 to 32 characters of a-z, 0-9, _ and
    -, and empty payloads except the model's.
    """

    round: int
    client: int
    seed: int
    streams: Mapping[str, bytes]
    accepted: Accepted | None = None
    crc_checked: bool = field(default=False, compare=False)
    """Whether the model is known to end in its own valid checksum, so that it need not be verified again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "streams", in_order(self.streams, MODEL))

    def to_bytes(self) -> bytes:
        """Return the message as it crosses a network."""
        return b"".join(self.to_parts())

    def to_parts(self) -> list[bytes]:
        """Return the same bytes in parts; each payload is one part and is not copied, so that messages can share it."""
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
            raise NonCanonical(f"the flag for an accepted update is {present} with round {last}")
        return cls(round, client, seed, streams, accepted)

    @property
    def size(self) -> int:
        """The length of `to_bytes()`, found without making the bytes."""
        return INSTRUCTION.size(_sizes(self.streams))


@dataclass(frozen=True)
class Reply:
    """A client's message to the server: the compressed update of a round, and the facts of its training.

    `streams` maps names to payloads, as in an Instruction: `update`, `buffers` if the model has any, and what else the
    method sends. `held` names the model that it was trained from, if clients keep theirs.
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
        """The length of `to_bytes()`, found without making the bytes."""
        return self._frame.size(_sizes(self.streams))

    @property
    def _frame(self) -> StreamFrame:
        return _reply_frame(self.held is not None)

    @functools.cached_property
    def digest(self) -> bytes:
        """Sixteen bytes by which server and client name this reply; they cover every payload and its name."""
        return digest(self.streams)


def digest(streams: Mapping[str, bytes]) -> bytes:
    """Return a 16-byte BLAKE2b digest of streams.

    It covers, for each stream in ascending order: the length of its name (1 byte), the name, the length of its payload
    (8) and the payload.
    """
    made = hashlib.blake2b(digest_size=DIGEST, person=b"fedcams.reply")
    for name in sorted(streams):
        made.update(bytes([len(name)]) + name.encode() + LENGTH.pack(len(streams[name])))
        made.update(streams[name])
    return made.digest()


def expect_streams(message: Instruction | Reply, names: Collection[str]) -> None:
    """Refuse a message that does not carry exactly the streams `names`; raises WrongStreams."""
    if set(message.streams) != set(names):
        found, wanted = (", ".join(sorted(some)) for some in (message.streams, names))
        what = "a reply from" if isinstance(message, Reply) else "an instruction for"
        raise WrongStreams(f"{what} client {message.client} carries {found}; expected {wanted}")


def _sizes(streams: Mapping[str, bytes]) -> dict[str, int]:
    return {name: len(payload) for name, payload in streams.items()}


def _reply_frame(holding: bool) -> StreamFrame:
    """Return the frame of replies from clients that keep their model, or from others."""
    return REPLY_HOLDING if holding else REPLY


@dataclass(frozen=True)
class Refusal:
    """A client's message to the server: it cannot answer the instruction.

    Either the instruction builds on a model that the client does not hold, or training gave values that are not finite.
    """

    round: int
    client: int
    held: Held | None
    """What the client holds; None for nothing usable."""
    reason: str

    def to_bytes(self) -> bytes:
        """Return the message as it crosses a network."""
        head = (self.round, self.client, self.held is not None, *(self.held or (0, bytes(DIGEST))))
        return REFUSAL.pack(head, self.reason.encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> Refusal:
        """Read what `to_bytes` wrote; raises the WireError that says what is wrong."""
        (round, client, present, version, name), (reason,) = REFUSAL.unpack(data)
        if present > 1 or (not present and (version or any(name))):
            raise NonCanonical(f"the flag for a held model is {present} with version {version}")
        try:
            text = reason.decode()
        except UnicodeDecodeError as error:
            raise NonCanonical(f"the reason is not UTF-8: {error}") from None
        return cls(round, client, Held(version, name) if present else None, text)


def answer_from_bytes(data: bytes) -> Reply | Refusal:
    """Return the reply or refusal in these bytes.

    Arguments:
        data: a client's message.

    Returns:
        The reply or refusal.

    Raises:
        WireError: the subclass that says what is wrong.

    Examples:
        >>> from fedcams.rounds import Refusal, answer_from_bytes
        >>> answer_from_bytes(Refusal(round=3, client=7, held=None, reason="no model yet").to_bytes()).reason
        'no model yet'
    """
    return Refusal.from_bytes(data) if data[:4] == REFUSAL.magic else Reply.from_bytes(data)


def answer_from_parts(parts: Sequence[bytes]) -> Reply | Refusal:
    """Return the reply or refusal in these parts, without copying its payloads.

    Arguments:
        parts: a client's message, as `Reply.to_parts` makes it.

    Returns:
        The reply or refusal.

    Raises:
        WireError: the subclass that says what is wrong.

    Examples:
        >>> from fedcams.rounds import Refusal, answer_from_parts
        >>> answer_from_parts([Refusal(round=3, client=7, held=None, reason="no model yet").to_bytes()]).client
        7
    """
    refused = magic_of(parts) == REFUSAL.magic
    return Refusal.from_bytes(b"".join(parts)) if refused else Reply.from_parts(parts)
