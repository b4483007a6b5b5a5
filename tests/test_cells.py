"""Signs coded by cells: what leads and what changes, against the definition; sizes near the entropy; bad bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcams.bits.cells import Cells, signs_decode, signs_encode, signs_size
from fedcams.bits.parallel import BLOCK
from fedcams.bits.rice import rice_encode
from fedcams.errors import BadChangeCount, BadPadding, BadPosition, Truncated, WireError
from together import together

Shape = tuple[int, ...]
SHAPES = [(2, 3, 3, 3), (5,), (4, 7), (0,), (3, 2, 5), (2, 1, 1, 1), (1, 1, 40), ()]


def packed(signs: list[int]) -> np.ndarray:
    return np.packbits(np.array(signs, np.uint8), bitorder="little")


def cell_of_each(shapes: list[Shape]) -> list[tuple[int, int]]:
    """The tensor and the cell in it of every coordinate, one after the other."""
    return [(t, i // math.prod(shape[2:])) for t, shape in enumerate(shapes) for i in range(math.prod(shape))]


def slow_code(signs: list[int], positions: list[int], shapes: list[Shape]) -> bytes:
    """As docs/wire-format.md says."""
    cells = [cell_of_each(shapes)[position] for position in positions]
    follows = [i > 0 and cells[i] == cells[i - 1] for i in range(len(cells))]
    leading = [sign for sign, follow in zip(signs, follows, strict=True) if not follow]
    changed = [signs[i] != signs[i - 1] for i, follow in enumerate(follows) if follow]
    if not changed:
        return packed(leading).tobytes()
    count = sum(changed).to_bytes(-(-len(changed).bit_length() // 8), "little")
    return packed(leading).tobytes() + count + rice_encode(np.flatnonzero(changed), len(changed)).tobytes()


@given(st.data())
def test_the_code_is_that_of_the_definition(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5))
    d = sum(map(math.prod, shapes))
    positions = sorted(data.draw(st.sets(st.integers(0, max(d - 1, 0)), max_size=d)))
    signs = data.draw(st.lists(st.integers(0, 1), min_size=len(positions), max_size=len(positions)))
    cells, places = Cells.of(shapes), np.array(positions, np.int64)
    code = signs_encode(packed(signs), places, cells)
    assert code.tobytes() == slow_code(signs, positions, shapes)
    assert code.size == signs_size(packed(signs), places, cells)
    read, used = signs_decode(np.append(code, np.uint8(0xAB)), places, cells)
    assert (read.tolist(), used) == (packed(signs).tolist(), code.size)


@pytest.mark.parametrize("size", [3, 7, 9, 25, 49])
def test_cells_are_exact_far_out_and_across_the_ranges_of_threads(size: int) -> None:
    """At positions near 2^40, where a quotient in floating point could be off."""
    whole = (1 << 40) // size - BLOCK
    cells = Cells.of([(whole, 1, size), (BLOCK, 1, size)])
    positions = np.arange((whole - BLOCK) * size, (whole + 9) * size, dtype=np.int64)[:: 2 if size > 3 else 1]
    signs = np.random.default_rng(0).integers(0, 256, -(-positions.size // 8), np.uint8)
    signs[-1] &= (1 << (positions.size % 8 or 8)) - 1
    follows = np.diff(positions // size, prepend=-1) == 0
    code = signs_encode(signs, positions, cells)
    leading = np.unpackbits(signs, bitorder="little", count=positions.size)[~follows]
    assert np.array_equal(code[: -(-leading.size // 8)], np.packbits(leading, bitorder="little"))
    read, used = signs_decode(code, positions, cells)
    assert np.array_equal(read, signs)
    assert used == code.size


@pytest.mark.parametrize("changing", [0.02, 0.07, 0.2, 0.5])
def test_the_size_is_near_the_entropy(changing: float) -> None:
    """Filters of nine kept weights, each sign but the first differing from the one before with this probability."""
    draw, filters = np.random.default_rng(1), 5000
    steps = draw.random((filters, 9)) < np.array([0.5] + [changing] * 8)
    signs = np.packbits(steps.cumsum(1).astype(np.uint8) & 1, bitorder="little")
    size = signs_size(signs, np.arange(9 * filters), Cells.of([(50, 100, 3, 3)]))
    entropy = -(changing * math.log2(changing) + (1 - changing) * math.log2(1 - changing))
    limit = filters * (1 + 8 * entropy) / 8
    assert 0.98 * limit < size < 1.06 * limit


def test_signs_of_matrices_are_plain_bits() -> None:
    signs = packed([1, 0, 0, 1, 1, 1, 0, 1, 1])
    assert np.array_equal(signs_encode(signs, np.arange(9), Cells.of([(2, 3), (3,)])), signs)


FOUR = (np.array([0, 1, 2, 5]), Cells.of([(1, 2, 3)]))  # the first leads, two follow, the last leads
CASES = [
    (Truncated, b"", "2 leading signs need at least 2 bytes, 0 are left"),
    (Truncated, b"\x01", "need at least 2 bytes, 1 are left"),
    (Truncated, b"\x01\x01", "1 positions do not fit into 0 bytes"),
    (BadPadding, b"\x04\x00", "the bits after the last of 2 leading signs are not zero"),
    (BadChangeCount, b"\x01\x03\x00", "3 changes among 2 signs that follow; allowed: 0 to 2"),
    (BadPosition, b"\x01\x01\x03", r"a position is not in \[0, 2\)"),
    (BadPadding, b"\x01\x01\x80", "after the last position"),
]


@together(("error", "data", "message"), CASES)
def test_bytes_that_are_no_signs_are_refused(error: type[WireError], data: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message) as caught:
        signs_decode(np.frombuffer(data, np.uint8), *FOUR)
    assert type(caught.value) is error
