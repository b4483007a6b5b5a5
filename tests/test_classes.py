"""Classes of magnitude: against the oracle, what they lose, and that no split makes it worse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import oracle
from fedcams import Layout, compressor
from fedcams.bits.classes import (
    class_sizes,
    signed_means,
    signed_means_torch,
    split_at_means,
    split_at_means_torch,
)
from fedcams.bits.packing import unpack_levels
from fedcams.bits.parallel import BLOCK
from fedcams.compress import Compressor
from inputs import DIMENSIONS, tensors_layout, vectors
from together import together

DEPTHS = {"b2": 1, "b4": 3}
sizes = pytest.mark.parametrize("values", DEPTHS)


def topk(values: str, more: str = "ratio=1/4") -> Compressor:
    return compressor(f"topk({more}, values={values})")


def lost(codec: Compressor, x: Tensor, layout: Layout) -> float:
    return float((x.double() - codec.decode(codec.encode(x, layout), layout).double()).square().sum())


@sizes
@together("d", DIMENSIONS)
def test_it_is_the_oracles(values: str, d: int) -> None:
    """Within float32: a magnitude that equals its class's mean may be rounded to either side of it."""
    for name in ("zeros", "one spike", "ties", "-0.0", "random", "already sparse"):
        x = vectors(d)[name]
        expected = oracle.classes(x.double().numpy(), "1/4", DEPTHS[values])
        found = topk(values).decode(topk(values).encode(x, Layout.flat(d)), Layout.flat(d)).double().numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=name)


@sizes
@given(data=st.data())
def test_more_classes_lose_no_more(values: str, data: st.DataObject) -> None:
    d = data.draw(st.integers(1, 60))
    numbers = st.floats(-(2.0**50), 2.0**50, width=32).filter(lambda v: v == 0 or abs(v) > 1e-15)
    x = torch.from_numpy(data.draw(hnp.arrays("float32", d, elements=numbers)))
    layout = tensors_layout(d)
    for scope in ("global", "tensor"):
        one = lost(compressor(f"ternary(ratio=1/4, scope={scope}, magnitudes={scope})"), x, layout)
        some = lost(topk(values, f"ratio=1/4, scope={scope}"), x, layout)
        exact = lost(topk("f32", f"ratio=1/4, scope={scope}"), x, layout)
        slack = 1e-6 * float(x.double().square().sum())
        assert exact - slack <= some <= one + slack


@pytest.mark.parametrize(("values", "share"), [("b2", 0.01), ("b4", 0.0012)])
def test_what_they_lose_of_gaussian_coordinates(values: str, share: float) -> None:
    x, layout = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)), Layout.flat(1_000_000)
    exact = lost(topk("f32", "ratio=1/16"), x, layout)
    assert lost(topk(values, "ratio=1/16"), x, layout) - exact <= share * (float(x.double().square().sum()) - exact)


@sizes
def test_bits_are_what_they_are_called(values: str) -> None:
    layout, bits = Layout(("a", "b"), ((600,), (400,))), int(values[1])
    fields = topk(values, "ratio=1/10").fields(layout)
    assert (fields["level"].kind, fields["level"].bits, fields["level"].count) == ("packed", bits, 100)
    assert fields["magnitude"].count == 2 ** (bits - 1), "one set for all"
    assert topk(values, "ratio=1/10, scope=tensor").fields(layout)["magnitude"].count == 2 * 2 ** (bits - 1)


def test_groups_are_split_each_by_itself() -> None:
    values = torch.tensor([[1.0, -2.0, 10.0, 100.0, 200.0, 1000.0, -5.0], [3.0, 3.0, 3.0, 1.0, 0.0, -0.0, 2.0]])
    bounds = torch.tensor([[0, 3, 6, 6, 7], [0, 3, 6, 6, 7]])
    levels, means = split_at_means(values, bounds, 2)
    assert unpack_levels(levels, 2, 7).tolist() == [[1, 0, 3, 1, 1, 3, 2], [3, 3, 3, 3, 1, 1, 3]]
    assert means.tolist() == [[[1.5, 10], [150, 1000], [0, 0], [0, 5]], [[0, 3], [0, 1], [0, 0], [0, 2]]]
    decoded = signed_means(levels, 2, means, bounds, 7)
    assert decoded[0].tolist() == [1.5, -1.5, 10, 150, 150, 1000, -5]
    assert class_sizes(levels, 2, bounds, 7)[0].tolist() == [[2, 1], [2, 1], [0, 0], [0, 1]]


@together("bits", [2, 4])
@together("k", [1, 5, 1000, 2 * BLOCK + 3])
def test_every_device_has_the_same_levels_and_means(bits: int, k: int) -> None:
    rows = torch.stack(
        [vectors(k)[name] for name in ("random", "denormals", "huge", "-0.0", "zeros", "already sparse")]
    )
    bounds = torch.tensor([[0, k // 3, k // 2, k // 2, k]]).repeat(len(rows), 1)
    (here, means), (there, others) = split_at_means(rows, bounds, bits), split_at_means_torch(rows, bounds, bits)
    assert torch.equal(here, there)
    assert torch.equal(means.view(torch.int32), others.view(torch.int32))
    counts = [
        torch.bincount(row[:, 0], minlength=1 << (bits - 1)) for row in unpack_levels(here, bits, k)[..., None] >> 1
    ]
    assert torch.equal(class_sizes(here, bits, bounds, k).sum(1), torch.stack(counts))
    decoded = signed_means(here, bits, means, bounds, k)
    assert torch.equal(decoded.view(torch.int32), signed_means_torch(here, bits, means, bounds, k).view(torch.int32))
