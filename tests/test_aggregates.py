"""Aggregates and averages: against their oracles, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fedcams
import oracle
from fedcams.aggregate import Aggregator
from fedcams.aggregates import Aggregate
from fedcams.aggregates.base import PIECE
from fedcams.averages import Average
from fedcams.compress.identity import IDENTITY
from fedcams.errors import SpecError, UpdateError
from fedcams.layout import Layout
from fedcams.registry import registered
from fedcams.rounds.robust import RobustMean
from together import together

AGGREGATES = [Aggregate.parse(spec) for cls in registered("aggregate").values() for spec in cls.examples]
AVERAGES = [Average.parse(spec) for cls in registered("average").values() for spec in cls.examples]
each_aggregate = pytest.mark.parametrize("aggregate", AGGREGATES, ids=str)
each_average = pytest.mark.parametrize("average", AVERAGES, ids=str)


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def method(weighting: str) -> Any:
    return SimpleNamespace(weighting=weighting)


@each_aggregate
def test_what_every_aggregate_keeps(aggregate: Aggregate) -> None:
    """A mean lies between the rows, and is theirs if they are equal; the rows are only read."""
    rows = draw(7, 50)
    before = rows.clone()
    out = aggregate.combine(rows, [1.0] * 7)
    assert torch.equal(rows, before)
    assert (out.shape, out.dtype) == ((50,), rows.dtype)
    if aggregate.is_mean:
        assert bool((rows.min(0).values - 1e-6 <= out).all())
        assert bool((out <= rows.max(0).values + 1e-6).all())
        torch.testing.assert_close(aggregate.combine(rows[:1].repeat(5, 1), [1.0] * 5), rows[0], rtol=1e-6, atol=1e-7)
        assert torch.equal(aggregate.combine(rows[:1], [1.0]), rows[0])
    aggregate.check(method("uniform"))
    for bad in (rows[:0], rows[0]):
        with pytest.raises(UpdateError, match="give one weight per row, and at least one"):
            aggregate.combine(bad, [])


@pytest.mark.parametrize("weights", [[1.0] * 6, [3.0, 1.0, 0.5, 2.0, 7.0, 1.0]])
@pytest.mark.parametrize("d", [10, 100_003])
def test_the_mean_has_the_bits_of_the_streaming_one(weights: list[float], d: int) -> None:
    rows = draw(6, d)
    for in_order in (False, True):
        sums = Aggregator(Layout.flat(d), in_order=in_order)
        sums.add_rows(range(6), IDENTITY, {"values": rows}, weights)
        assert torch.equal(Aggregate.parse("mean").combine(rows, weights), sums.mean())


@together("count", [1, 2, 3, 9, 10, 11, 20])
@together("fraction", ["0", "0.1", "1/3", "0.49"])
def test_the_trimmed_mean_is_the_oracles(count: int, fraction: str) -> None:
    rows = draw(count, 200, seed=count)
    out = Aggregate.parse(f"trimmed({fraction})").combine(rows, [2.0] * count)
    np.testing.assert_allclose(out.numpy(), oracle.trimmed_mean(rows.double().numpy(), fraction), rtol=1e-5, atol=1e-6)


def test_a_long_vector_is_trimmed_in_pieces() -> None:
    rows = draw(5, PIECE + 7)
    whole = Aggregate.parse("trimmed(0.2)").combine(rows, [1.0] * 5)
    np.testing.assert_allclose(whole, oracle.trimmed_mean(rows.double().numpy(), "0.2"), rtol=1e-5, atol=1e-6)
    parts = [Aggregate.parse("trimmed(0.2)").combine(part, [1.0] * 5) for part in (rows[:, :100], rows[:, 100:])]
    assert torch.equal(whole, torch.cat(parts))


def test_wild_clients_do_not_move_a_trimmed_mean_far() -> None:
    rows = draw(10, 300)
    honest = rows[:8]
    rows[8:] = torch.tensor([[1e30], [-1e30]])
    out = Aggregate.parse("trimmed(0.2)").combine(rows, [1.0] * 10)
    assert bool((honest.min(0).values <= out).all())
    assert bool((out <= honest.max(0).values).all())


def test_a_trimmed_mean_refuses_weights() -> None:
    trimmed = Aggregate.parse("trimmed")
    with pytest.raises(UpdateError, match=r"trimmed and weights=\[1.0, 2.0\]; it takes equal weights"):
        trimmed.combine(draw(2, 3), [1.0, 2.0])
    with pytest.raises(SpecError, match="trimmed counts every client equally, but weighting=examples does not; set"):
        trimmed.check(method("examples"))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_the_median_is_numpys(count: int) -> None:
    rows = draw(count, PIECE + 9, seed=count)
    out = Aggregate.parse("median").combine(rows, [1.0] * count)
    np.testing.assert_allclose(out.numpy(), np.median(rows.double().numpy(), axis=0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("count", [3, 10])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_geometric_median_has_the_smallest_sum_of_distances(count: int, weighted: bool) -> None:
    """No step in any direction tried makes the sum smaller by more than the steps taken leave."""
    rows = draw(count, 20, seed=count).double()
    rows[0] *= 50
    weights = torch.arange(1.0, count + 1).double() if weighted else torch.ones(count).double()
    z = Aggregate.parse("geometric_median(steps=100)").combine(rows.float(), weights.tolist()).double()

    def total(x: torch.Tensor) -> float:
        return float((rows - x).norm(dim=1) @ weights)

    for other in (*rows, rows.mean(0), *(z + 0.05 * draw(20, seed=seed).double() for seed in range(20))):
        assert total(z) <= total(other) * (1 + 1e-6)


@together("idle", [1, 2, 3])
def test_idle_clients_do_not_hold_the_geometric_median_of_sparse_updates_at_zero(idle: int) -> None:
    """If few clients keep the same coordinates the search starts at zero, which is where idle clients are."""
    rows = torch.cat([torch.eye(16, 50) * torch.arange(1.0, 17.0)[:, None], torch.zeros(idle, 50)])
    z = Aggregate.parse("geometric_median(steps=30)").combine(rows, [1.0] * len(rows))

    def total(x: torch.Tensor) -> float:
        return float((rows - x).norm(dim=1).sum())

    for other in (torch.zeros(50), z * 0.8, z * 1.2, *(z + 0.05 * draw(50, seed=seed) for seed in range(20))):
        assert total(z) < total(other)


def test_idle_clients_that_outweigh_all_others_hold_the_geometric_median_at_zero() -> None:
    """Four updates at right angles pull with the strength of two."""
    rows = torch.cat([torch.eye(4, 50), torch.zeros(3, 50)])
    assert not bool(Aggregate.parse("geometric_median").combine(rows, [1.0] * 7).any())


def test_a_geometric_median_among_distances_that_overflow_is_the_median() -> None:
    rows = 3e38 * draw(7, 100).sign()
    assert torch.equal(Aggregate.parse("geometric_median").combine(rows, [1.0] * 7), rows.median(dim=0).values)


@together("count", [1, 2, 3, 10, 20])
@together("fraction", ["0", "0.2", "0.49"])
def test_krum_is_the_oracles(count: int, fraction: str) -> None:
    """With one row farther away than the other, and with rows among which only the neighbours that count decide."""
    weights = [1.0 + place for place in range(count)]
    for scale, seed in [(1 + torch.arange(count)[:, None], count), *((1, seed) for seed in range(5))]:
        rows = draw(count, 50, seed=seed) * scale
        out = Aggregate.parse(f"krum({fraction})").combine(rows, weights)
        expected = oracle.krum(rows.double().numpy(), weights, fraction)
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_of_an_even_number_the_lower_median_is_the_bound_of_a_clipped_mean() -> None:
    rows = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    out = Aggregate.parse("clipped_mean").combine(rows, [1.0] * 4)
    torch.testing.assert_close(out, torch.tensor([1.0, 2.0, 2.0, 2.0]) / 4)


def test_krum_finds_a_direction_that_noise_hides_in_every_coordinate() -> None:
    """Two clients of ten send the opposite of what all others agree on, which is a third of the noise."""
    common = draw(20_000) / 3
    honest, opposite = common + draw(8, 20_000, seed=2), -common + draw(2, 20_000, seed=3)
    out = Aggregate.parse("krum(0.2)").combine(torch.cat([opposite, honest]), [1.0] * 10)
    torch.testing.assert_close(out, honest.mean(0))


def test_a_clipped_mean_scales_long_updates_to_the_median_norm() -> None:
    rows = torch.eye(5) * torch.tensor([1.0, 2.0, 3.0, 4.0, 1e6])
    weights = [1.0, 1.0, 1.0, 1.0, 4.0]
    expected = torch.tensor([1.0, 2.0, 3.0, 3.0, 12.0]) / 8
    torch.testing.assert_close(Aggregate.parse("clipped_mean").combine(rows, weights), expected)
    doubled = torch.tensor([1.0, 2.0, 3.0, 4.0, 24.0]) / 8
    torch.testing.assert_close(Aggregate.parse("clipped_mean(factor=2)").combine(rows, weights), doubled)


@together("spec", ["trimmed(fraction=0.2)", "median", "geometric_median", "clipped_mean", "krum"])
@together("size", [1e3, 1e30])
def test_two_wild_clients_of_ten_do_not_move_a_robust_mean_far(spec: str, size: float) -> None:
    """They agree on a direction; the mean would follow them."""
    honest = 1 + 0.1 * draw(8, 300)
    rows = torch.cat([honest, torch.full((2, 300), -size)])
    out = Aggregate.parse(spec).combine(rows, [1.0] * 10)
    assert float((out - honest.mean(0)).norm()) < 0.5 * float(honest.mean(0).norm())


@pytest.mark.parametrize("aggregate", [aggregate for aggregate in AGGREGATES if aggregate.is_mean], ids=str)
def test_rows_of_buffers_are_combined_as_changes(aggregate: Aggregate) -> None:
    """In any order of arrival; an aggregate that scales rows scales changes, and no variance falls below zero."""
    layout = Layout(("a.running_mean", "a.running_var"), ((3,), (3,)))
    before, rows = torch.tensor([5.0, -5, 0, 1, 1e-3, 1e3]), draw(9, 6).abs() * torch.tensor([1, 1, 1, 1, 1e-9, 1e-9])
    found = []
    for order in (range(9), reversed(range(9))):
        total = RobustMean(aggregate, layout, torch.device("cpu"), before)
        for client in order:
            total.add_rows([client], IDENTITY, {"values": rows[client : client + 1]}, [1.0])
        found.append(total.mean())
    assert torch.equal(*found)
    expected = aggregate.combine((rows - before).double(), [1.0] * 9) + before
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-4, atol=1e-4)
    assert bool((found[0][3:] >= 0).all())


@dataclass(frozen=True)
class Wrong(Aggregate):
    def combine(self, rows: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
        return rows.double().mean(0)


def test_another_dtype_names_the_aggregate() -> None:
    total = RobustMean(Wrong(), Layout.flat(2), torch.device("cpu"), None)
    total.add_rows([0], IDENTITY, {"values": draw(1, 2)}, [1.0])
    with pytest.raises(SpecError, match=r"combine returns torch.float64 \[2\]; return torch.float32 \[2\]"):
        total.mean()


@dataclass(frozen=True)
class Vote(Aggregate):
    is_mean = False

    def combine(self, rows: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
        return rows.sign().sum(0).sign()


def test_buffers_have_a_mean_whatever_combines_the_updates() -> None:
    """The sign of a change would move every running variance by one."""
    found = []
    for aggregate in ("mean", Vote()):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        clients = [(draw(20, 4, seed=i), torch.arange(20) % 3) for i in range(4)]
        settings = {"rounds": 1, "cohort": 4, "server": "fedavg", "local": "sgd(lr=1e-3)"}
        found.append(fedcams.simulate(model, clients, aggregate=aggregate, **settings).run())
    assert torch.equal(*(history.state.buffers for history in found))


# -- averages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.97])
def test_the_exponential_average_is_the_oracles(decay: float) -> None:
    xs = draw(60, 25).double()
    average = Average.parse(f"ema({decay})")
    a = average.init(torch.full((25,), 1e6, dtype=torch.float64))
    for t, (x, expected) in enumerate(zip(xs, oracle.ema(xs.numpy(), decay), strict=True), start=1):
        average.step_(a, x, t)
        np.testing.assert_allclose(a.numpy(), expected, rtol=1e-13, atol=1e-13)
        if 1 / t >= 1 - decay:
            np.testing.assert_allclose(a.numpy(), xs[:t].mean(0).numpy(), rtol=1e-12, atol=1e-13)


@each_average
def test_what_every_average_keeps(average: Average) -> None:
    """It starts as the first model bit for bit, stays where the model stays, and never writes to the model."""
    x = draw(1000) * 1e4
    a = average.init(draw(1000, seed=2))
    for t in range(1, 200):
        kept = x.clone()
        average.step_(a, x, t)
        assert torch.equal(x, kept)
        assert 0 < average.weight(t) <= 1
        torch.testing.assert_close(a, x, rtol=0 if t == 1 else 1e-6, atol=0)
    fresh = average.init(x)
    fresh.add_(1)
    assert torch.equal(x, kept), "it starts in memory of its own"


def test_positional_decay_is_spelled_out() -> None:
    assert str(Average.parse("ema(0.97)")) == "ema(decay=0.97)"
    assert not Average.parse("none").active
