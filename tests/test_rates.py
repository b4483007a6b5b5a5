"""Rates: the package's rounds and the float64 oracle agree, model by model and in their slopes."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from itertools import islice, repeat
from typing import Any

import numpy as np
import pytest

import oracle as plain
from command_line import fedcams
from fedcams.experiment import Experiment, build
from fedcams.tasks.quadratic import Quadratic
from fedcams.theory import rates
from fedcams.theory.check import check
from theory_page import grid, oracle

SEEDS, CLIENTS, D, K = 2, 5, 32, 3
COMPRESSORS = {"identity": None, "sign": oracle.scaled_sign, "topk(ratio=1/8)": partial(oracle.topk, ratio="1/8")}


@pytest.mark.parametrize("uplink", COMPRESSORS)
@pytest.mark.parametrize("nonconvex", [False, True])
def test_several_seeds_at_once_are_each_the_plain_algorithm(uplink: str, nonconvex: bool) -> None:
    draw = [np.random.default_rng(seed) for seed in range(SEEDS)]
    problem = oracle.problem(draw, D, CLIENTS, s_g=2.0, nonconvex=nonconvex)
    cohorts = list(islice(oracle.random_cohorts(draw, CLIENTS, 2), 20))
    noise = list(islice(oracle.random_signs(draw, (K, 2, D), 3.0), 20))
    rule = {"lr": 0.05, "beta1": 0.9, "eps": 1e-4}
    found = list(
        oracle.fedcams(
            problem, cohorts, noise, 0.1, partial(oracle.fedams, oracle.Memory(), **rule), COMPRESSORS[uplink]
        )
    )
    for seed in range(SEEDS):

        def update(t: int, i: int, x: Any, seed: int = seed) -> Any:
            place = cohorts[t - 1][seed].tolist().index(i)
            w = x
            for k in range(K):
                w = w - 0.1 * (problem.gradient(w) + problem.tilt[seed, i] + noise[t - 1][seed, k, place])
            return w - x

        mine = [cohort[seed].tolist() for cohort in cohorts]
        step = partial(oracle.fedams, **rule)
        xs = plain.fedcams(problem.start[seed], update, mine, step, COMPRESSORS[uplink])
        assert np.allclose(np.stack(found)[1:, seed], xs[:-1], rtol=1e-10, atol=1e-12)


def test_problems_are_what_they_are_asked_to_be() -> None:
    draw = [np.random.default_rng(seed) for seed in range(3)]
    for nonconvex in (False, True):
        problem = oracle.problem(draw, D, CLIENTS, s_g=2.0, gap=1.5, condition=10, nonconvex=nonconvex)
        assert problem.value(problem.start) == pytest.approx(1.5)
        assert np.allclose(problem.tilt.mean(1), 0)
        assert np.square(problem.tilt).sum(-1).mean(-1) == pytest.approx(4.0)
        nudge = 1e-6 * np.eye(D)
        slopes = (problem.value(problem.start[0] + nudge) - problem.value(problem.start[0] - nudge)) / 2e-6
        assert np.allclose(problem.gradient(problem.start[0]), slopes, atol=1e-8)
    lengths = np.linalg.norm(next(oracle.random_signs(draw, (K, CLIENTS, D), 3.0)), axis=-1)
    assert lengths.shape == (3, K, CLIENTS)
    assert np.allclose(lengths, 3.0)


# -- the package -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uplink", COMPRESSORS)
@pytest.mark.parametrize("cohort", [3, 8])
@pytest.mark.parametrize("eps", [1e-2, 1e-6])
def test_the_package_follows_the_oracle(uplink: str, cohort: int, eps: float) -> None:
    """Clients that differ, exact gradients, momentum, and v̂ on its floor or off it: every model of every round."""
    experiment = Experiment.from_dict({
        "task": f"quadratic(dim={D}, groups=8, size=2, sigma_l=0, sigma_g=2, seed=3)", "model": "point",
        "partition": "natural", "clients": 8, "sampler": f"uniform(n={cohort})", "uplink": uplink, "probes": "floor",
        "local": f"sgd(lr=0.05, steps={K}, batch=1, replace=true)", "rounds": 40, "evaluate_every": 10**9,
        "server": f"fedams(lr=0.02, eps={eps}, beta1=0.9)", "engine": "stacked", "guard": "none",
    })  # fmt: skip
    built = build(experiment)
    state, cohorts, models = built.state, [], [built.state.x.double().numpy()]
    for _ in range(experiment.rounds):
        state, record = built.simulation.advance_(state)
        cohorts.append(np.array([record.cohort]))
        models.append(state.x.double().numpy())
    off = record.probes["off_floor"]
    assert off == 0 if eps == 1e-2 else off == 1
    step = partial(oracle.fedams, oracle.Memory(), lr=0.02, beta1=0.9, eps=eps)
    still = repeat(np.zeros((1, K, cohort, D)))
    expected = oracle.fedcams(shifted(experiment.task, models[0]), cohorts, still, 0.05, step, COMPRESSORS[uplink])
    for ours, theirs in zip(models, expected, strict=False):
        assert np.linalg.norm(ours - 1 - theirs[0]) <= 1e-6 * np.linalg.norm(ours)
    assert np.linalg.norm(ours - models[0]) > 0.5, "it has moved"


def shifted(task: Any, start: Any) -> oracle.Problem:
    """The package's quadratic with its minimum moved from 1 to 0."""
    assert isinstance(task, Quadratic)
    data, curvature = task.load(), task.curvature().double().numpy()
    centres = data.train_x.double().numpy().reshape(task.groups, task.size, task.dim).mean(1)
    return oracle.Problem(curvature, (curvature * (1 - centres))[None], (start - 1)[None])


def test_slopes_are_minus_one_half_as_those_of_the_oracle() -> None:
    """Against rounds, local steps and clients, through the package's own rounds (β1 = 0, no compression)."""
    ends = {"T": (64, 256), "K": (1, 4), "m": (2, 8)}  # what lies between fits the same line
    found = list(rates.sweep(rates.BASE["quick"], ends))
    assert all(each.off_floor == 0 for _, each in found)
    row = grid.Row("", dataclasses.replace(grid.PACKAGE, T=rates.BASE["quick"].T), ends)
    same = {case: grid.measure(case, seeds=(1, 2)) for axis in ends for case in row.cases(axis)}
    for axis, (fitted,) in rates.slopes(found).items():
        assert fitted == pytest.approx(-0.5, abs=0.06), axis
        assert fitted == pytest.approx(grid.fit(same, row, axis).mean, abs=0.05), axis


def test_the_oracle_knows_the_packages_problem() -> None:
    trial, case = rates.BASE["full"], grid.PACKAGE
    checked = check(trial.experiment)
    known, run = checked.constants, checked.run
    assert (known.L, known.s_g, known.d) == pytest.approx((1, 0, case.d), abs=1e-6)
    assert (known.s_l, known.F) == pytest.approx((case.s_l, case.gap), rel=1e-5)
    assert (run.T, run.K, run.m, run.n) == (case.T, case.K, case.m, case.cohort)
    assert (run.eta, run.eta_l, run.eps) == pytest.approx((case.eta, case.eta_l, case.eps))
    assert {axis: list(values) for axis, values in rates.FULL.items()} == {
        axis: list(values) for axis, values in grid.ROWS[-1].axes.items()
    }


# -- the command -------------------------------------------------------------------------------------------------------


def test_a_power_law_has_its_exponent_for_every_seed() -> None:
    def found(axis: str, value: int, seed: int) -> tuple[str, rates.Measured]:
        changed: dict[str, Any] = {axis: value, "seed": seed}
        return axis, rates.Measured(rates.Trial(**changed), 3.0 * value**-0.5 * seed, value ** (-seed / 10), 0.0)

    runs = [found(axis, value, seed) for axis in "Tm" for value in (2, 8, 32) for seed in (4, 7)]
    assert rates.slopes(runs) == {axis: pytest.approx([-0.5, -0.5]) for axis in "Tm"}
    assert rates.slopes(runs, late=True) == {axis: pytest.approx([-0.4, -0.7]) for axis in "Tm"}
    kept = {"axis": "m", "value": 8, "seed": 4, "average": runs[8][1].average, "late": 8**-0.4, "off_floor": 0.0}
    assert rates.points(runs)[8] == kept


def test_a_number_of_seeds_that_cannot_be_run_is_refused() -> None:
    result = fedcams("theory", "rates", "--seeds", "0")
    assert result.exit_code == 2
    assert "Invalid value for '--seeds': 0 is not in the range x>=1" in result.output


@pytest.mark.slow
def test_the_command_shows_the_deviation_over_seeds() -> None:
    text = fedcams("theory", "rates", "--quick", "--seeds", "2").stdout
    for axis in "TKm":
        (line,) = [words for words in map(str.split, text.splitlines()) if words[:1] == [axis]]
        mean, _, deviation = line[1:4]
        assert float(mean) == pytest.approx(-0.5, abs=0.06)
        assert 0 < float(deviation) < 0.05
    assert "mean ± standard deviation over 2 seeds" in text
    found = json.loads(fedcams("theory", "rates", "--quick", "--json").stdout)
    assert len(found["points"]) == sum(map(len, rates.QUICK.values()))
    assert {name: {len(fits) for fits in each.values()} for name, each in found["slopes"].items()} == {
        "average": {1},
        "late": {1},
    }
