"""Transforms: the contract of every transform, and each against its oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from fedcams.compress import Compressor
from fedcams.errors import SpecError, UpdateError
from fedcams.keys import derive
from fedcams.layout import Layout
from fedcams.registry import registered, resolve_several
from fedcams.transforms import Facts, Transform
from fedcams.transforms.base import POINTS
from inputs import tensors_layout

TRANSFORMS = [Transform.parse(spec).at(1, 1) for cls in registered("transform").values() for spec in cls.examples]
everyone = pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
LAYOUT = tensors_layout(100)


@dataclass
class Rule:
    """A local rule, as transforms see it."""

    steps_are_rates: bool = True

    def __str__(self) -> str:
        return "sgd" if self.steps_are_rates else "sgd(momentum=0.9)"


@dataclass
class Method:
    """A method, as transforms see it."""

    local: Rule
    uplink: Compressor
    weighting: str = "uniform"


def facts(count: int, steps: tuple[int, ...] | None = None, weights: tuple[float, ...] | None = None) -> Facts:
    ids = tuple(range(3, 3 + 2 * count, 2))
    examples = tuple(range(10, 10 + count))
    steps, weights = steps or tuple(range(1, 1 + count)), weights or (1.0,) * count
    return Facts(4, 7, ids, examples, steps, weights, rate=0.1, population=30)


def rows(count: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(count, LAYOUT.d, generator=torch.Generator().manual_seed(1))


@everyone
def test_a_client_alone_does_what_the_cohort_does(transform: Transform) -> None:
    """Bit for bit: a site is the case of one row."""
    known = facts(5)
    for act in (transform.update_, transform.message_, transform.arrival_):
        cohort = rows(5, 3.0)
        alone = [row[None].clone() for row in cohort]
        act(cohort, known, LAYOUT)
        for i, row in enumerate(alone):
            act(row, known.take([i]), LAYOUT)
        assert torch.equal(cohort, torch.cat(alone))


@everyone
def test_it_acts_where_it_says_and_nowhere_else(transform: Transform) -> None:
    assert transform.points
    for point, name in POINTS.items():
        if point not in transform.points and point != "guard":
            x = rows(1)[0] if point == "mean" else rows(3)
            before = x.clone()
            getattr(transform, name)(x, facts(3), LAYOUT)
            assert torch.equal(x, before)
    if "guard" not in transform.points:
        assert transform.refuses(math.inf, facts(1)) == ""
    assert not transform.reads_norm or "guard" in transform.points


@everyone
def test_it_fits_the_plainest_method(transform: Transform) -> None:
    transform.check(Method(Rule(), Compressor.parse("identity")))


def test_several_are_one_text() -> None:
    assert resolve_several("transform", "clip(norm=1) + fednova") == (
        Transform.parse("clip(1)"),
        Transform.parse("fednova"),
    )


def test_clipping_is_the_oracles() -> None:
    x = rows(4) * torch.tensor([0.01, 1.0, 100.0, 0.0])[:, None]
    clipped = x.clone()
    Transform.parse("clip(norm=2.5)").update_(clipped, facts(4), LAYOUT)
    for before, after in zip(x, clipped, strict=True):
        expected = oracle.clip(before.double().numpy(), 2.5)
        np.testing.assert_allclose(after.numpy(), expected, rtol=1e-6)
        assert float(after.norm()) <= 2.5 * (1 + 1e-6)
    assert torch.equal(clipped[[0, 3]], x[[0, 3]]), "short updates keep their bits"
    assert float(clipped[2].norm()) == pytest.approx(2.5, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clipping_leaves_what_is_not_finite_as_it_is(bad: float) -> None:
    """So that the refusal counts the values that training left so, and no others."""
    x = rows(2)
    x[1, 5] = bad
    before = x.clone()
    Transform.parse("clip(norm=1)").update_(x, facts(2), LAYOUT)
    assert not torch.equal(x[0], before[0])
    assert torch.equal(x[1].view(torch.int32), before[1].view(torch.int32))


def test_a_norm_above_the_bound_is_refused_with_both_numbers() -> None:
    guard = Transform.parse("max_norm(bound=10)")
    assert guard.points == {"guard"}
    assert guard.refuses(10.0, facts(1)) == ""
    assert guard.refuses(12.3, facts(1)) == "an update of norm 12.3; at most max_norm=10 is accepted"
    assert "norm inf" in guard.refuses(math.inf, facts(1))
    assert "norm nan" in guard.refuses(math.nan, facts(1))


@pytest.mark.parametrize("weights", [None, [1.0, 4.0, 2.0, 3.0, 0.5, 1.0]])
def test_fednova_is_the_oracles(weights: list[float] | None) -> None:
    """Ten rounds of local gradient descent in float64, every client with a number of steps of its own."""
    clients, d, lr = 6, 20, 0.05
    steps = (1, 7, 3, 12, 2, 5)
    grad = oracle.quadratic(clients, d)
    cohorts = [[0, 1, 3], [2, 4, 5], [0, 1, 2, 3, 4, 5], [1], [0, 5]] * 2
    expected = oracle.fednova(np.zeros(d), grad, cohorts, steps, lr, weights)
    nova, layout, x = Transform.parse("fednova"), Layout.flat(d), np.zeros(d)
    for cohort, wanted in zip(cohorts, expected, strict=True):
        counts = tuple(1.0 if weights is None else weights[i] for i in cohort)
        known = Facts(1, 1, tuple(cohort), (1,) * len(cohort), tuple(steps[i] for i in cohort), counts, lr)
        deltas = torch.from_numpy(np.stack([descend(grad, i, x, steps[i], lr) for i in cohort]))
        nova.update_(deltas, known, layout)
        mean = torch.tensor(counts, dtype=torch.float64) @ deltas / sum(counts)
        nova.mean_(mean, known, layout)
        x = x + mean.numpy()
        np.testing.assert_allclose(x, wanted, rtol=1e-12, atol=1e-14)


def descend(grad: oracle.Gradient, i: int, x: oracle.Vector, steps: int, lr: float) -> oracle.Vector:
    w = x
    for _ in range(steps):
        w = w - lr * grad(i, w)
    return w - x


def test_with_equal_steps_fednova_changes_nothing() -> None:
    deltas, known = rows(3).double(), facts(3, steps=(4, 4, 4), weights=(1.0, 2.0, 5.0))
    plain = torch.tensor(known.weights, dtype=torch.float64) @ deltas / 8
    nova = Transform.parse("fednova")
    nova.update_(deltas, known, LAYOUT)
    mean = torch.tensor(known.weights, dtype=torch.float64) @ deltas / 8
    nova.mean_(mean, known, LAYOUT)
    torch.testing.assert_close(mean, plain, rtol=1e-13, atol=1e-15)


def test_a_client_that_lies_about_its_steps_hardly_moves_fednova() -> None:
    """Honest counts are taken as they are; a lie counts for 20 times what is usual."""
    nova = Transform.parse("fednova")
    for lie, effective in ((40, (1 + 2 + 2 + 2 + 40) / 5), (2**63, (1 + 2 + 2 + 2 + 20 * 2) / 5)):
        mean = torch.ones(5, dtype=torch.float64)
        nova.mean_(mean, facts(5, steps=(2, 1, 2, lie, 2)), LAYOUT)
        assert mean.tolist() == [effective] * 5


def test_fednova_refuses_a_client_without_steps() -> None:
    nova, known = Transform.parse("fednova"), facts(3, steps=(2, 0, 1))
    assert nova.refuses(math.nan, known.take([0])) == ""
    assert nova.refuses(math.nan, known.take([1])) == "client 5 took 0 steps; fednova needs at least one"
    with pytest.raises(UpdateError, match="client 5 took 0 steps; fednova needs at least one"):
        nova.mean_(rows(1)[0], known, LAYOUT)
    deltas = rows(3)
    deltas[1] = 0
    nova.update_(deltas, known, LAYOUT)
    assert torch.isfinite(deltas).all(), "the client sends what it has, and the server refuses it"


def test_fednova_refuses_steps_that_are_not_rates() -> None:
    with pytest.raises(SpecError, match=r"fednova .* those of sgd\(momentum=0.9\) are not rate times gradient; choose"):
        Transform.parse("fednova").check(Method(Rule(False), Compressor.parse("identity")))


def test_facts_are_those_of_the_clients_taken() -> None:
    known = facts(4, weights=(1.0, 2.0, 3.0, 4.0))
    some = known.take([1, 3])
    assert (some.ids, some.examples, some.steps, some.weights) == ((5, 9), (11, 13), (2, 4), (2.0, 4.0))
    assert replace(known, ids=(), examples=(), steps=(), weights=()) == known.take([])
    assert known.key("noise", 5) == derive(7, "noise", 4, 5)
    with pytest.raises(UpdateError, match=r"ids=\(5, 3\); give ascending ids"):
        Facts(1, 1, (5, 3), (1, 1), (1, 1), (1.0, 1.0), 0.1)
    with pytest.raises(UpdateError, match="examples, steps and weights for each"):
        Facts(1, 1, (3, 5), (1, 1), (1,), (1.0, 1.0), 0.1)


def test_a_transform_that_would_do_nothing_is_refused() -> None:
    @dataclass(frozen=True)
    class Nothing(Transform):
        name = "nothing"

        def upadte_(self, rows: Tensor, facts: Facts, layout: Layout) -> None:
            rows.zero_()

    with pytest.raises(SpecError, match=r"nothing overrides none of update_, message_, .*, and would do nothing"):
        Nothing()
