"""Instructions and replies as bytes: one encoding each, old bytes still valid, one error per kind of mistake."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcams import encode
from fedcams.downlink import Held
from fedcams.errors import (
    BadMagic,
    BadStreamCount,
    BadStreamName,
    ChecksumMismatch,
    NonCanonical,
    NonFinite,
    TrailingBytes,
    Truncated,
    UnknownVersion,
    UnorderedStreams,
    WireError,
    WrongStreams,
)
from fedcams.rounds import Accepted, Instruction, Refusal, Reply, answer_from_bytes, answer_from_parts
from fedcams.rounds.messages import PROTOCOL, check_protocol, expect_streams, instruction_size, reply_size
from together import together

Message = Instruction | Reply
NAME = bytes(range(16))

GOLDEN: list[tuple[Message | Refusal, str]] = [
    (
        Instruction(3, 5, -1, {"model": b"model"}),
        (
            "46434d490103000000000000000500000000000000ffffffffffffffff000000000000000000000000000000000000000000"
            "00000000050000000000000000000000000000006d6f64656c80af5d0c"
        ),
    ),
    (
        Instruction(3, 5, -1, {"model": b"model", "buffers": b"buffers"}, Accepted(2, NAME)),
        (
            "46434d490103000000000000000500000000000000ffffffffffffffff010200000000000000000102030405060708090a0b"
            "0c0d0e0f050000000000000007000000000000006d6f64656c62756666657273b1f3deca"
        ),
    ),
    (
        Instruction(1, 0, 7, {"model": b""}),
        (
            "46434d4901010000000000000000000000000000000700000000000000000000000000000000000000000000000000000000"
            "00000000000000000000000000000000000000009e2d6c69"
        ),
    ),
    (
        Reply(3, 5, {"update": b"update"}, 10, 2, 0.5),
        (
            "46434d5201030000000000000005000000000000000a000000000000000200000000000000000000000000e03f0600000000"
            "0000000000000000000000757064617465e644e1b7"
        ),
    ),
    (
        Reply(3, 5, {"update": b"update", "buffers": b"buffers"}, 10, 2, 0.5),
        (
            "46434d5201030000000000000005000000000000000a000000000000000200000000000000000000000000e03f0600000000"
            "00000007000000000000007570646174656275666665727388c3c340"
        ),
    ),
    (
        Reply(3, 5, {"update": b"update"}, 10, 2, 0.5, Held(2, NAME)),
        (
            "46434d4801030000000000000005000000000000000a000000000000000200000000000000000000000000e03f0200000000"
            "000000000102030405060708090a0b0c0d0e0f060000000000000000000000000000007570646174652226d3c7"
        ),
    ),
    (
        Reply(3, 5, {"update": b"update", "buffers": b"buffers"}, 10, 2, 0.5, Held(2, NAME)),
        (
            "46434d4801030000000000000005000000000000000a000000000000000200000000000000000000000000e03f0200000000"
            "000000000102030405060708090a0b0c0d0e0f06000000000000000700000000000000757064617465627566666572733b9d"
            "738d"
        ),
    ),
    (
        Refusal(3, 5, None, "because"),
        (
            "46434d5801030000000000000005000000000000000000000000000000000000000000000000000000000000000007000000"
            "0000000062656361757365a8cc5e7e"
        ),
    ),
    (
        Refusal(3, 5, Held(2, NAME), "because"),
        (
            "46434d580103000000000000000500000000000000010200000000000000000102030405060708090a0b0c0d0e0f07000000"
            "0000000062656361757365b2cd88c3"
        ),
    ),
]
"""What fedcams 0.1 wrote for the same contents."""


@together(("message", "expected"), GOLDEN)
def test_the_usual_sets_of_streams_have_the_bytes_of_version_0_1(message: Message | Refusal, expected: str) -> None:
    assert message.to_bytes().hex() == expected
    assert type(message).from_bytes(bytes.fromhex(expected)) == message


# -- round trips -------------------------------------------------------------------------------------------------------

u64 = st.integers(0, 2**64 - 1)
digests = st.binary(min_size=16, max_size=16)
names = st.one_of(
    st.sampled_from(["model", "update", "buffers", "control"]),
    st.text("abcdefghijklmnopqrstuvwxyz0123456789_-", min_size=1, max_size=32),
)
streams = st.dictionaries(names, st.binary(min_size=1, max_size=40), min_size=1, max_size=16)
instructions = st.builds(
    Instruction,
    u64,
    u64,
    st.integers(-(2**63), 2**63 - 1),
    streams | st.binary().map(lambda payload: {"model": payload}),
    st.none() | st.builds(Accepted, u64, digests),
)
replies = st.builds(
    Reply,
    u64,
    u64,
    streams | st.binary().map(lambda payload: {"update": payload}),
    u64,
    u64,
    st.floats(allow_nan=False, allow_infinity=False),
    st.none() | st.builds(Held, u64, digests),
)


@given(instructions | replies)
def test_messages_come_back_from_bytes_and_from_parts_however_they_are_cut(message: Message) -> None:
    data, parts = message.to_bytes(), message.to_parts()
    assert b"".join(parts) == data
    assert len(data) == message.size
    cuts = [parts, [data], [data[:2], data[2:]], [data[:50], data[50:]], [parts[0] + parts[1], *parts[2:]]]
    back = [type(message).from_bytes(data), *(type(message).from_parts(cut) for cut in cuts)]
    for other in back:
        assert other == message
        assert list(other.streams) == sorted(message.streams)
        assert other.to_bytes() == data
    if isinstance(message, Reply):
        assert answer_from_bytes(data) == message
        assert all(answer_from_parts(cut) == message for cut in cuts)


@given(instructions | replies)
def test_sizes_are_known_without_making_bytes(message: Message) -> None:
    sizes = {name: len(payload) for name, payload in message.streams.items()}
    if isinstance(message, Instruction):
        assert instruction_size(sizes) == len(message.to_bytes())
    else:
        assert reply_size(sizes, holding=message.held is not None) == len(message.to_bytes())


def test_the_order_in_which_streams_are_given_does_not_matter() -> None:
    one, other = (dict(order) for order in ([("a", b"1"), ("b", b"2")], [("b", b"2"), ("a", b"1")]))
    assert Instruction(1, 2, 3, one).to_bytes() == Instruction(1, 2, 3, other).to_bytes()
    assert Reply(1, 2, one, 3, 4, 0.5).digest == Reply(1, 2, other, 3, 4, 0.5).digest


def test_a_message_keeps_its_streams_when_the_caller_changes_the_mapping() -> None:
    given = {"model": b"model"}
    message = Instruction(1, 2, 3, given)
    given["control"] = b"c"
    assert message.streams == {"model": b"model"}


# -- parts -------------------------------------------------------------------------------------------------------------

CHECKED_MODEL = encode("identity", torch.arange(10.0))


@pytest.mark.parametrize("extra", [{}, {"buffers": b"b" * 9}, {"control": b"c" * 9}, {"a": b"1", "z": b"2"}])
def test_no_payload_is_copied_into_parts_or_out_of_them(extra: dict[str, bytes]) -> None:
    message = Instruction(1, 2, 3, {"model": CHECKED_MODEL, **extra}, crc_checked=True)
    parts = message.to_parts()
    back = Instruction.from_parts(parts)
    assert parts == dataclasses.replace(message, crc_checked=False).to_parts(), (
        "the model is not read, with the same result"
    )
    assert back.crc_checked
    assert not Instruction.from_parts([b"".join(parts)]).crc_checked, "the model was not checked on its own"
    for name, payload in message.streams.items():
        assert sum(part is payload for part in parts) == 1
        assert back.streams[name] is payload


@pytest.mark.parametrize("extra", [{}, {"control": b"c" * 9}])
def test_only_a_model_that_ends_in_its_checksum_is_sealed(extra: dict[str, bytes]) -> None:
    damaged = CHECKED_MODEL[:-10] + bytes([CHECKED_MODEL[-10] ^ 1]) + CHECKED_MODEL[-9:]
    assert not Instruction.from_parts(Instruction(1, 2, 3, {"model": damaged, **extra}).to_parts()).crc_checked


# -- damage ------------------------------------------------------------------------------------------------------------

EXAMPLES: list[Message] = [
    *(message for message, _ in GOLDEN if not isinstance(message, Refusal)),
    Instruction(3, 5, -1, {"control": b"control", "model": b"model"}, Accepted(2, NAME)),
    Instruction(3, 5, -1, {f"s{i:02}": bytes([i + 1]) for i in range(16)}),
    Reply(3, 5, {"update": b"update", "control": b"control", "buffers": b"buffers"}, 10, 2, 0.5),
    Reply(3, 5, {"buffers": b"buffers"}, 10, 2, 0.5, Held(2, NAME)),
]


def resealed(data: bytes) -> bytes:
    """With the checksum that belongs to it."""
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4]))


@together("message", EXAMPLES)
def test_any_single_byte_that_changes_is_noticed(message: Message) -> None:
    data = message.to_bytes()
    for at in range(len(data)):
        for flip in (0x01, 0x20, 0x80, 0xFF):
            changed = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
            with pytest.raises(WireError):
                type(message).from_bytes(changed)


@together("message", EXAMPLES)
def test_a_change_under_a_right_checksum_is_another_message_or_refused(message: Message) -> None:
    """No two byte strings mean the same, so what is read back writes exactly what was read."""
    data = message.to_bytes()
    read = 0
    for at in range(len(data) - 4):
        for value in {0, 1, 2, 0x61, 0xFF, *(data[at] ^ 1 << bit for bit in range(8))} - {data[at]}:
            changed = resealed(data[:at] + bytes([value]) + data[at + 1 :])
            try:
                other = type(message).from_bytes(changed)
            except WireError:
                continue
            read += 1
            assert other != message
            assert other.to_bytes() == changed
            assert other.size == len(changed)
    assert read > 40, "most numbers in the head and all payload bytes may be anything"


@together("message", EXAMPLES)
def test_cut_and_lengthened_messages_are_refused(message: Message) -> None:
    data = message.to_bytes()
    for end in range(len(data)):
        with pytest.raises(Truncated):
            type(message).from_bytes(data[:end])
    for more in (b"\0", b"x" * 100):
        with pytest.raises(TrailingBytes):
            type(message).from_bytes(data + more)


@together("message", EXAMPLES)
def test_damaged_parts_are_refused(message: Message) -> None:
    parts = message.to_parts()
    for i in range(len(parts)):
        for damaged in (parts[i][:-1], parts[i] + b"x", b"\x81" + parts[i][1:]):
            if damaged != parts[i]:
                with pytest.raises(WireError):
                    type(message).from_parts([*parts[:i], damaged, *parts[i + 1 :]])
    with pytest.raises(WireError):
        type(message).from_parts([])


# -- each way to be wrong ----------------------------------------------------------------------------------------------

HEAD = struct.pack("<4sBQQQQd", b"FCNR", 1, 3, 5, 10, 2, 0.5)


def table(*entries: tuple[bytes, bytes], count: int | None = None) -> bytes:
    """A reply with these streams, whatever they are, under a right checksum."""
    lines = b"".join(bytes([len(name)]) + name + struct.pack("<Q", len(payload)) for name, payload in entries)
    body = lines + b"".join(payload for _, payload in entries)
    return resealed(HEAD + bytes([len(entries) if count is None else count]) + body + bytes(4))


def test_the_table_of_this_test_is_the_one_that_replies_write() -> None:
    reply = Reply(3, 5, {"update": b"update", "control": b"cc"}, 10, 2, 0.5)
    assert table((b"control", b"cc"), (b"update", b"update")) == reply.to_bytes()


MANY = [(b"s%02d" % i, b"x") for i in range(17)]
WRONG: dict[str, tuple[bytes, type[WireError], str]] = {
    "too many": (table(*MANY), BadStreamCount, "a message of 17 streams; allowed: 1 to 16"),
    "claims too many": (table(MANY[0], count=255), BadStreamCount, "a message of 255 streams"),
    "none": (table(), BadStreamCount, "a message of 0 streams; allowed: 1 to 16"),
    "nameless": (table((b"", b"x")), BadStreamName, "the name of a stream has 0 bytes; allowed: 1 to 32"),
    "long name": (table((b"a" * 33, b"x")), BadStreamName, "has 33 bytes; allowed: 1 to 32"),
    "capital": (table((b"Control", b"x")), BadStreamName, "a stream named 'Control'; allowed: 1 to 32 characters"),
    "not ASCII": (table((b"\xe9", b"x")), BadStreamName, "a stream named 'é'"),
    "new line": (table((b"a\n", b"x")), BadStreamName, r"a stream named 'a\n'"),
    "descending": (
        table((b"update", b"x"), (b"control", b"y")),
        UnorderedStreams,
        "the stream 'control' follows 'update'; names must ascend, each once",
    ),
    "twice": (table((b"a", b"x"), (b"a", b"y")), UnorderedStreams, "the stream 'a' follows 'a'"),
    "old set": (
        table((b"update", b"x")),
        NonCanonical,
        "the streams update under FCNR; this set needs the magic FCMR",
    ),
    "old pair": (
        table((b"buffers", b"x"), (b"update", b"y")),
        NonCanonical,
        "the streams buffers, update under FCNR; this set needs the magic FCMR",
    ),
    "empty": (table((b"a", b"x"), (b"b", b"")), NonCanonical, "the stream 'b' is empty; leave it out"),
    "table goes on": (table((b"a", b"\1"), count=3), Truncated, "the table of streams takes at least 66"),
    "length beyond the end": (
        resealed(HEAD + b"\1\1a" + struct.pack("<Q", 2**64 - 1) + bytes(4)),
        Truncated,
        f"60 bytes; the header says {59 + 2**64}",
    ),
    "length too short": (
        resealed(HEAD + b"\1\1a" + struct.pack("<Q", 1) + b"xyz" + bytes(4)),
        TrailingBytes,
        "63 bytes; the header says 61",
    ),
    "checksum": (table((b"a", b"x"))[:-1] + b"\0", ChecksumMismatch, "the bytes were changed in transit"),
    "other magic": (GOLDEN[0][0].to_bytes(), BadMagic, "FCMR"),
    "other version": (
        resealed(HEAD[:4] + b"\x09" + HEAD[5:] + bytes(20)),
        UnknownVersion,
        "version 9; this reader knows version 1, update fedcams",
    ),
    "loss": (
        resealed(struct.pack("<4sBQQQQdB", b"FCNR", 1, 3, 5, 10, 2, float("nan"), 1) + table((b"a", b"x"))[46:]),
        NonFinite,
        "client 5 reports the loss nan",
    ),
}


@together("name", WRONG)
def test_each_way_to_be_wrong_has_its_error(name: str) -> None:
    data, kind, text = WRONG[name]
    for read in (Reply.from_bytes, answer_from_bytes, lambda data: Reply.from_parts([data[:46], data[46:]])):
        with pytest.raises(WireError, match=re.escape(text)) as caught:
            read(data)
        assert type(caught.value) is kind


def test_a_mark_for_an_accepted_update_is_zero_or_one() -> None:
    data = Instruction(3, 5, 7, {"a": b"x"}).to_bytes()
    with pytest.raises(NonCanonical, match="the flag for an accepted update is 2 with round 0"):
        Instruction.from_bytes(resealed(data[:29] + b"\2" + data[30:]))
    with pytest.raises(NonCanonical, match="the flag for an accepted update is 0 with round 1"):
        Instruction.from_bytes(resealed(data[:30] + b"\1" + data[31:]))


def test_a_mark_for_a_held_model_is_zero_or_one() -> None:
    data = Refusal(3, 5, None, "because").to_bytes()
    assert Refusal.from_bytes(resealed(data)) == Refusal(3, 5, None, "because")
    with pytest.raises(NonCanonical, match="the flag for a held model is 2 with version 0"):
        Refusal.from_bytes(resealed(data[:21] + b"\2" + data[22:]))
    for place, version in ((22, 1), (30, 0)):  # in the version and in the digest
        with pytest.raises(NonCanonical, match=f"the flag for a held model is 0 with version {version}"):
            Refusal.from_bytes(resealed(data[:place] + b"\1" + data[place + 1 :]))


def test_an_old_frame_with_a_bad_loss_is_refused() -> None:
    with pytest.raises(NonFinite, match="client 5 reports the loss nan"):
        Reply.from_bytes(Reply(3, 5, {"update": b"x"}, 10, 2, float("nan")).to_bytes())


@together(
    ("bad", "kind"),
    [
        ({}, BadStreamCount),
        ({f"s{i}": b"x" for i in range(17)}, BadStreamCount),
        ({"Model": b"x"}, BadStreamName),
        ({"": b"x"}, BadStreamName),
        ({"a" * 33: b"x"}, BadStreamName),
        ({"model": b"x", "update": b"x", "buffers": b""}, NonCanonical),
    ],
)
def test_streams_that_cannot_travel_are_refused_at_construction(bad: dict[str, bytes], kind: type[WireError]) -> None:
    sizes = {name: len(payload) for name, payload in bad.items()}
    for make in (
        lambda: Instruction(1, 2, 3, bad),
        lambda: Reply(1, 2, bad, 3, 4, 0.5),
        lambda: instruction_size(sizes),
        lambda: reply_size(sizes, holding=True),
    ):
        with pytest.raises(kind):
            make()


def test_the_longest_names_and_the_most_streams_travel() -> None:
    most = {f"{i:032x}": b"x" for i in range(16)}
    assert Instruction.from_bytes(Instruction(1, 2, 3, most).to_bytes()).streams == most


# -- the name of a reply -----------------------------------------------------------------------------------------------


def test_the_digest_covers_every_payload_and_every_name() -> None:
    base = {"control": b"one", "update": b"two"}
    others = [
        base,
        {"control": b"one", "update": b"twO"},
        {"control": b"onE", "update": b"two"},
        {"controk": b"one", "update": b"two"},
        {"control": b"onet", "update": b"wo"},
        {"update": b"two"},
        {"update": b"two", "buffers": b"one"},
        {"control": b"one", "update": b"two", "z": b"x"},
    ]
    assert len({Reply(1, 2, streams, 3, 4, 0.5).digest for streams in others}) == len(others)
    written = b"\x07control" + struct.pack("<Q", 3) + b"one" + b"\x06update" + struct.pack("<Q", 3) + b"two"
    expected = hashlib.blake2b(written, digest_size=16, person=b"fedcams.reply").digest()
    assert Reply(1, 2, base, 3, 4, 0.5).digest == Reply(9, 8, base, 7, 6, 0.1).digest == expected


# -- what a reader needs, and of whom ----------------------------------------------------------------------------------


def test_a_reader_says_which_streams_it_needs() -> None:
    reply = Reply(1, 2, {"update": b"u", "control": b"c"}, 3, 4, 0.5)
    expect_streams(reply, ["update", "control"])
    with pytest.raises(WrongStreams, match=r"^a reply from client 2 carries control, update; expected update$"):
        expect_streams(reply, ["update"])
    with pytest.raises(WrongStreams, match=r"^an instruction for client 2 carries x; expected buffers, model$"):
        expect_streams(Instruction(1, 2, 3, {"x": b"x"}), ["model", "buffers"])


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (1, "node 12 speaks protocol 1 (fedcams 0.1); this is protocol 2 (fedcams 0.2): update it"),
        (None, "node 12 speaks protocol 1 (fedcams 0.1); this is protocol 2 (fedcams 0.2): update it"),
        (3, "node 12 speaks protocol 3 (another fedcams); this is protocol 2 (fedcams 0.2): update this side"),
        ("2", "node 12 states the protocol '2'; expected 2"),
        (True, "node 12 states the protocol True; expected 2"),
    ],
)
def test_a_peer_of_another_version_is_refused_by_name(said: Any, text: str) -> None:
    check_protocol(PROTOCOL, "node 12")
    with pytest.raises(UnknownVersion, match=re.escape(text)):
        check_protocol(said, "node 12")


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_message_in_hex_is_the_one_that_a_reply_writes() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "wire-format.md").read_text("utf-8")
    block = text.split("### One message in hex")[1].split("```text")[1].split("```")[0]
    data = bytes.fromhex("".join(re.findall(r"^(?:[0-9a-f]{2} ?)+", block, re.MULTILINE)))
    reply = Reply(3, 5, {"update": b"\x01\x02\x03", "control": b"\x04\x05"}, examples=10, steps=2, loss=0.5)
    assert reply.to_bytes() == data
    assert Reply.from_bytes(data) == reply
    digest = re.search(r"digest of this reply is `([0-9a-f]{32})`", text)
    assert digest is not None
    assert reply.digest.hex() == digest[1]
