"""Checksums of ranges, put together."""

from __future__ import annotations

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcams.bits.checksum import LONG, crc32, joined


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_two_checksums_joined_are_that_of_both(first: bytes, second: bytes) -> None:
    assert joined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("length", [0, 1, 1000, LONG - 1, LONG, LONG + 1, 3 * LONG + 12345])
@pytest.mark.parametrize("start", [0, 0xFFFFFFFF, 123456789])
@pytest.mark.parametrize("threads", [1, 3])
def test_it_is_zlibs(length: int, start: int, threads: int) -> None:
    before = torch.get_num_threads()
    data = torch.randint(256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(length))
    try:
        torch.set_num_threads(threads)
        for kind in (bytes, bytearray, memoryview):
            assert crc32(kind(data.numpy().tobytes()), start) == zlib.crc32(data.numpy(), start)
    finally:
        torch.set_num_threads(before)
