"""Ternary: its error, its bound and where it is tight, sums in any order, and the kernels against the torch version."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import oracle
from fedcams import Layout, compressor
from fedcams.bits import kept
from fedcams.bits.parallel import BLOCK
from fedcams.compress import Compressor
from fedcams.wire.estimate import coordinates_changed, payload_bytes
from inputs import DIMENSIONS, tensors_layout, vectors
from together import together

MODES = [(scope, magnitudes) for scope in ("global", "tensor") for magnitudes in ("tensor", "global")]
modes = pytest.mark.parametrize(("scope", "magnitudes"), MODES)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def ternary(scope: str, magnitudes: str, budget: str = "ratio=1/4") -> Compressor:
    return compressor(f"ternary({budget}, scope={scope}, magnitudes={magnitudes})")


def decoded(codec: Compressor, x: Tensor, layout: Layout) -> Tensor:
    return codec.decode(codec.encode(x, layout), layout).double()


def heavy_tailed(d: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(d, generator=draw) * torch.rand(d, generator=draw) ** -1.5


@modes
@together("d", DIMENSIONS)
def test_it_is_the_oracles(scope: str, magnitudes: str, d: int) -> None:
    layout = tensors_layout(d)
    sizes = [size for size in layout.sizes if size]
    for name, x in vectors(d).items():
        expected = oracle.ternary(x.double().numpy(), "1/4", sizes, scope, magnitudes)
        found = decoded(ternary(scope, magnitudes), x, layout).numpy()
        np.testing.assert_allclose(found, expected, rtol=2.0**-23, atol=2.0**-149, err_msg=name)


@given(data=st.data())
def test_the_error_is_what_the_means_leave(data: st.DataObject) -> None:
    """‖x-C(x)‖² = ‖x‖² - ‖C(x)‖², as C(x) is a projection of x; so ‖C(x)‖ <= ‖x‖. Both up to rounding to float32."""
    d = data.draw(st.integers(1, 60))
    x = torch.from_numpy(
        data.draw(hnp.arrays("float32", d, elements=FLOATS.filter(lambda v: v == 0 or abs(v) > 1e-30)))
    )
    for mode in MODES:
        out = decoded(ternary(*mode), x, tensors_layout(d))
        whole, sent, lost = (float(v.square().sum()) for v in (x.double(), out, x.double() - out))
        assert sent <= whole * (1 + 2.0**-22), mode
        assert lost == pytest.approx(whole - sent, rel=1e-6, abs=1e-6 * whole), mode


@together(("ratio", "size", "number"), [("0.29", 100, 29), ("0.1", 5, 1), ("1/3", 9, 3), ("1", 7, 7)])
def test_the_kept_fraction_is_exact(ratio: str, size: int, number: int) -> None:
    """As a float, 0.29 times 100 is just below 29."""
    for name, field in (("topk", "position"), ("ternary", "position"), ("randk", "value")):
        fields = compressor(f"{name}(ratio={ratio})").fields(Layout.flat(size))
        assert fields[field].count == number


@modes
@together("budget", ["k=1", "k=3", "ratio=1/4", "ratio=1"])
def test_the_bound_is_reached(scope: str, magnitudes: str, budget: str) -> None:
    """By a vector of equal numbers in what is worst of the tensors, or by a single number; nothing exceeds it."""
    codec, d = ternary(scope, magnitudes, budget), 96
    for layout in (Layout.flat(d), Layout(("a", "b"), ((64,), (32,)))):
        bound = codec.squared_error_bound(layout)
        assert bound is not None
        tried = [torch.zeros(d).index_fill_(0, torch.arange(a, b), 1.0) for a, b in ((0, d), (0, 64), (64, d))]
        tried += [torch.eye(d)[0], torch.eye(d)[70], *(heavy_tailed(d, seed) for seed in range(20))]
        losses = [
            float((x.double() - decoded(codec, x, layout)).square().sum() / x.double().square().sum()) for x in tried
        ]
        assert max(losses) <= bound + 1e-12
        assert max(losses) == pytest.approx(bound, abs=1e-12) or (scope, magnitudes) == ("global", "tensor")


def test_the_bound_of_a_resnet_is_weak_and_its_error_is_not() -> None:
    bound = compressor("ternary(ratio=1/16)").squared_error_bound(Layout(("a", "b"), ((8_814_410,), (2_359_552,))))
    assert bound == pytest.approx(1 - 1.43e-6, abs=1e-8)
    x, layout = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)), Layout.flat(1_000_000)
    sent = [decoded(compressor(f"{name}(ratio=1/16)"), x, layout).square().sum() for name in ("ternary", "topk")]
    shares = [float(part / x.double().square().sum()) for part in sent]
    assert shares == pytest.approx([0.316, 0.324], abs=0.001)


# -- means -----------------------------------------------------------------------------------------------------------


def exact_mean(values: Tensor) -> float:
    total = sum((Fraction(abs(value)) for value in values.double().tolist()), Fraction(0))
    return float(np.float32(float(total / max(1, len(values)))))


def both_means(values: Tensor, bounds: Tensor) -> Tensor:
    means = kept.group_means(values, bounds)
    there = kept.group_means_torch(values, bounds, bounds.diff(dim=-1).clamp(min=1))
    assert torch.equal(means.view(torch.int32), there.view(torch.int32)), "bit for bit"
    return means


@given(hnp.arrays("float32", st.integers(1, 50), elements=FLOATS), st.data())
def test_means_are_exact_in_any_order(numbers: np.ndarray, data: st.DataObject) -> None:
    values = torch.from_numpy(numbers)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), min_size=1, max_size=4)))
    bounds = torch.tensor([[0, *cuts, len(values)]])
    means = both_means(values[None], bounds)
    order = torch.tensor(data.draw(st.permutations(range(len(values)))))
    for group, (a, b) in enumerate(zip(bounds[0, :-1].tolist(), bounds[0, 1:].tolist(), strict=True)):
        assert float(means[0, group]) == pytest.approx(exact_mean(values[a:b]), rel=2.0**-23, abs=2.0**-149)
        assert not means[0, group].signbit()
    mixed = values[order]
    whole = torch.tensor([[0, len(values)]])
    assert torch.equal(both_means(values[None], whole), both_means(mixed[None], whole))


@pytest.mark.parametrize("k", [BLOCK + 3, 3 * BLOCK + 5])
def test_means_of_many_do_not_depend_on_order_where_floats_would(k: int) -> None:
    values = heavy_tailed(k)
    rows = torch.stack([values, values.flip(0), values.sort().values, values[torch.randperm(k)]])
    means = both_means(rows, torch.tensor([[0, k]]).repeat(4, 1))
    assert len(set(means.flatten().tolist())) == 1
    assert float(means[0, 0]) == pytest.approx(exact_mean(values), rel=2.0**-23)


def test_infinity_and_nan_show_in_the_mean_of_their_group_alone() -> None:
    values = torch.tensor([[1.0, 2.0, float("nan"), 3.0, -float("inf"), 4.0]])
    assert both_means(values, torch.tensor([[0, 2, 4, 5, 5, 6]])).tolist() == [[1.5, np.inf, np.inf, 0.0, 4.0]]


# -- adding ----------------------------------------------------------------------------------------------------------


@together("d", [9, 1000, 3 * BLOCK])
@together("weight", [1.0, -1.0, 0.3])
def test_adding_is_the_same_on_every_device(d: int, weight: float) -> None:
    layout, rows = tensors_layout(d), torch.stack([heavy_tailed(d, seed) for seed in range(3)])
    codec = compressor("ternary(ratio=2/3)")
    code = codec.encode(rows, layout)
    bounds = kept.group_bounds(
        code["position"], [(0, d - d // 2 - d // 5), (d - d // 2 - d // 5, d - d // 5), (d - d // 5, d)]
    )
    there = rows.clone()
    kept.add_signs_at_torch_(there, code["position"], code["sign"], bounds, code["magnitude"] * weight)
    assert torch.equal(codec.add_to_(rows.clone(), code, layout, weight), there)
    one = torch.ones(d)
    for row in range(3):
        codec.add_to_(one, {name: tensor[row] for name, tensor in code.items()}, layout, weight)
    assert torch.equal(codec.add_rows_to_(torch.ones(d), code, layout, [weight] * 3), one)


@modes
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@together("d", [1000, 3 * BLOCK + 5])
def test_codes_and_residuals_on_a_gpu_are_those_of_the_cpu_bit_for_bit(scope: str, magnitudes: str, d: int) -> None:
    rows, layout = torch.stack([heavy_tailed(d, seed) for seed in range(5)]), tensors_layout(d)
    codec = ternary(scope, magnitudes, "ratio=1/16")
    here, there = codec.encode(rows, layout), codec.encode(rows.cuda(), layout)
    for name, tensor in here.items():
        assert torch.equal(there[name].cpu().view(torch.uint8), tensor.view(torch.uint8)), name
    left = codec.add_to_(rows.cuda(), there, layout, -1.0)
    assert torch.equal(left.cpu(), codec.add_to_(rows.clone(), here, layout, -1.0))


def test_the_planner_knows_its_size_and_what_it_changes() -> None:
    layout, codec = Layout(tuple("abcdefgh"), ((125,),) * 8), compressor("ternary(ratio=1/10)")
    fixed = 26 + len(str(codec)) + -(-100 // 8) + 4 * 8
    assert payload_bytes(codec, layout) - fixed == pytest.approx(1000 * 0.469 * 1.015 / 8, rel=0.03)
    assert coordinates_changed(codec, layout) == 100
    assert coordinates_changed(compressor("ternary(k=3)"), layout) == 3
    assert codec.paper_bits(layout) == 100 * 32 + 100 + 8 * 32
