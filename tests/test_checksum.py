"""Checksums of ranges, combined into that of the whole."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcams import Layout, encode
from fedcams.bits.checksum import CRC_RESIDUE, LONG, crc32, joined
from fedcams.downlink import downlink
from fedcams.errors import ChecksumMismatch
from fedcams.rounds import Instruction
from together import together


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_checksums_joined_are_that_of_both(first: bytes, second: bytes) -> None:
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@together("length", [0, 1, 1000, LONG - 1, LONG, LONG + 1, 3 * LONG + 12345])
@together("start", [0, 0xFFFFFFFF, 123456789])
@together("threads", [1, 3])
def test_it_is_zlibs(length: int, start: int, threads: int) -> None:
    before = torch.get_num_threads()
    data = torch.randint(256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
    try:
        torch.set_num_threads(threads)
        for kind in (bytes, bytearray, memoryview):
            assert crc32(kind(data.numpy().tobytes()), start) == zlib.crc32(data.numpy(), start)
    finally:
        torch.set_num_threads(before)


@given(st.binary(max_size=300))
def test_what_ends_in_its_own_checksum_is_sealed_and_nothing_else(data: bytes) -> None:
    own = zlib.crc32(data)
    assert crc32(data + own.to_bytes(4, "little")) == CRC_RESIDUE
    assert crc32(data + (own ^ 1).to_bytes(4, "little")) != CRC_RESIDUE


def test_a_message_around_a_sealed_model_is_the_same_unread() -> None:
    model = encode("identity", torch.arange(10.0))
    known, unknown = (Instruction(1, 2, 3, {"model": model}, crc_checked=crc_checked) for crc_checked in (True, False))
    assert known.to_parts() == unknown.to_parts()
    assert Instruction.from_parts(known.to_parts()).crc_checked


def test_a_damaged_model_in_a_sound_message_is_refused() -> None:
    model = bytearray(encode("identity", torch.arange(10.0)))
    model[-10] ^= 1
    asked = Instruction.from_parts(Instruction(1, 2, 3, {"model": bytes(model)}).to_parts())
    assert not asked.crc_checked
    with pytest.raises(ChecksumMismatch):
        downlink("none").receive(asked.streams, {"model": Layout.flat(10)}, None, 2, asked.crc_checked)
