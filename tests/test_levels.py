"""Quantised blocks: the kernels against a slow version that reads like the definition, and against the torch one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedcams import Layout, compressor
from fedcams.bits import levels
from fedcams.bits.packing import pack_levels, pack_uints, unpack_levels
from fedcams.bits.parallel import BLOCK
from inputs import DIMENSIONS, vectors
from together import together

BITS = (2, 3, 4, 8)
SEEDS = torch.tensor([[0x12345678, 0x9ABCDEF0]])
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def unpacked(packed: torch.Tensor, bits: int, d: int) -> torch.Tensor:
    return unpack_levels(packed, bits, d).long() - (levels.most(bits) - 1)


def up_to_bf16(size: float, bits: int) -> float:
    """The smallest bfloat16 that is not below, as long as there is one."""
    near = torch.tensor(size, dtype=torch.float64).float().bfloat16()
    if float(near) < size:
        near = (near.view(torch.int16) + 1).view(torch.bfloat16)
    return min(float(near), levels.largest_step(bits))


@together("bits", BITS)
@together("name", vectors(1))
def test_the_definition(bits: int, name: str) -> None:
    d, block, half = 53, 8, levels.most(bits)
    x = vectors(d)[name]
    steps, packed = levels.quantise(x[None], bits, block, None)
    found = unpacked(packed[0], bits, d)
    for number in range(math.ceil(d / block)):
        part = x[number * block : (number + 1) * block].tolist()
        largest = max(part, key=lambda v: (abs(v), v))
        step = math.copysign(up_to_bf16(float(np.float32(abs(largest)) / np.float32(half)), bits), largest or 1.0)
        assert float(steps[0, number]) == step
        for value, q in zip(part, found[number * block :].tolist(), strict=False):
            wanted = 0 if step == 0 else min(max(round(float(np.float32(value) / np.float32(step))), 1 - half), half)
            assert q == wanted


@together("bits", BITS)
@together("seeds", [None, SEEDS])
@together("d", DIMENSIONS)
def test_torch_gives_what_the_kernels_give(bits: int, seeds: torch.Tensor | None, d: int) -> None:
    for x in vectors(d).values():
        steps, packed = levels.quantise(x[None], bits, 64, seeds)
        for fast, slow in zip((steps, packed), levels._quantise_torch(x[None], bits, 64, seeds), strict=True):
            assert torch.equal(fast, slow)
        squares = levels._sum_squares(packed[0].numpy(), bits, 64, d)
        assert torch.equal(squares[None], levels._squares_torch(packed, bits, 64, d))
        assert torch.equal(packed, pack_levels(unpack_levels(packed, bits, d), bits))


@given(bits=st.sampled_from(BITS), draw=st.booleans(), x=hnp.arrays("float32", st.integers(1, 40), elements=FLOATS))
def test_torch_gives_what_the_kernels_give_for_any_vector(bits: int, draw: bool, x: np.ndarray) -> None:
    row, seeds = torch.from_numpy(x)[None], SEEDS if draw else None
    for fast, slow in zip(
        levels.quantise(row, bits, 8, seeds), levels._quantise_torch(row, bits, 8, seeds), strict=True
    ):
        assert torch.equal(fast, slow)


@together("bits", BITS)
@together("d", [1, 7, 64, 1000, 3 * BLOCK + 5])
def test_levels_lie_as_integers_of_so_many_bits_do(bits: int, d: int) -> None:
    values = torch.randint(0, 1 << bits, (d,), generator=torch.Generator().manual_seed(d))
    packed = pack_levels(values.to(torch.uint8), bits)
    assert packed.numpy().tobytes() == pack_uints(values.numpy(), bits).tobytes()
    out = vectors(d)["random"][None].clone()
    steps = torch.rand(1, -(-d // 64), generator=torch.Generator().manual_seed(d)).bfloat16()
    expected = out + (values - (levels.most(bits) - 1)) * (steps.float() * 3).repeat_interleave(64, -1)[:, :d]
    levels.add_levels_(out, packed[None], steps, bits, 64, weight=3.0)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("bits", BITS)
def test_the_bound_is_met_with_equality_up_to_the_rounding_of_a_step(bits: int) -> None:
    """The worst case: one large coordinate, all others just below half a step."""
    codec, n = compressor(f"blockq(bits={bits}, block=128)"), 128
    x = torch.full((n,), 0.4999 / levels.most(bits))
    x[5] = 1.0
    lost = (codec.decode(codec.encode(x, Layout.flat(n)), Layout.flat(n)) - x).double().square().sum()
    bound = codec.squared_error_bound(Layout.flat(n))
    assert bound is not None
    assert 0.97 * bound <= float(lost / x.double().square().sum()) <= bound


def test_noise_depends_on_the_key_and_on_the_place() -> None:
    codec, layout = compressor("blockq(bits=2, rounding=stochastic)"), Layout.flat(4096)
    x = torch.full((4096,), 0.25)
    x[::128] = 1.0
    first, second, third = (codec.decode(codec.encode(x, layout, key), layout) for key in (1, 2, 1 + (1 << 40)))
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)
    assert 0.3 < float((first == second).float().mean()) < 0.7
    blocks = first.view(-1, 128)
    assert not torch.equal(blocks[0], blocks[1])
