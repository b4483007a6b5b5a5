"""The wire format: one error per kind of mistake, and sizes checked before anything is allocated."""

from __future__ import annotations

import math
import struct
import zlib

import pytest
import torch

from fedcams import Layout, WireError, compressor, decode, encode, payload_size
from fedcams.errors import (
    BadChangeCount,
    BadMagic,
    BadMagnitude,
    BadPadding,
    BadPosition,
    ChecksumMismatch,
    LayoutMismatch,
    NonCanonical,
    NonFinite,
    TooLarge,
    TrailingBytes,
    Truncated,
    UnknownCodec,
    UnknownVersion,
    UpdateError,
)
from fedcams.wire import unpack
from together import together

HEADER = struct.Struct("<4sBBQ8s")


def build(spec: str, d: int, body: bytes, *, version: int = 1, layout: Layout | None = None) -> bytes:
    """A payload written by hand, with a valid checksum."""
    layout_id = (layout or Layout.flat(max(d, 1))).id
    start = HEADER.pack(b"FCMS", version, len(spec.encode()), d, layout_id) + spec.encode() + body
    return start + struct.pack("<I", zlib.crc32(start))


def test_a_payload_by_hand_is_what_encode_writes() -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    assert encode("identity", x) == build("identity", 3, struct.pack("<3f", 1, -2, 3))
    assert encode("sign", x) == build("sign", 3, struct.pack("<f", 2) + b"\x05")
    assert encode("topk(k=1)", x) == build("topk(k=1)", 3, b"\x01" + struct.pack("<f", 3))


GOOD = encode("topk(k=2)", torch.arange(100.0))
PAIR = Layout(("a", "b"), ((2,), (1,)))
TERNARY = encode("ternary(k=1)", torch.tensor([1.0, -2.0, 1.0]), PAIR)


def ternary(*magnitudes: float, layout: Layout = PAIR) -> bytes:
    """A payload of `ternary(k=1)` that keeps the second of three coordinates, which is negative."""
    return build("ternary(k=1)", 3, b"\x02\x00" + struct.pack(f"<{len(magnitudes)}f", *magnitudes), layout=layout)


CASES = [
    (BadMagic, b"PK\x03\x04" + GOOD[4:], "starts with b'FCMS'"),
    (BadMagic, b"x", "starts with"),
    (Truncated, b"", "0 bytes"),
    (Truncated, GOOD[:20], "20 bytes; a payload has at least 27"),
    (Truncated, HEADER.pack(b"FCMS", 1, 200, 3, bytes(8)) + bytes(20), "codec spec of 200"),
    (UnknownVersion, build("identity", 1, bytes(4), version=2), "version 2; this reader knows version 1"),
    (ChecksumMismatch, GOOD[:-5] + bytes([GOOD[-5] ^ 1]) + GOOD[-4:], "checksum"),
    (ChecksumMismatch, GOOD[:-1] + bytes([GOOD[-1] ^ 1]), "checksum"),
    (ChecksumMismatch, GOOD[:-6], "checksum"),
    (UnknownCodec, build("zip", 1, b""), "no compressor is named 'zip'"),
    (UnknownCodec, build("topk", 1, b""), "give either ratio"),
    (UnknownCodec, build("topk( k=1)", 3, b"\x04" + bytes(4)), "not in canonical form"),
    (UnknownCodec, build("sïgn", 1, b""), "codec"),
    (UnknownCodec, build("", 1, b"\0"), "expected a name"),
    (TooLarge, build("sign", 2**26 + 1, bytes(4)), "d=67108865; allowed: 1 to 67108864"),
    (TooLarge, build("topk(k=1)", 2**63, bytes(9)), "pass layout= or a larger max_d"),
    (TooLarge, build("sign", 0, bytes(4)), "d=0"),
    (LayoutMismatch, build("sign(scope=tensor)", 2, bytes(9), layout=Layout(("a", "b"), ((1,), (1,)))), "pass layout="),
    (Truncated, build("identity", 2, bytes(7)), "field 'values' needs at least 8 bytes, 7 are left"),
    (Truncated, build("topk(ratio=1)", 1000, bytes(99)), "field 'position' needs at least 125 bytes"),
    (Truncated, build("topk(k=9)", 10_000, bytes(8)), "ends within the 9 positions"),
    (TrailingBytes, build("identity", 2, bytes(9)), "1 bytes follow the last field of identity"),
    (NonFinite, build("identity", 2, struct.pack("<2f", 1, math.nan)), "field 'values': 1 of 2 numbers are NaN"),
    (NonFinite, build("sign", 2, struct.pack("<f", math.inf) + b"\0"), "field 'scale'"),
    (NonFinite, build("topk(k=1, values=bf16)", 2, b"\0\x80\xff"), "field 'value'"),
    (BadPosition, build("topk(k=1)", 3, b"\x07" + bytes(4)), r"not in \[0, 3\)"),
    (BadPadding, build("sign", 3, struct.pack("<f", 1) + b"\x08"), "field 'sign': the bits after the last of 3"),
    (BadPadding, build("topk(k=1)", 3, b"\x84" + bytes(4)), "after the last position"),
]


@together(("error", "data", "message"), CASES)
def test_each_way_to_be_wrong_has_its_error(error: type[WireError], data: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message) as caught:
        decode(data)
    assert type(caught.value) is error


def test_the_layout_must_be_the_readers() -> None:
    ours, theirs = Layout(("w",), ((4,),)), Layout(("v",), ((4,),))
    data = encode("sign", torch.ones(4), theirs)
    assert torch.equal(decode(data, theirs), torch.ones(4))
    assert torch.equal(decode(data), torch.ones(4))
    with pytest.raises(LayoutMismatch, match=f"layout {theirs.id.hex()} with d=4, the reader has {ours.id.hex()}"):
        decode(data, ours)


def test_a_tiny_payload_may_claim_a_large_d_only_as_far_as_allowed() -> None:
    data = build("topk(k=1)", 2**24, encode("topk(k=1)", torch.eye(1, 2**24)[0])[22 + 9 : -4])
    assert len(data) < 60
    assert decode(data).shape == (2**24,)
    with pytest.raises(TooLarge, match="allowed: 1 to 1000"):
        decode(data, max_d=1000)


def test_a_layout_may_be_larger_than_what_strangers_may_claim() -> None:
    layout = Layout.flat(1001)
    assert decode(encode("sign", torch.ones(1001)), layout, max_d=1000).shape == (1001,)


def test_ternary_by_hand_is_what_encode_writes() -> None:
    assert ternary(2.0, 0.0) == TERNARY
    assert decode(TERNARY, PAIR).tolist() == [0.0, -2.0, 0.0]


@together(
    ("error", "data", "message"),
    [
        (BadMagnitude, ternary(-2.0, 0.0), "field 'magnitude': -2.0 is negative; allowed: 0 or more"),
        (BadMagnitude, ternary(2.0, -1e-45), "is negative"),
        (NonFinite, ternary(math.inf, 0.0), "field 'magnitude': 1 of 2 numbers are NaN or infinite"),
        (NonFinite, ternary(2.0, math.nan), "field 'magnitude': 1 of 2 numbers are NaN or infinite"),
        (NonCanonical, ternary(2.0, 1e-45), "a number other than 0 where nothing is kept"),
        (NonCanonical, ternary(2.0, -0.0), "-0.0"),
        (NonCanonical, ternary(-0.0, 0.0), "-0.0"),
        (Truncated, ternary(2.0), "field 'magnitude' needs at least 8 bytes, 4 are left"),
        (TrailingBytes, ternary(2.0, 0.0, 0.0), "4 bytes follow the last field of ternary"),
        (LayoutMismatch, ternary(2.0, 0.0, 0.0, layout=Layout.flat(3)), "use the same model"),
    ],
)
def test_magnitudes_that_ternary_does_not_write_are_refused(error: type[WireError], data: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message) as caught:
        decode(data, PAIR)
    assert type(caught.value) is error


FILTERS = Layout(("a",), ((1, 2, 3),))


def four_signs(body: bytes) -> bytes:
    """A payload of `ternary(k=4)` that keeps positions 0, 1, 2 and 5, whose signs are `body`; the magnitude is 1."""
    return build("ternary(k=4)", 6, b"\x18" + body + struct.pack("<f", 1), layout=FILTERS)


def test_signs_by_hand_are_what_encode_writes() -> None:
    x = torch.tensor([1.0, 1.0, -1.0, 0.0, 0.0, 1.0])
    assert encode("ternary(k=4)", x, FILTERS) == four_signs(b"\x03\x01\x01")
    assert torch.equal(decode(four_signs(b"\x03\x01\x01"), FILTERS), x)


@together(
    ("error", "body", "message"),
    [
        (BadChangeCount, b"\x03\x03\x00", "field 'sign': 3 changes among 2 signs that follow; allowed: 0 to 2"),
        (BadPosition, b"\x03\x01\x03", r"field 'sign': a position is not in \[0, 2\)"),
        (BadPadding, b"\x07\x01\x01", "field 'sign': the bits after the last of 2 leading signs are not zero"),
        (BadPadding, b"\x03\x01\x81", "field 'sign': the bits after the last position"),
        (TrailingBytes, b"\x03\x01\x01\x00", "1 bytes follow the last field of ternary"),
        (Truncated, b"", "field 'magnitude' needs at least 4 bytes"),
    ],
)
def test_signs_that_are_not_written_so_are_refused(error: type[WireError], body: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message) as caught:
        decode(four_signs(body), FILTERS)
    assert type(caught.value) is error


def test_signs_need_the_shapes_even_with_one_magnitude() -> None:
    data = encode("ternary(k=2, magnitudes=global)", torch.arange(6.0), FILTERS)
    assert decode(data, FILTERS).tolist() == [0, 0, 0, 0, 4.5, 4.5]
    with pytest.raises(LayoutMismatch, match="pass layout="):
        decode(data)


@together(
    ("error", "magnitudes", "message"),
    [
        (None, (1.0, 3.0), ""),
        (BadMagnitude, (1.0, -3.0), "field 'magnitude': -3.0 is negative"),
        (NonFinite, (1.0, math.nan), "field 'magnitude'"),
        (NonCanonical, (-0.0, 3.0), "-0.0"),
        (Truncated, (1.0,), "field 'magnitude' needs at least 8 bytes, 4 are left"),
        (TrailingBytes, (1.0, 3.0, 0.0), "4 bytes follow"),
    ],
)
def test_classes_of_magnitude_are_checked(
    error: type[WireError] | None, magnitudes: tuple[float, ...], message: str
) -> None:
    """Positions 0 and 1 of three, levels 3 (the larger class, positive) and 0 (the smaller, negative)."""
    start = encode("topk(k=2, values=b2)", torch.tensor([3.0, -1.0, 0.0]))[22 + 20 : -4 - 8]
    data = build("topk(k=2, values=b2)", 3, start + struct.pack(f"<{len(magnitudes)}f", *magnitudes))
    if error is None:
        assert decode(data).tolist() == [3.0, -1.0, 0.0]
        return
    with pytest.raises(WireError, match=message) as caught:
        decode(data)
    assert type(caught.value) is error


def test_a_class_without_members_has_no_magnitude() -> None:
    data = encode("topk(k=2, values=b2)", torch.tensor([2.0, -2.0, 0.0]))
    assert data[-12:-4] == struct.pack("<2f", 0, 2)
    bad = build("topk(k=2, values=b2)", 3, data[42:-12] + struct.pack("<2f", 1, 2))
    with pytest.raises(NonCanonical, match="where nothing is kept"):
        decode(bad)


def test_ternary_needs_the_layout_of_its_magnitudes() -> None:
    with pytest.raises(LayoutMismatch, match=r"ternary\(k=1\) needs the layout .* it was written with: pass layout="):
        decode(TERNARY)
    codec, code = compressor("ternary(k=1)"), unpack(TERNARY, PAIR).code
    with pytest.raises(LayoutMismatch, match="field 'magnitude' has 2 numbers; the layout needs 1"):
        codec.check_code(code, Layout.flat(3))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_read(kind: type) -> None:
    assert torch.equal(decode(kind(encode("sign", torch.ones(9)))), torch.ones(9))


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(UpdateError, match="'vector' has 1 of 3 values NaN or infinite"):
        encode("sign", torch.tensor([1.0, math.nan, 2.0]))
    with pytest.raises(UpdateError, match="'w' has 2 of 2"):
        encode("identity", torch.tensor([1.0, math.inf, -math.inf]), Layout(("b", "w"), ((1,), (2,))))
    with pytest.raises(WireError, match="one vector"):
        encode("sign", torch.ones(2, 3))
    with pytest.raises(ValueError, match="convert it with"):
        encode("sign", torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="this layout needs float vectors"):
        encode("sign", torch.ones(3), Layout.flat(4))


D = 11_173_962  # ResNet-18 with ten classes


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        ("sign", 1_396_850),
        ("topk(ratio=1/64)", 870_000),
        ("topk(ratio=1/64, values=bf16)", 530_000),
        ("ternary(ratio=1/16)", 570_000),
    ],
)
def test_sizes_of_a_resnet_update(spec: str, most: int) -> None:
    x = torch.randn(D, generator=torch.Generator().manual_seed(0))
    size = payload_size(spec, x)
    assert size <= most
    data = encode(spec, x)
    assert len(data) == size
    if "ratio" in spec:
        ratio, bits = {"ternary(ratio=1/16)": (16, 1), "topk(ratio=1/64)": (64, 32)}.get(spec, (64, 16))
        k = D // ratio
        limit = (math.lgamma(D + 1) - math.lgamma(k + 1) - math.lgamma(D - k + 1)) / math.log(2) / 8
        positions = size - k * bits / 8 - 26 - len(spec)
        assert limit < positions <= 1.03 * limit
