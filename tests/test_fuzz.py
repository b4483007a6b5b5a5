"""Two hundred thousand damaged payloads: each is refused, or is a payload whose code packs to the same bytes."""

from __future__ import annotations

import random
import resource
import struct
import zlib
from typing import Any

import pytest
import torch

from fedcams import Layout, WireError, compressor
from fedcams.compress import Compressor
from fedcams.downlink import Held
from fedcams.downlink.message import Message
from fedcams.registry import registered
from fedcams.rounds import Accepted, Instruction, Refusal, Reply
from fedcams.wire import pack, unpack

CASES = 200_000
WORKERS = 8
MAX_D = 1 << 14
GROWTH = 256 * 1024  # kilobytes of memory that decoding strangers' bytes may take


def seeds() -> list[bytes]:
    """Valid payloads of every registered compressor, of flat vectors and of layouts with tensors."""
    specs = [spec for cls in registered("compressor").values() for spec in cls.examples]
    return [_payload(compressor(spec), layout, d) for spec in specs for d in (1, 9, 70) for layout in _layouts(d)]


def _layouts(d: int) -> list[Layout]:
    return [Layout.flat(d), Layout(("a", "b"), ((d // 2,), (d - d // 2,)))]


def _payload(codec: Compressor, layout: Layout, d: int) -> bytes:
    x = torch.randn(d, generator=torch.Generator().manual_seed(d))
    return pack(codec, codec.encode(x, layout, key=d), layout)


def flip(data: bytearray, draw: random.Random, _: list[bytes]) -> None:
    for _ in range(draw.randint(1, 3)):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def overwrite(data: bytearray, draw: random.Random, _: list[bytes]) -> None:
    data[draw.randrange(len(data))] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])


def truncate(data: bytearray, draw: random.Random, _: list[bytes]) -> None:
    del data[draw.randrange(len(data)) :]


def splice(data: bytearray, draw: random.Random, pool: list[bytes]) -> None:
    other = draw.choice(pool)
    at = draw.randrange(len(data))
    data[at : at + draw.randrange(20)] = other[draw.randrange(len(other)) :][: draw.randrange(40)]


def insert(data: bytearray, draw: random.Random, _: list[bytes]) -> None:
    at = draw.randrange(len(data))
    data[at:at] = draw.randbytes(draw.randint(1, 9))


def length_bomb(data: bytearray, draw: random.Random, _: list[bytes]) -> None:
    """A huge d, or a spec whose length or k is out of proportion."""
    kind = draw.randrange(3) if len(data) > 30 else 0
    if kind == 0:
        data[6:14] = struct.pack("<Q", draw.choice([*LENGTHS, draw.randrange(300)]))
    elif kind == 1:
        data[5] = draw.choice([0, 1, 255, draw.randrange(256)])
    else:
        spec = draw.choice(BOMBS)
        data[22 : 22 + data[5]] = spec
        data[5] = len(spec)


LENGTHS = [0, 2, 2**14, 2**26, 2**31, 2**40, 2**63, 2**64 - 1]
BOMBS = [
    b"topk(k=9999999)",
    b"topk(ratio=1)",
    b"randk(k=1e300)",
    b"topk(k=16384)",
    b"sign(scope=tensor)",
    b"ternary(k=9)",
]
MUTATIONS = [flip, overwrite, truncate, splice, insert, length_bomb]


def mutate(data: bytes, draw: random.Random, pool: list[bytes]) -> bytes:
    damaged = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        draw.choice(MUTATIONS)(damaged, draw, pool)
        damaged = damaged or bytearray(1)
    return bytes(damaged)


def with_checksum(data: bytes) -> bytes:
    return data[:-4] + struct.pack("<I", zlib.crc32(data[:-4])) if len(data) >= 4 else data


@pytest.mark.parametrize("worker", [0, 1, *(pytest.param(more, marks=pytest.mark.slow) for more in range(2, WORKERS))])
def test_damaged_payloads_are_refused_or_canonical(worker: int) -> None:
    draw, pool = random.Random(worker), seeds()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    decoded = refused = 0
    for case in range(CASES // WORKERS):
        data = mutate(draw.choice(pool), draw, pool)
        data = with_checksum(data) if case % 2 else data
        try:
            payload = unpack(data, max_d=MAX_D)
        except WireError:
            refused += 1
            continue
        x = payload.decode()
        assert x.shape == (payload.layout.d,)
        assert bool(torch.isfinite(x).all())
        assert payload.pack() == data
        decoded += 1
    assert decoded > CASES // WORKERS // 50, "mutations should leave some payloads valid, or nothing is tested"
    assert refused > CASES // WORKERS // 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH


def test_damaged_payloads_of_a_known_layout() -> None:
    """The same with the reader's own layout, as the aggregator reads."""
    draw, layout = random.Random(99), Layout(("a", "b"), ((1, 5, 7), (35,)))
    specs = [spec for cls in registered("compressor").values() for spec in cls.examples]
    pool = [_payload(compressor(spec), layout, 70) for spec in specs]
    for _ in range(5000):
        data = with_checksum(mutate(draw.choice(pool), draw, pool))
        try:
            payload = unpack(data, layout)
        except WireError:
            continue
        assert payload.decode().shape == (70,)
        assert payload.pack() == data


@pytest.mark.parametrize("kind", [Instruction, Reply, Refusal, Message])
def test_damaged_messages_are_refused_or_canonical(kind: Any) -> None:
    draw = random.Random(7)
    pool = [
        Instruction(3, 5, -1, {"model": b"model", "buffers": b"buffers"}, Accepted(2, bytes(range(16)))).to_bytes(),
        Instruction(1, 0, 7, {"model": b""}).to_bytes(),
        Instruction(3, 5, -1, {"model": b"model", "control": b"control", "x": b"y"}).to_bytes(),
        Reply(3, 5, {"update": b"payload"}, 10, 2, 0.5).to_bytes(),
        Reply(3, 5, {"update": b"payload", "control": b"c"}, 10, 2, 0.5).to_bytes(),
        Reply(3, 5, {"update": b"payload"}, 10, 2, 0.5, Held(3, bytes(range(16)))).to_bytes(),
        Reply(3, 5, {"a": b"a", "z": b"z"}, 10, 2, 0.5, Held(3, bytes(range(16)))).to_bytes(),
        Refusal(3, 5, Held(3, bytes(range(16))), "because").to_bytes(),
        Message(1, Held(2, bytes(range(16))), Held(3, bytes(range(16))), [b"one", b"two"]).to_bytes(),
        Message(0, None, Held(3, bytes(range(16))), [b"model"]).to_bytes(),
    ]
    for case in range(10_000):
        data = mutate(draw.choice(pool), draw, pool)
        data = with_checksum(data) if case % 2 else data
        try:
            message = kind.from_bytes(data)
        except WireError:
            continue
        assert message.to_bytes() == data
        assert getattr(message, "size", len(data)) == len(data)
