"""Schedules: their numbers against closed formulas, their bounds, and FedAvgM as the twin of FedAMS."""

from __future__ import annotations

import dataclasses
import math
import pickle
from fractions import Fraction

import pytest
import torch

from fedcams import Layout, Method, compressor, server
from fedcams.compress import Compressor
from fedcams.downlink import Downlink
from fedcams.errors import SpecError, UnknownCodec
from fedcams.optimizers import ServerOptimizer
from fedcams.registry import Schedule, registered, resolve
from fedcams.wire import pack, unpack
from fedcams.wire.payload import HEADER
from together import together

EXAMPLES = [Schedule.parse(spec) for cls in registered("schedule").values() for spec in cls.examples]
everyone = pytest.mark.parametrize("schedule", EXAMPLES, ids=str)


def values(spec: str, rounds: int) -> list[float]:
    return [Schedule.parse(spec).value(t, rounds) for t in range(1, rounds + 1)]


def test_a_line_is_a_line() -> None:
    assert values("linear(2, 1)", 4) == [2, 1.75, 1.5, 1.25]
    assert values("linear(0, 1, rounds=2)", 5) == [0, 0.5, 1, 1, 1]
    assert Schedule.parse("linear(1, 3, rounds=7)").value(8, 100) == 3


def test_a_cosine_is_half_a_wave() -> None:
    for t, value in enumerate(values("cosine(3, 1)", 10)):
        assert value == pytest.approx(1 + 2 * (1 + math.cos(math.pi * t / 10)) / 2, rel=1e-14)
    ends = values("cosine(1, 0, rounds=4)", 6)
    assert ends == [1, *(pytest.approx((1 + math.cos(math.pi * t / 4)) / 2) for t in (1, 2, 3)), 0, 0]


def test_a_warmup_rises_to_what_follows() -> None:
    assert values("warmup(3, 8)", 6) == [2, 4, 6, 8, 8, 8]
    assert values("warmup(3, constant(8))", 5) == [2, 4, 6, 8, 8]
    assert values("warmup(1, linear(4, 0))", 5) == [2, 4, 3, 2, 1]
    assert values("warmup(1, linear(4, 2, rounds=1))", 4) == [2, 4, 2, 2]
    assert values("warmup(8, 9)", 3) == [1, 2, 3]
    assert values("warmup(2, linear(3, 0))", 2) == [1, 2], "a run that ends with the rise"


def test_a_hold_keeps_the_first_value_and_then_follows() -> None:
    assert values("hold(1/2, linear(4, 0))", 8) == [4, 4, 4, 4, 4, 3, 2, 1]
    assert values("hold(0.8, linear(1, 0))", 5) == [1, 1, 1, 1, 1], "one round is left, and it is the first of the line"
    assert values("hold(0.8, linear(1, 0, rounds=1))", 10) == [*[1] * 9, 0]
    assert values("hold(0.8, warmup(1, 6))", 10) == [*[3] * 9, 6]
    falling = values("hold(0.8, cosine(1, 0))", 500)
    assert falling[:401] == [1.0] * 401
    assert falling[400:] == values("cosine(1, 0)", 100)


def test_the_correction_is_adams() -> None:
    for t, value in enumerate(values("bias_correction(0.5, beta1=0.8, beta2=0.95)", 50), start=1):
        assert value == pytest.approx(0.5 * math.sqrt(1 - 0.95**t) / (1 - 0.8**t), rel=1e-14)


def test_a_correction_that_never_exceeds_its_limit_has_it_as_a_bound() -> None:
    """Exactly, so that a field whose range ends there takes it."""
    assert Schedule.parse("bias_correction(1)").bounds()[1] == 1
    assert Schedule.parse("bias_correction(1, beta1=0, beta2=0.99)").bounds()[1] == 1
    assert Schedule.parse("bias_correction(1, beta1=0.99, beta2=0.9)").bounds()[1] > 30


def test_a_round_has_a_number_of_six_digits() -> None:
    assert server("fedavg(lr=linear(1, 0))").at(2, 7).lr == Fraction("0.857143")


@together("spec", ["cosine(1/2, 1)", "linear(0, 1)", "hold(1/2, cosine(1/2, 1))", "warmup(5, cosine(1/2, 1))"])
def test_a_long_run_never_rounds_up_to_a_limit_that_the_field_excludes(spec: str) -> None:
    optimizer, rounds = server(f"fedavgm(momentum={spec})"), 3_000_000
    for round in (rounds - 1000, rounds):
        assert 0.9996 < optimizer.at(round, rounds).momentum < 1


@everyone
@together("rounds", [1, 7, 8000])
def test_bounds_hold_and_are_close(schedule: Schedule, rounds: int) -> None:
    low, high = map(float, schedule.bounds())
    numbers = [schedule.value(t, rounds) for t in range(1, 2 * rounds + 1)]
    assert low <= min(numbers) * (1 + 1e-12)
    assert max(numbers) <= high * (1 + 1e-12)
    if rounds == 8000:
        assert max(numbers) == pytest.approx(high, rel=2e-5)
        assert min(numbers) == pytest.approx(low, rel=2e-5, abs=1e-5)


@together(
    ("spec", "length", "depends", "limit"),
    [
        ("constant(1)", 0, False, None),
        ("linear(1, 0)", 100, True, 0),
        ("linear(1, 1)", 100, True, None),
        ("cosine(1, 1/2, rounds=30)", 30, False, None),
        ("warmup(10, 1)", 10, False, None),
        ("warmup(10, cosine(1, 1/3))", 100, True, Fraction(1, 3)),
        ("warmup(10, cosine(1, 0, rounds=150))", 160, False, None),
        ("warmup(120, linear(1, 0))", 120, True, 0),
        ("bias_correction(1)", 0, False, None),
        ("hold(0.8, cosine(1, 0))", 100, True, 0),
        ("hold(0.8, cosine(1, 0, rounds=15))", 95, True, None),
        ("hold(0.8, cosine(1, 0, rounds=50))", 130, True, None),
    ],
)
def test_what_a_run_of_a_hundred_rounds_asks(spec: str, length: int, depends: bool, limit: Fraction | None) -> None:
    schedule = Schedule.parse(spec)
    assert (schedule.length(100), schedule.depends_on_rounds, schedule.limit()) == (length, depends, limit)


@everyone
def test_a_schedule_stays_as_it_is_after_its_length(schedule: Schedule) -> None:
    if not schedule.depends_on_rounds and schedule.length(100):
        last = schedule.length(100) + 1
        assert {schedule.value(t, 1000) for t in range(last, last + 50)} == {schedule.value(last, 1000)}
    elif schedule.depends_on_rounds:
        assert any(schedule.value(t, 100) != schedule.value(t, 200) for t in range(1, 101))
    else:
        assert schedule.value(50, 100) == schedule.value(50, 200)


def test_fedavgm_is_the_twin_of_fedams() -> None:
    """Where v̂ stays at ε, FedAMS steps by lr √(1-β2^t)/(1-β1^t) (1-β1)/√ε times the momentum of FedAvgM."""
    adaptive = server("fedams(lr=0.5, beta1=0.8, beta2=0.95, eps=1e-4, bias_correction=true)")
    scheduled = server("fedavgm(lr=bias_correction(10, beta1=0.8, beta2=0.95), momentum=0.8)")
    ((place, schedule),) = scheduled.schedules()
    assert place == "lr"
    draw = torch.Generator().manual_seed(1)
    start = torch.randn(30, generator=draw, dtype=torch.float64)
    xs = [start.clone() for _ in range(3)]
    states = [adaptive.init(start), scheduled.init(start), scheduled.init(start)]
    for t in range(1, 11):
        delta = torch.randn(30, generator=draw, dtype=torch.float64) * 1e-3
        exactly = dataclasses.replace(scheduled, lr=schedule.value(t, 10))  # type: ignore[type-var]
        for i, optimizer in enumerate((adaptive, exactly, scheduled.at(t, 10))):
            xs[i], states[i] = optimizer.step_(states[i], xs[i], delta)
    moved = float((xs[0] - start).norm())
    assert torch.equal(states[0]._asdict()["vhat"], torch.full((30,), 1e-4, dtype=torch.float64))
    assert float((xs[1] - xs[0]).norm()) <= 1e-14 * moved, "with every digit"
    assert float((xs[2] - xs[0]).norm()) <= 1e-6 * moved, "with six digits"


def test_pieces_take_schedules() -> None:
    optimizer = ServerOptimizer.parse("fedams(cosine(1, 0), eps=linear(1e-3, 1e-4))")
    assert str(optimizer.at(6, 10)) == "fedams(lr=0.5, eps=55e-5)"
    codec = Compressor.parse("topk(ratio=linear(1/16, 1/4))")
    assert str(codec.at(1, 12)) == "topk(ratio=1/16)"
    assert str(codec.at(5, 12)) == "topk(ratio=1/8)"
    last = Compressor.parse("topk(ratio=cosine(1, 0))").at(500, 500)
    assert last.squared_error_bound(Layout.flat(10)) == pytest.approx(0.9)
    link = resolve("downlink", "replica(topk(ratio=linear(1/32, 1/8)))")
    assert str(link.at(3, 3)) == "replica(topk(ratio=3/32))"
    assert [place for place, _ in link.schedules()] == ["codec.ratio"]


def test_a_method_in_the_middle_of_a_run_can_be_sent_to_another_process() -> None:
    method = Method(server="fedams(lr=cosine(1, 0))")
    now = method.in_round(3, 10)
    other = pickle.loads(pickle.dumps(method))  # noqa: S301  (our own bytes)
    assert other == method
    assert other.in_round(3, 10) == now


def test_what_needs_a_number_says_so() -> None:
    codec, layout = compressor("topk(ratio=linear(1/16, 1/4))"), Layout.flat(100)
    with pytest.raises(SpecError, match=r"is a schedule; take the piece that holds it at a round"):
        codec.encode(torch.ones(100), layout)
    optimizer = server("fedavg(lr=linear(1, 1/2))")
    with pytest.raises(SpecError, match=r"is a schedule; take the piece"):
        optimizer.step_(optimizer.init(torch.ones(3)), torch.ones(3), torch.ones(3))
    with pytest.raises(SpecError, match=r"sign has no key|a schedule is not accepted"):
        compressor("topk(k=linear(1, 5))")


def test_a_payload_names_the_codec_of_its_round() -> None:
    codec, layout = compressor("topk(ratio=linear(1/16, 1/4))"), Layout.flat(100)
    fixed = codec.at(1, 1)
    data = pack(fixed, fixed.encode(torch.ones(100), layout), layout)
    assert unpack(data, layout).compressor == fixed
    spec, other = str(fixed).encode(), str(codec).encode()
    magic, version, _, d, layout_id = HEADER.unpack_from(data)
    forged = HEADER.pack(magic, version, len(other), d, layout_id) + other + data[HEADER.size + len(spec) :]
    with pytest.raises(UnknownCodec, match="follows a schedule; a payload names the codec of its round"):
        unpack(forged, layout, crc_checked=True)


def test_an_unfit_schedule_is_refused_inside_a_downlink() -> None:
    with pytest.raises(SpecError, match=r"ratio=linear\(start=1/4, end=0, rounds=9\): reaches 0, out of range"):
        Downlink.parse("replica(topk(ratio=linear(1/4, 0, rounds=9)))")
