"""Probes: against their oracles, and the contract of every probe."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from fedcams import Aggregator, SpecError
from fedcams.compress import Compressor, compressor
from fedcams.keys import derive
from fedcams.local import local
from fedcams.optimizers import ServerOptimizer, server
from fedcams.probes import Leftovers, Probe, inner_products, mean_before
from fedcams.probes.floor import floor_note
from fedcams.registry import registered
from fedcams.transforms import Facts
from halves import run
from inputs import tensors_layout
from together import together

PROBES = [Probe.parse(spec) for cls in registered("probe").values() for spec in cls.examples]
everyone = pytest.mark.parametrize("probe", PROBES, ids=str)
LAYOUT = tensors_layout(300)
WEIGHTS = (1.0, 2.0, 4.0, 1.0)


class Parts(SimpleNamespace):
    """A method, as probes see it."""

    local: Any
    server: ServerOptimizer
    uplink: Compressor
    weighting: str


def round_of(codec: Compressor, delta: Tensor, residual: Tensor | None) -> Leftovers:
    """What one round of error feedback leaves behind."""
    ids = tuple(range(len(delta)))
    facts = Facts(5, 9, ids, (1,) * len(delta), (1,) * len(delta), WEIGHTS, 0.1)
    h = delta if residual is None else delta + residual
    code = codec.encode(h, LAYOUT, [facts.key("uplink", i) for i in ids])
    decoded = codec.decode(code, LAYOUT)
    mean_h, norm = mean_before(delta, residual, WEIGHTS)
    sums, again = Aggregator(LAYOUT), Aggregator(LAYOUT)
    sums.add_rows(ids, codec, code, WEIGHTS)
    again.add_rows(ids, codec, code, WEIGHTS)
    optimizer, x = server("fedams(eps=1e-4)"), torch.zeros(LAYOUT.d)
    x, state = optimizer.step_(optimizer.init(x), x, sums.mean())
    return Leftovers(
        Parts(uplink=codec, server=optimizer, local=local("sgd")),
        LAYOUT,
        facts,
        mean=again.mean(),
        gram=inner_products(delta),
        residual=h - decoded,
        state=state,
        step_norm=float(x.norm()),
        decoded=lambda: decoded,
        error=(decoded - h).norm(dim=-1) / h.norm(dim=-1),
        mean_h=mean_h,
        mean_delta_norm=norm,
        norms={i: {"update": float(row.norm())} for i, row in enumerate(decoded)},
        bounds={"update": 1e3},
    )


def vectors() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(4, LAYOUT.d, generator=draw), 0.3 * torch.randn(4, LAYOUT.d, generator=draw)


@everyone
@together("codec", ["identity", "sign", "randk(ratio=1/16)"])
def test_what_every_probe_keeps(probe: Probe, codec: str) -> None:
    """Finite named numbers, the same again, and everything only read."""
    left = round_of(compressor(codec), *vectors())
    tensors = [left.mean, left.error, left.mean_h, left.gram, left.residual, left.decoded()]
    before = [tensor.clone() for tensor in tensors if tensor is not None]
    numbers = probe.measure(left)
    assert numbers
    assert all(name.isidentifier() and np.isfinite(value) for name, value in numbers.items())
    assert all(type(value) is float for value in numbers.values())
    assert probe.measure(left) == numbers
    assert all(torch.equal(a, b) for a, b in zip(before, [t for t in tensors if t is not None], strict=True))
    assert probe.needs <= {"error", "mean_h", "gram", "step"}


def test_names_are_given_once() -> None:
    left = round_of(compressor("sign"), *vectors())
    names = [name for probe in PROBES for name in probe.measure(left)]
    assert len(set(names)) == len(names)


def test_q_is_the_mean_error() -> None:
    delta, residual = vectors()
    h = (delta + residual).double().numpy()
    errors = [np.linalg.norm(oracle.scaled_sign(row) - row) / np.linalg.norm(row) for row in h]
    numbers = Probe.parse("q").measure(round_of(compressor("sign"), delta, residual))
    assert numbers["q"] == pytest.approx(np.mean(errors), rel=1e-6)
    assert numbers["q_max"] == pytest.approx(np.max(errors), rel=1e-6)


@pytest.mark.parametrize("codec", ["sign", "topk(ratio=0.1)", "ternary(ratio=1/16)", "blockq"])
def test_the_largest_error_is_below_the_root_of_the_proven_bound(codec: str) -> None:
    bound = compressor(codec).squared_error_bound(LAYOUT)
    assert bound is not None
    assert Probe.parse("q").measure(round_of(compressor(codec), *vectors()))["q_max"] <= bound**0.5


@pytest.mark.parametrize("with_residual", [False, True])
def test_gamma_is_the_dissimilarity(with_residual: bool) -> None:
    delta, residual = vectors()
    left = round_of(compressor("sign"), delta, residual if with_residual else None)
    h = (delta + residual * with_residual).double().numpy()
    p = np.array(WEIGHTS) / sum(WEIGHTS)
    apart = oracle.scaled_sign(p @ h) - p @ np.array([oracle.scaled_sign(row) for row in h])
    expected = np.linalg.norm(apart) / np.linalg.norm(p @ delta.double().numpy())
    assert Probe.parse("gamma").measure(left)["gamma"] == pytest.approx(expected, rel=1e-5)


def test_gamma_draws_with_a_key_of_its_own() -> None:
    codec = compressor("randk(ratio=1/16)")
    left = round_of(codec, *vectors())
    assert left.mean_h is not None
    code = codec.encode(left.mean_h, LAYOUT, derive(9, "gamma", 5))
    expected = float((codec.decode(code, LAYOUT) - left.mean).norm()) / left.mean_delta_norm
    assert Probe.parse("gamma").measure(left) == {"gamma": expected}


def test_gamma_of_no_update_is_zero() -> None:
    left = round_of(compressor("sign"), torch.zeros(4, LAYOUT.d), torch.ones(4, LAYOUT.d))
    assert Probe.parse("gamma").measure(left) == {"gamma": 0.0}


def test_cosines_are_the_oracles() -> None:
    left = round_of(compressor("topk(ratio=0.1)"), *vectors())
    expected = oracle.cosines(left.decoded().double().numpy(), left.mean.double().numpy())
    numbers = Probe.parse("cosine").measure(left)
    assert numbers["cosine_mean"] == pytest.approx(expected.mean(), rel=1e-12)
    assert numbers["cosine_min"] == pytest.approx(expected.min(), rel=1e-12)
    assert numbers["cosine_min"] < numbers["cosine_mean"] < 1


def test_cosines_of_equal_and_of_zero_updates() -> None:
    delta, _ = vectors()
    alike = round_of(compressor("identity"), delta[:1].repeat(4, 1), None)
    assert Probe.parse("cosine").measure(alike)["cosine_min"] == pytest.approx(1, rel=1e-12)
    none = round_of(compressor("identity"), torch.zeros(4, LAYOUT.d), torch.zeros(4, LAYOUT.d))
    assert Probe.parse("cosine").measure(none) == {"cosine_mean": 0.0, "cosine_min": 0.0}


def test_what_was_not_kept_is_not_measured() -> None:
    known = round_of(compressor("sign"), *vectors())
    bare = Leftovers(known.method, LAYOUT, known.facts, known.mean, known.decoded)
    assert [Probe.parse(name).measure(bare) for name in ("q", "gamma", "floor", "norms")] == [{}] * 4


# -- the guard ---------------------------------------------------------------------------------------------------------


def test_the_use_of_the_guard_is_that_of_the_longest_accepted_row() -> None:
    norms = {0: {"update": 1.0, "buffers": 4.0}, 1: {"update": 3.0}, 9: {"update": 70.0}}
    left = round_of(compressor("identity"), *vectors())
    left = dataclasses.replace(left, norms=norms, bounds={"update": 5.0, "buffers": 20.0})
    assert Probe.parse("guard").measure(left) == {"guard_use": 0.6}, "client 9 was refused"
    left = dataclasses.replace(left, bounds={"update": 50.0, "buffers": 20.0})
    assert Probe.parse("guard").measure(left) == {"guard_use": 0.2}
    assert Probe.parse("guard").measure(dataclasses.replace(left, bounds={})) == {}


# -- the server's floor ------------------------------------------------------------------------------------------------


def test_off_floor_counts_coordinates_and_rate_is_their_step() -> None:
    """FedAMS after one step: v̂ = max(0.01 Δ², ε), m = 0.1 Δ, step = lr m/√v̂."""
    left = round_of(compressor("identity"), *vectors())
    delta = left.mean.double().numpy()
    vhat = np.maximum(0.01 * delta**2, 1e-4)
    numbers = Probe.parse("floor").measure(left)
    assert numbers["off_floor"] == np.mean(vhat > 1e-4)
    assert 0.1 < numbers["off_floor"] < 0.9
    step = 0.1 * delta / np.sqrt(vhat)
    assert numbers["rate"] == pytest.approx(np.linalg.norm(step) / np.linalg.norm(0.1 * delta), rel=1e-5)


def test_a_server_without_second_moments_has_no_floor() -> None:
    records = run(probes="floor", rounds=2, server="fedavg(lr=0.5)").run().records
    assert records[1].probes.keys() == {"rate"}
    assert records[1].probes["rate"] == pytest.approx(0.5, rel=1e-4)


def test_a_root_below_eps_is_only_near_the_floor() -> None:
    """Where ε is added to the root, a root as large as ε halves the step."""
    assert floor_note([None, 0.0], server("fedams(eps=1e-2)")) == (
        "v̂ stayed on its floor in 100% of coordinates: this run is fedavgm(lr=1, momentum=0.9)"
    )
    note = floor_note([0.0, 1e-5], server("fedadam(eps=0.1)"))
    assert note == (
        "√v stayed below ε in 99.999% of coordinates: there, steps are 0.5 to 1 times those of "
        "fedavgm(lr=0.1, momentum=0.9)"
    )
    assert floor_note([0.02], server("fedams")) is None


def test_a_server_with_a_schedule_that_never_adapts_is_told_too() -> None:
    for spec in ("fedams(lr=cosine(1, 0))", "fedyogi(lr=warmup(2, 1), bias_correction=true)"):
        note = floor_note([0.0], server(spec))
        assert note is not None
        assert note.endswith("a fedavgm whose rate follows the server's schedule")
    assert floor_note([0.02], server("fedams(lr=cosine(1, 0))")) is None
    assert floor_note([None], server("fedavgm(lr=cosine(1, 0))")) is None, "it has no second moment"


# -- norms -------------------------------------------------------------------------------------------------------------


def test_norms_are_those_of_the_rows() -> None:
    delta, residual = vectors()
    left = round_of(compressor("sign"), delta, residual)
    rows, kept = delta.double().numpy(), left.residual
    assert kept is not None
    p = np.array(WEIGHTS) / sum(WEIGHTS)
    numbers = Probe.parse("norms").measure(left)
    assert numbers["update_norm"] == pytest.approx(np.sqrt(np.mean(np.sum(rows**2, 1))), rel=1e-6)
    assert numbers["mean_update_norm"] == pytest.approx(np.linalg.norm(p @ rows), rel=1e-6)
    assert numbers["residual_norm"] == pytest.approx(float(kept.double().square().sum(1).mean().sqrt()), rel=1e-6)


@pytest.mark.parametrize("clients", [2, 3, 5, 6])
def test_the_estimate_of_the_gradient_is_unbiased(clients: int) -> None:
    """Exactly: its mean over all cohorts of a population with fixed gradients is the norm of their mean."""
    gradients = 0.1 + torch.randn(6, LAYOUT.d, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    steps = torch.tensor([1.0, 3, 2, 4, 1, 5])[:, None]
    known = round_of(compressor("identity"), *vectors())
    found = []
    for cohort in itertools.combinations(range(6), clients):
        rows = -0.1 * (steps * gradients)[list(cohort)]
        taken = tuple(int(steps[i]) for i in cohort)
        facts = Facts(1, 0, cohort, (1,) * clients, taken, (1.0,) * clients, 0.1, population=6)
        left = dataclasses.replace(known, facts=facts, gram=rows @ rows.T)
        found.append(Probe.parse("norms").measure(left)["gradient_sq"])
    assert np.mean(found) == pytest.approx(float(gradients.mean(0).square().sum()), rel=1e-12)
    assert clients == 6 or np.std(found) > 0


def test_no_gradient_is_estimated_from_momentum_or_from_one_of_many() -> None:
    known = round_of(compressor("identity"), *vectors())
    moving = dataclasses.replace(known, method=Parts(local=local("sgd(momentum=0.9)")))
    assert "gradient_sq" not in Probe.parse("norms").measure(moving)
    one = dataclasses.replace(known, facts=known.facts.take([0]), gram=torch.ones(1, 1, dtype=torch.float64))
    assert "gradient_sq" not in Probe.parse("norms").measure(one)


@together("probe", ["norms", "q", "gamma"])
def test_rows_whose_squares_overflow_are_not_measured(probe: str) -> None:
    """A record refuses NaN, so a run would stop although its robust mean leaves such rows out."""
    rows = torch.randn(4, LAYOUT.d, generator=torch.Generator().manual_seed(1))
    rows[2] *= 1e25
    assert Probe.parse(probe).measure(round_of(compressor("sign"), rows, None)) == {}


@dataclass(frozen=True)
class Says(Probe):
    """Measures what it is told to."""

    what: dict[str, Any]

    name = "says"

    def __post_init__(self) -> None:
        """A field of a class in a test is no declared param."""

    def measure(self, left: Leftovers) -> dict[str, float]:
        return self.what


def test_numbers_of_any_library_are_recorded_as_plain_ones() -> None:
    measured = {"seven": np.float32(7), "eight": torch.tensor(8.0)}
    history = run(probes=[Says(measured)], rounds=1).run()
    assert json.loads(history.records[0].to_json())["seven"] == 7.0
    assert history.records[0].probes == {"seven": 7.0, "eight": 8.0}


def test_a_probe_cannot_change_what_the_record_says() -> None:
    with pytest.raises(SpecError, match="measures 'train_loss', which every record has already; rename it"):
        run(probes=[Says({"train_loss": 0.0})], rounds=1).run()
