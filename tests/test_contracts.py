"""The contract of every registered compressor, whatever its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedcams import Aggregator, ErrorFeedback, Layout, LayoutError, Method, RowStore, SpecError, compressor
from fedcams.compress import Code, Compressor, Field
from fedcams.errors import UpdateError
from fedcams.registry import registered
from fedcams.wire import pack, size, sizes, unpack
from inputs import DIMENSIONS, tensors_layout, vectors
from together import together

COMPRESSORS = [compressor(spec) for cls in registered("compressor").values() for spec in cls.examples]
everyone = pytest.mark.parametrize("codec", COMPRESSORS, ids=str)
CONTRACTIVE = [codec for codec in COMPRESSORS if codec.squared_error_bound(Layout.flat(100)) is not None]


def denormal_allowance(codec: Compressor) -> float:
    """A coordinate's: bfloat16 values below 2^-126 are 2^-133 apart, so one that travels is off by half that, squared.

    Where it is the step of a block of levels, each of them moves: (a + 2^-134)² - a² for the largest such a.
    """
    levels = any(field.kind == "packed" for field in codec.fields(Layout.flat(100)).values())
    return 2.0**-259 if levels else 2.0**-266


def layouts(d: int) -> list[Layout]:
    return [Layout.flat(d), tensors_layout(d)]


def lost(codec: Compressor, x: torch.Tensor, layout: Layout, key: int = 0) -> float:
    """‖C(x)-x‖² in float64."""
    decoded = codec.decode(codec.encode(x, layout, key), layout)
    return float((decoded.double() - x.double()).square().sum())


@everyone
@together("d", DIMENSIONS)
def test_contraction(codec: Compressor, d: int) -> None:
    for layout in layouts(d):
        bound = codec.squared_error_bound(layout)
        if bound is None or codec.in_expectation:
            continue
        assert 0 <= bound < 1
        for name, x in vectors(d).items():
            allowed = bound * float(x.double().square().sum()) * (1 + 1e-6) + d * denormal_allowance(codec)
            assert lost(codec, x, layout) <= allowed, name


@everyone
@together("d", DIMENSIONS)
def test_what_never_lengthens(codec: Compressor, d: int) -> None:
    for layout in layouts(d) if codec.never_lengthens else []:
        for name, x in vectors(d).items():
            decoded = codec.decode(codec.encode(x, layout, key=d), layout)
            assert float(decoded.double().norm()) <= float(x.double().norm()) * (1 + 1e-6) + 1e-38, name


@everyone
@together("d", [7, 64, 1000])
def test_what_holds_in_expectation(codec: Compressor, d: int) -> None:
    """Over many keys: the contraction where it is claimed so, and unbiasedness where it is claimed.

    Codecs of the package attain their bounds, and draw every coordinate often; those of others need not.
    """
    ours = type(codec).__module__.startswith("fedcams.")
    layout, x = Layout.flat(d), vectors(d)["random"]
    draws = codec.in_expectation or codec.unbiased
    trials = 4000 if draws else 10
    decoded = codec.decode(codec.encode(x.repeat(trials, 1), layout, list(range(trials))), layout).double()
    bound = codec.squared_error_bound(layout)
    if codec.in_expectation and bound is not None:
        errors = (decoded - x.double()).square().sum(-1) / x.double().square().sum()
        excess = float(errors.mean()) - bound
        assert (abs(excess) if ours else excess) <= 5 * float(errors.std()) / trials**0.5 + 1e-6
    if codec.unbiased:
        spread = decoded.std(0) / trials**0.5
        jump = 0.0 if ours else float((decoded.amax(0) - decoded.amin(0)).max())
        unseen = torch.where(spread == 0, 12 * jump / trials, 0.0)  # what is drawn rarely may never have been
        assert bool(((decoded.mean(0) - x.double()).abs() <= 6 * spread + unseen + 1e-6).all())
        assert bound is None or bound < 1
    if not draws:
        assert bool((decoded == decoded[0]).all()), "claims nothing in expectation, so it must not draw"


@everyone
@together("d", DIMENSIONS)
def test_round_trip_through_bytes_is_exact(codec: Compressor, d: int) -> None:
    for layout in layouts(d):
        for name, x in vectors(d).items():
            code = codec.encode(x, layout, key=d)
            data = pack(codec, code, layout)
            assert len(data) == size(codec, code, layout), name
            read = unpack(data, layout)
            assert read.compressor == codec
            assert read.pack() == data
            for field, tensor in code.items():
                received = read.code[field]
                same = not len(tensor) or torch.equal(received.view(torch.uint8), tensor.view(torch.uint8))
                assert same, (name, field)
            decoded = read.decode()
            assert torch.equal(decoded, codec.decode(code, layout)), name
            assert bool(torch.isfinite(decoded).all()), name


@everyone
@together("d", [1, 9, 65, 1000])
def test_fields_are_as_declared(codec: Compressor, d: int) -> None:
    for layout in layouts(d):
        code = codec.encode(vectors(d)["random"], layout)
        fields = codec.fields(layout)
        assert list(code) == list(fields)
        for name, field in fields.items():
            assert tuple(code[name].shape) == (field.columns,)
            assert code[name].dtype == field.dtype
            assert field.kind != "index" or bool((code[name].diff() > 0).all()), "positions must ascend: sort them"
            assert field.kind != "uint" or int(code[name].max()) < 2**field.bits
        assert codec.paper_bits(layout) == sum(field.paper_bits for field in fields.values())


@everyone
@together("d", [1, 9, 65, 4097])
def test_batched_is_stacked(codec: Compressor, d: int) -> None:
    rows = torch.stack(list(vectors(d).values()))
    keys = list(range(100, 100 + len(rows)))
    for layout in layouts(d):
        batched = codec.encode(rows, layout, keys)
        singles = [codec.encode(row, layout, key) for row, key in zip(rows, keys, strict=True)]
        for name, tensor in batched.items():
            assert torch.equal(tensor, torch.stack([single[name] for single in singles]))
        assert torch.equal(codec.decode(batched, layout), torch.stack([codec.decode(c, layout) for c in singles]))
        assert sizes(codec, batched, layout) == [size(codec, single, layout) for single in singles]
        nested = codec.encode(rows.view(2, -1, d), layout, keys)
        assert torch.equal(codec.decode(nested, layout).view(-1, d), codec.decode(batched, layout))


@everyone
def test_encoding_leaves_its_input_alone_and_repeats_itself(codec: Compressor) -> None:
    layout = tensors_layout(1000)
    x = vectors(1000)["random"]
    kept = x.clone()
    first, second = (pack(codec, codec.encode(x, layout, key=5), layout) for _ in range(2))
    assert first == second
    assert torch.equal(x, kept)


@everyone
@together("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_value_anywhere_is_refused_with_its_tensor(codec: Compressor, bad: float) -> None:
    layout = tensors_layout(100)
    for position, tensor in ((0, "a"), (29, "a"), (30, "b"), (79, "b"), (80, "d"), (99, "d")):
        x = vectors(100)["random"].repeat(3, 1)
        x[1, position] = bad
        with pytest.raises(UpdateError, match=f"'{tensor}' has 1 of .* values NaN or infinite"):
            codec.encode(x, layout)


@everyone
def test_adding_is_decoding_and_adding(codec: Compressor) -> None:
    layout = tensors_layout(1000)
    x = vectors(1000)["random"]
    code = codec.encode(x, layout)
    out = vectors(1000, seed=1)["random"]
    expected = out + codec.decode(code, layout)
    assert torch.equal(codec.add_to_(out, code, layout), expected)
    weighted = codec.add_to_(torch.zeros(1000), code, layout, weight=3.0)
    assert torch.equal(weighted, 3.0 * codec.decode(code, layout))


@everyone
@together("d", [1, 9, 65, 4097, 100_003])
def test_norms_are_those_of_the_decoded_rows(codec: Compressor, d: int) -> None:
    """And a row has the same norm, bit for bit, in whatever cohort it stands."""
    rows = torch.stack(list(vectors(d).values()))
    for layout in layouts(d):
        code = codec.encode(rows, layout, list(range(len(rows))))
        norms = codec.norms(code, layout)
        assert norms.dtype == torch.float64
        torch.testing.assert_close(norms, codec.decode(code, layout).double().norm(dim=-1), rtol=1e-6, atol=0)
        singles = [codec.norms({k: v[i : i + 1].clone() for k, v in code.items()}, layout) for i in range(len(rows))]
        assert torch.equal(norms, torch.cat(singles))


@pytest.mark.parametrize("name", registered("compressor"))
@given(data=st.data())
def test_properties_of_any_vector(name: str, data: st.DataObject) -> None:
    """Drawing a vector takes as long as compressing it, so all examples of a compressor get the same ones."""
    d = data.draw(st.integers(1, 80))
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    x = torch.from_numpy(data.draw(hnp.arrays("float32", d, elements=numbers)))
    layout = data.draw(st.sampled_from(layouts(d)))
    for codec in (codec for codec in COMPRESSORS if codec.name == name):
        code = codec.encode(x, layout)
        payload = pack(codec, code, layout)
        assert unpack(payload, layout).pack() == payload, codec
        bound = codec.squared_error_bound(layout)
        if bound is not None and not codec.in_expectation:
            allowed = bound * float(x.double().square().sum()) * (1 + 1e-6) + d * denormal_allowance(codec)
            assert lost(codec, x, layout) <= allowed, codec


@pytest.mark.parametrize("codec", CONTRACTIVE, ids=str)
def test_accepted_plus_residual_is_the_sum_of_accepted_rounds(codec: Compressor) -> None:
    """Fifty rounds, some clients sampled, some of their updates refused: nothing is lost, nothing counts twice."""
    clients, layout = 5, tensors_layout(200)
    draw = torch.Generator().manual_seed(1)
    residuals = RowStore.in_memory({"residual": layout})
    uplink = ErrorFeedback(codec, residuals)
    own, received = torch.zeros(clients, layout.d).double(), torch.zeros(clients, layout.d).double()
    for round in range(1, 51):
        cohort = torch.randperm(clients, generator=draw)[:3].sort().values.tolist()
        delta = torch.randn(3, layout.d, generator=draw)
        update = delta.clone()
        before = residuals.gather("residual", range(clients))
        pending = uplink.prepare_(cohort, delta, round, key=[round * 10 + i for i in cohort])
        assert torch.equal(residuals.gather("residual", range(clients)), before), "preparing changes no stored row"
        if float(torch.rand(1, generator=draw)) < 0.3:
            continue
        uplink.commit(pending)
        own[cohort] += update.double()
        received[cohort] += codec.decode(pending.code, layout).double()
        left = residuals.gather("residual", range(clients)).double()
        assert float((received + left - own).norm()) <= 1e-6 * round * float(own.norm())


@everyone
def test_feedback_refuses_what_has_no_bound(codec: Compressor) -> None:
    rows = RowStore.in_memory({"residual": Layout.flat(100)})
    if codec.squared_error_bound(Layout.flat(100)) is None:
        with pytest.raises(SpecError, match="has no bound on its error"):
            ErrorFeedback(codec, rows)
        with pytest.raises(SpecError, match=r"uplink=.* has no bound on its error.* with feedback=true"):
            Method(uplink=codec)
    else:
        assert ErrorFeedback(codec, rows).layout == Layout.flat(100)
        assert Method(uplink=codec).uplink == codec
    assert Method(uplink=codec, feedback=False).memory(Layout.flat(100), None) == {}


def test_feedback_refuses_what_it_cannot_use() -> None:
    layout = Layout.flat(10)
    rows = RowStore.in_memory({"residual": layout, "other": layout})
    uplink = ErrorFeedback(COMPRESSORS[0], rows, row="other")
    with pytest.raises(UpdateError, match="a client appears twice"):
        uplink.prepare_([3, 3], torch.ones(2, 10), 1)
    with pytest.raises(LayoutError, match=r"delta has shape \(10,\) for 1 clients; give \[1, d\]"):
        uplink.prepare_([3], torch.ones(10), 1)
    with pytest.raises(LayoutError, match=r"give delta\.contiguous\(\)"):
        uplink.prepare_([1, 2], torch.ones(10, 2).T, 1)
    code = COMPRESSORS[0].encode(torch.ones(2, 10), layout)
    with pytest.raises(LayoutError, match=r"give out\.detach\(\)\.contiguous\(\)"):
        COMPRESSORS[0].add_to_(torch.ones(10, 2).T, code, layout)
    assert uplink.prepare_([1], torch.ones(1, 10, requires_grad=True), 1).ids == (1,)
    with pytest.raises(SpecError, match="row='mine': the store has other, residual; give one of these names"):
        ErrorFeedback(COMPRESSORS[0], rows, row="mine")
    with pytest.raises(SpecError, match="2 keys for 3 rows"):
        COMPRESSORS[0].encode(torch.ones(3, 10), layout, key=[1, 2])


@everyone
def test_aggregation_is_the_same_in_any_order_of_arrival(codec: Compressor) -> None:
    layout = tensors_layout(500)
    payloads = {
        i: pack(codec, codec.encode(vectors(500, seed=i)["random"], layout, key=i), layout) for i in (7, 2, 30, 11)
    }
    means = []
    for order in ([7, 2, 30, 11], [30, 11, 2, 7]):
        aggregator = Aggregator(layout)
        for i in order:
            aggregator.add(i, payloads[i])
        means.append(aggregator.mean())
    assert torch.equal(means[0], means[1])
    total = torch.zeros(500)
    for i in sorted(payloads):
        total += unpack(payloads[i], layout).decode()
    assert torch.equal(means[0], total / 4)


@everyone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@together("d", DIMENSIONS)
def test_codes_on_a_gpu_are_those_of_the_cpu(codec: Compressor, d: int) -> None:
    """Integers equal; reals to 1e-6 relative, since sums are taken in another order."""
    rows = torch.stack(list(vectors(d).values()))
    for layout in layouts(d):
        here, there = codec.encode(rows, layout, 5), codec.encode(rows.cuda(), layout, 5)
        for name, field in codec.fields(layout).items():
            assert there[name].is_cuda
            if field.kind in ("f32", "bf16"):
                torch.testing.assert_close(there[name].cpu(), here[name], rtol=1e-6, atol=1e-44)
            else:
                assert torch.equal(there[name].cpu(), here[name])
        assert sizes(codec, there, layout) == sizes(codec, here, layout)
        decoded = codec.decode({name: tensor.cuda() for name, tensor in here.items()}, layout)
        assert torch.equal(decoded.cpu(), codec.decode(here, layout))


def test_a_field_may_be_empty() -> None:
    """As that of a tensor without numbers, for a compressor with a field per tensor."""

    @dataclass(frozen=True)
    class Halves(Compressor):
        def fields(self, layout: Layout) -> dict[str, Field]:
            return {name: Field("f32", size) for name, size in zip(layout.names, layout.sizes, strict=True)}

        def compress(self, x: torch.Tensor, layout: Layout, keys: Sequence[int]) -> Code:
            return {name: part.flatten(1).clone() for name, part in layout.split(x).items()}

        def accumulate_(self, out: torch.Tensor, code: Code, layout: Layout, weight: float) -> None:
            out.add_(torch.cat(list(code.values()), -1), alpha=weight)

    layout, x = Layout(("a", "b"), ((3,), (0, 1, 9))), torch.tensor([[1.0, 2.0, 3.0]])
    for rows in (x, x[0], x.repeat(4, 1).view(2, 2, 3)):
        assert torch.equal(Halves().decode(Halves().encode(rows, layout), layout), rows)
    code = {"a": x[0], "b": torch.empty_strided((0,), (0,))}  # as an empty field is read
    assert len(pack(Halves(), code, layout)) == size(Halves(), code, layout)
