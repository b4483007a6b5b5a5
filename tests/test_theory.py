"""Convergence theory: golden bounds, their limits, what they say about regimes, and measured rates below them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import fedcams
from fedcams.experiment import Experiment, build
from fedcams.experiment.assembly import assemble
from fedcams.layout import Layout
from fedcams.local import local
from fedcams.runs import read_run, run
from fedcams.tasks.logistic import Logistic
from fedcams.theory import Constants, Setting, paper, printed, printed_rate, proved, rates, sound, tight_rate
from fedcams.theory.check import check, may_leave
from fedcams.theory.constants import Instance, batch_factor, client_weights, constants_of
from fedcams.theory.describe import server_lr, setting_of
from fedcams.theory.steps import corollary, recommended

KNOWN = Constants(L=2, G=3, s_l=1.5, s_g=0.5, F=4, d=100)
RUN = Setting(m=20, n=20, K=5, T=1000, eta=0.5, eta_l=1e-3, eps=1e-2, beta1=0.9, beta2=0.99)
THEOREMS = {
    1: RUN,
    2: dataclasses.replace(RUN, n=4),
    3: dataclasses.replace(RUN, q=0.6, gamma=0.8),
    4: dataclasses.replace(RUN, n=4, q=0.6),
}
LOGISTIC = {
    "task": "logistic(dim=4, size=200)", "model": "linear(bias=false)", "clients": 8, "rounds": 20,
    "sampler": "uniform(n=4)", "local": "sgd(steps=2, batch=4, replace=true)", "engine": "loop",
}  # fmt: skip
RESULTS = Path(__file__).resolve().parents[1] / "results"


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "value", "rate", "tight", "proven"),
    [
        (1, 63.0847, 1.57931e-6, 2.35569e-4, 0.6874),
        (2, 130.433, 8.33524e-8, 6.34689e-5, 2.37878),
        (3, 103.026, 1.32451e-7, 9.77219e-5, 0.721263),
        (4, 551.019, 5.00948e-7, 1.34184e-3, 50.5057),
    ],
)
def test_golden_values(number: int, value: float, rate: float, tight: float, proven: float) -> None:
    """From an implementation of its own, which shares no line with this one."""
    run = THEOREMS[number]
    assert paper.theorem(run) == number
    assert printed(KNOWN, run).value == pytest.approx(value, rel=1e-5)
    assert printed_rate(KNOWN, run) == pytest.approx(rate, rel=1e-5)
    assert tight_rate(KNOWN, run) == pytest.approx(tight, rel=1e-5)
    assert sound(KNOWN, run).value == pytest.approx(proven, rel=1e-5)


@pytest.mark.parametrize("run", THEOREMS.values(), ids=str)
def test_the_tight_rate_is_the_root_of_its_condition(run: Setting) -> None:
    """η_l S(η_l) = A, with A as the theorem has it."""
    rate = tight_rate(KNOWN, run)
    limits = [run.eps / (run.K * paper._a(KNOWN, run))]
    if not run.full:
        limits = [limits[0] * 4 * 19 / (20 * 3), limits[0] * 4 * 19 / (17.64 * 16)]
    assert rate * paper.s_of(rate, KNOWN, run) == pytest.approx(min(limits), rel=1e-9)


def test_with_nearly_all_clients_the_conditions_are_those_of_all() -> None:
    many = dataclasses.replace(RUN, m=10**6, n=10**6)
    nearly = dataclasses.replace(many, n=10**6 - 1)
    assert tight_rate(KNOWN, nearly) == pytest.approx(tight_rate(KNOWN, many), rel=1e-5)
    assert 2 * sound(KNOWN, many).value == pytest.approx(sound(KNOWN, nearly).value, rel=1e-5)


def test_a_single_client_per_round_has_no_printed_rate_but_a_tight_one() -> None:
    run = dataclasses.replace(RUN, n=1)
    assert printed_rate(KNOWN, run) == 0
    assert tight_rate(KNOWN, run) > 0


def test_on_the_floor_the_proved_bound_is_that_of_sgd() -> None:
    """4F/(αT) + 10 K L² η_l² (σ_l² + 6Kσ_g²) + 4 c α L (1 + α L B²) σ_l²/(mK), c = 2."""
    alpha, L, K = RUN.alpha, KNOWN.L, RUN.K
    assert RUN.adaptivity(KNOWN) <= 1
    drift = 10 * K * L**2 * RUN.eta_l**2 * (KNOWN.s_l**2 + 6 * K * KNOWN.s_g**2)
    noise = 8 * alpha * L * (1 + alpha * L * 81) * KNOWN.s_l**2 / (RUN.m * K)
    assert sound(KNOWN, RUN).value == pytest.approx(4 * KNOWN.F / (alpha * RUN.T) + drift + noise, rel=1e-12)


@pytest.mark.parametrize("run", THEOREMS.values(), ids=str)
@pytest.mark.parametrize("bound", [printed, sound])
def test_worse_constants_make_worse_bounds(bound: Any, run: Setting) -> None:
    for name in ("L", "G", "s_l", "s_g", "F"):
        worse = dataclasses.replace(KNOWN, **{name: 2 * getattr(KNOWN, name)})
        assert bound(worse, run).value >= bound(KNOWN, run).value
    off = dataclasses.replace(run, eta_l=0.05)  # where v̂ leaves its floor
    assert bound(dataclasses.replace(KNOWN, d=200), off).value > bound(KNOWN, off).value
    assert bound(KNOWN, dataclasses.replace(run, T=2000)).value < bound(KNOWN, run).value


def test_eps_outside_the_maximum_has_no_hard_floor() -> None:
    """√v̂ + ε exceeds ε as soon as something moves, so Ψ is never zero."""
    outside = dataclasses.replace(RUN, inside=False)
    assert proved.largest_root(KNOWN, outside) == pytest.approx(0.1 + RUN.eta_l * RUN.K * KNOWN.G)
    assert sound(KNOWN, RUN).terms["memory"] == 0 < sound(KNOWN, outside).terms["memory"]


# -- regimes -----------------------------------------------------------------------------------------------------------

positive = st.floats(1e-3, 1e3)


@given(
    known=st.builds(Constants, positive, positive, positive, positive, positive, st.integers(1, 10**6)),
    m=st.integers(2, 100),
    share=st.floats(0, 1),
    K=st.integers(1, 100),
    eta=positive,
    eps=st.floats(1e-8, 1),
    beta1=st.sampled_from([0, 0.5, 0.9]),
    beta2=st.floats(0.5, 0.999),
    q=st.sampled_from([0, 0.3, 0.9]),
)
@settings(max_examples=300)
def test_the_printed_condition_keeps_the_server_on_its_floor(
    known: Constants, m: int, share: float, K: int, eta: float, eps: float, beta1: float, beta2: float, q: float
) -> None:
    """If √ε ≤ √β2 K a, as it is in practice, no update can be longer than √ε, decoded or not."""
    run = Setting(m, max(2, round(share * m)), K, 100, eta, 1.0, eps, beta1, beta2, q, gamma=0.5)
    run = dataclasses.replace(run, eta_l=printed_rate(known, run))
    if math.sqrt(eps) <= math.sqrt(beta2) * K * paper._a(known, run):
        longest = math.sqrt(paper._inflation(run)) * run.eta_l * K * known.G
        assert longest <= math.sqrt(eps) * (1 + 1e-9)
        assert run.adaptivity(known) <= 1 + 1e-9


def test_on_the_floor_fedams_trains_the_models_of_its_twin() -> None:
    base = {"rounds": 8, "seed": 2, "local": "sgd(lr=0.05, epochs=1)", "uplink": "sign", "clients": 30}
    server = Experiment(server="fedams(eps=1e-2, bias_correction=true)", **base).server
    states = []
    for chosen in (server, server.twin()):
        built = build(Experiment(server=chosen, **base))
        state = built.state
        for _ in range(8):
            state, record = built.simulation.advance_(state)
        states.append((state.x, record.probes))
    assert states[0][1]["off_floor"] == 0
    assert float((states[0][0] - states[1][0]).norm() / states[1][0].norm()) < 1e-5


@pytest.mark.parametrize(
    "server",
    [
        "fedams(eps=1e-4)",
        "fedams(eps=1e-4, bias_correction=true)",
        "fedamsgrad(eps=0.03, bias_correction=true)",  # divides ε by √(1-β2^t) too, so its floor rises
        "fedadam(eps=0.03, bias_correction=true)",
        "fedyogi(eps=0.01, bias_correction=true)",
        "fedadagrad(eps=0.001)",
        "fedams(lr=cosine(1, 0), eps=1e-4)",
    ],
)
def test_norms_of_updates_bound_the_coordinates_off_the_floor(server: str) -> None:
    built = build(Experiment.from_dict({**LOGISTIC, "server": server, "local": "sgd(lr=0.5, steps=2, batch=4)"}))
    state, records = built.state, []
    for _ in range(6):
        state, record = built.simulation.advance_(state)
        records.append(record)
    shares = [record.probes["off_floor"] or 0.0 for record in records]
    most = may_leave(records, Experiment(server=server).server, state.x.numel())
    assert most is not None
    assert 0 < max(shares) <= most


def test_a_floor_that_a_schedule_moves_has_no_such_bound() -> None:
    """With a falling ε, v̂ remembers the old floor, which is above the new one in every coordinate."""
    experiment = Experiment.from_dict({**LOGISTIC, "server": "fedams(eps=linear(1e-1, 1e-6))"})
    built = build(experiment)
    _, record = built.simulation.advance_(built.state)
    assert check(experiment, [record]).may_leave is None


@pytest.mark.parametrize(("folders", "most"), [("compression-*/fedams-s1", 200), ("*/*", 1000)])
def test_recorded_runs_on_cifar10_stay_on_their_floor(folders: str, most: int) -> None:
    """With the paper's settings, and with all others that have ε = 1e-3."""
    runs = [read_run(folder) for folder in sorted(RESULTS.glob(folders))]
    mine = [each for each in runs if each.experiment.task.name == "cifar10" and each.experiment.server.name == "fedams"]
    shown = [each for each in mine if float(each.experiment.server.eps) == 1e-3]  # type: ignore[attr-defined]
    assert len(shown) > 1
    d = 11_173_962  # any that is large enough: the bound on their number does not depend on it
    for each in shown:
        share = may_leave(each.records, each.experiment.server, d)
        assert share is not None
        assert share * d < most


# -- measured against proved -------------------------------------------------------------------------------------------


def admissible(draw: np.random.Generator) -> tuple[Experiment, Any, Constants, Setting]:
    """A random setting on logistic regression whose rates meet every condition of the proved bound."""
    m, K, batch = int(draw.integers(2, 7)), int(draw.integers(1, 4)), int(draw.integers(1, 5))
    uplink = str(draw.choice(["identity", "identity", "sign", "topk(ratio=1/2)"]))
    n = int(draw.integers(1, m)) if uplink != "identity" else int(draw.integers(1, m + 1))  # γ is for all clients only
    beta1, eps = draw.choice([0, 0.5, 0.9]), draw.choice([1e-3, 1e-1])
    keys = {
        "task": f"logistic(dim=5, size=60, seed={draw.integers(100)})", "model": "linear(bias=false)", "clients": m,
        "partition": str(draw.choice(["iid", "shards"])), "sampler": f"uniform(n={n})", "uplink": uplink,
        "local": f"sgd(lr=1e-3, steps={K}, batch={batch}, replace=true)", "rounds": 12, "probes": "",
        "engine": "loop", "evaluate_every": 1000, "server": f"fedams(beta1={beta1}, eps={eps})",
    }  # fmt: skip
    experiment = Experiment.from_dict(keys)
    known = check(experiment)
    best = recommended(known.constants, known.run).run
    lr, local = best.eta * draw.uniform(0.2, 1), best.eta_l * draw.uniform(0.2, 1)
    keys["server"] = f"fedams(lr={lr:.12g}, beta1={beta1}, eps={eps})"
    keys["local"] = f"sgd(lr={local:.12g}, steps={K}, batch={batch}, replace=true)"
    run = dataclasses.replace(known.run, eta=lr, eta_l=local)
    experiment = Experiment.from_dict(keys)
    return experiment, experiment.task.load(), known.constants, run


@pytest.mark.parametrize("seed", range(20))
def test_the_average_is_below_the_proved_bound(seed: int) -> None:
    """On logistic regression every assumption holds, so the bound is a theorem there."""
    experiment, data, known, run = admissible(np.random.default_rng(seed))
    bound, task = sound(known, run), experiment.task
    assert bound.admissible
    assert isinstance(task, Logistic)
    built = assemble(experiment, data)
    state, norms = built.state, []
    weights = client_weights(built.simulation.problem, len(data.train_y)).float()
    for _ in range(experiment.rounds):
        norms.append(float((weights @ task.gradients(data, state.x.view(task.classes, task.dim))).square().sum()))
        state, _ = built.simulation.advance_(state)
    assert 0 < np.mean(norms) <= bound.value


def test_gamma_grows_as_the_gradient_falls() -> None:
    """γ ‖∇f‖ stays within a factor of 2 while ‖∇f‖ falls by two decades: clients differ at the minimum too."""
    trial = rates.Trial(T=400, K=1, m=8, uplink="sign", sigma_l=0, sigma_g=0.2, dim=64, rate=40.0, condition=2)
    experiment = dataclasses.replace(trial.experiment, probes="gamma")
    built = build(experiment)
    state, found = built.state, []
    curvature = experiment.task.curvature().double()  # type: ignore[attr-defined]
    for _ in range(400):
        norm = float((curvature * (state.x.double() - 1)).norm())
        state, record = built.simulation.advance_(state)
        found.append((norm, record.probes["gamma"] * norm))  # type: ignore[operator]
    assert found[-1][0] < found[5][0] / 100
    products = np.array([product for _, product in found[5:]])  # of single rounds they vary more
    means = [float(block.mean()) for block in np.array_split(products, 15)]
    assert max(means) / min(means) < 2


# -- constants and steps -----------------------------------------------------------------------------------------------


def instance(**keys: Any) -> Instance:
    experiment = Experiment.from_dict({"engine": "loop", **keys})
    data = experiment.task.load()
    built = assemble(experiment, data)
    return Instance(experiment, built.simulation.problem, data, built.state.x)


def test_constants_of_a_quadratic_are_exact() -> None:
    task = "quadratic(dim=6, groups=5, size=20, smoothness=3, sigma_l=2, sigma_g=0.5)"
    local = {"local": "sgd(steps=2, batch=4, replace=true)", "clients": 5, "sampler": "full"}
    one = instance(task=task, model="point", partition="natural", **local)
    known = constants_of(one)
    assert (known.L, known.d) == (3, 6)
    assert known.s_l == pytest.approx(1, rel=1e-5)  # 2/√4
    assert known.s_g == pytest.approx(0.5, rel=1e-5)
    curvature = one.experiment.task.curvature()  # type: ignore[attr-defined]
    assert pytest.approx(0.5 * float(curvature.sum()), rel=1e-5) == known.F  # from 0 to 1
    gradients = one.experiment.task.gradients(one.data, one.x)  # type: ignore[attr-defined]
    assert float(gradients.norm(dim=1).max()) <= known.G


def test_the_noise_of_unequal_clients_is_that_of_the_noisiest() -> None:
    """The client with the smallest batch need not be the one whose examples vary most."""
    task = "quadratic(dim=3, groups=5, size=20, sigma_g=3)"
    keys = {"partition": "dirichlet(alpha=0.3)", "clients": 6, "sampler": "full"}
    one = instance(task=task, model="point", local="sgd(steps=2, batch=4)", **keys)
    gradients = one.experiment.task.gradients(one.data, one.x).double().numpy()  # type: ignore[attr-defined]
    parts, exact = one.problem.clients.parts, []  # type: ignore[attr-defined]
    for rows in parts:
        own, b = gradients[rows], min(4, len(rows))
        variance = ((own - own.mean(0)) ** 2).sum(1).mean()
        exact.append(variance / b * ((len(rows) - b) / (len(rows) - 1) if len(rows) > 1 else 0))
    assert constants_of(one).s_l == pytest.approx(math.sqrt(max(exact)), rel=1e-5)


def test_the_gap_of_logistic_regression_is_that_to_its_minimum() -> None:
    one = instance(task="logistic(dim=4, size=80)", model="linear(bias=false)", clients=4, sampler="full")
    gap = constants_of(one).F
    x, y = one.data.train_x.double(), one.data.train_y
    w = one.x.double().view(2, 4).clone()
    first = float(torch.nn.functional.cross_entropy(x @ w.T, y))
    for _ in range(4000):  # plain gradient descent at the rate 1/L
        w -= 2 * ((x @ w.T).softmax(-1) - torch.nn.functional.one_hot(y, 2)).T @ x / len(y)
    assert gap == pytest.approx(first - float(torch.nn.functional.cross_entropy(x @ w.T, y)), rel=1e-4)


def test_measured_constants_are_near_the_known_ones() -> None:
    """What is estimated for any task, on one whose constants are known: at most those, and not far below."""
    from fedcams.theory.constants import _measured

    task = "quadratic(dim=6, groups=8, size=200, smoothness=3, sigma_l=2, sigma_g=0.5)"
    one = instance(task=task, model="point", partition="natural", clients=8, local="sgd(batch=4)", sampler="full")
    exact, found = constants_of(one), _measured(one)
    assert pytest.approx(3, rel=0.05) == found.L
    assert found.s_g == pytest.approx(exact.s_g, rel=0.01)
    assert 0.6 * exact.s_l < found.s_l < 1.7 * exact.s_l
    assert found.G <= exact.G


def test_recommended_steps_are_admissible_and_best() -> None:
    known = Constants(L=0.5, G=1.4, s_l=0.5, s_g=1.4, F=0.5, d=40)
    for n, q, T in ((20, 0.0, 20000), (5, 0.0, 20000), (5, 0.5, 20000), (5, 0.99, 1000)):
        run = Setting(m=20, n=n, K=4, T=T, eta=1, eta_l=1, eps=1e-3, beta1=0.9, q=q)
        best = recommended(known, run)
        assert best.bound.admissible
        assert best.run.adaptivity(known) <= 1 + 1e-9
        assert best.bound.value < corollary(known, run).bound.value
        for factor in (0.5, 0.99, 1.01, 2):
            other = sound(known, dataclasses.replace(best.run, eta=factor * best.run.eta))
            assert other.value > best.bound.value or not other.admissible


def test_recommended_steps_do_not_pay_for_weights_that_change() -> None:
    """Where ε is added to the root, v̂ always counts; a shorter local rate makes it as cheap as with a hard floor."""
    known = Constants(L=0.5, G=1.4, s_l=0.5, s_g=1.4, F=0.5, d=40)
    run = Setting(m=20, n=5, K=4, T=1000, eta=1, eta_l=1, eps=1e-2, beta1=0.9, q=0.9)
    floor, soft = (recommended(known, dataclasses.replace(run, inside=inside)).bound for inside in (True, False))
    assert soft.admissible
    assert floor.value < soft.value < 1.2 * floor.value


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("s_l", "s_g", "n"), [(0.5, 1.4, 5), (0.5, 1.4, 20), (0, 1.4, 20), (0, 0, 20)])
@pytest.mark.parametrize("eps", [1e-3, 4e-2])
def test_no_rates_have_a_much_lower_bound(inside: bool, s_l: float, s_g: float, n: int, eps: float) -> None:
    """With all clients and exact gradients too, where drift is the only term that the number of rounds cannot lower."""
    known = Constants(L=1, G=1, s_l=s_l, s_g=s_g, F=0.5, d=1)
    for T in (1, 10**6):
        best = recommended(known, Setting(m=20, n=n, K=1, T=T, eta=1, eta_l=1, eps=eps, inside=inside))
        assert best.bound.admissible
        draw = np.random.default_rng(1)
        for eta, eta_l in 10 ** draw.uniform((-3, -4), (3, 1), (300, 2)):
            other = dataclasses.replace(best.run, eta=best.run.eta * eta, eta_l=best.run.eta_l * eta_l)
            bound = sound(known, other)
            assert not bound.admissible or bound.value > 0.75 * best.bound.value


@pytest.mark.parametrize(
    "spec", ["fedavg(lr={})", "fedavgm(lr={}, momentum=0.8)", "fedams(lr={}, eps=1e-2)", "fedadam(lr={})"]
)
def test_a_recommended_rate_is_the_lr_of_its_server(spec: str) -> None:
    """The setting of a server with that lr has the rate η that the bound recommends."""
    one = Experiment.from_dict({**LOGISTIC, "server": spec.format(1)})
    found = check(one)
    eta = recommended(found.constants, found.run).run.eta
    again = check(Experiment.from_dict({**LOGISTIC, "server": spec.format(server_lr(one.server, eta))}))
    assert again.run.eta == pytest.approx(eta, rel=1e-9)


def test_the_smallest_batch_of_a_round_is_the_noisiest() -> None:
    """Ten examples in batches of four: 4, 4 and 2."""
    assert batch_factor(local("sgd(epochs=1, batch=4, replace=true)"), 10) == 1 / 2
    assert batch_factor(local("sgd(steps=2, batch=4, replace=true)"), 10) == 1 / 4
    assert batch_factor(local("sgd(steps=2, batch=4)"), 10) == pytest.approx((1 - 3 / 9) / 4)
    assert batch_factor(local("sgd(steps=2, batch=20, replace=true)"), 10) == 1 / 10
    assert batch_factor(local("sgd(steps=2, batch=20)"), 10) == 0


def test_measured_noise_is_that_of_draws_with_replacement() -> None:
    """A batch as large as a client's data varies if it is drawn with replacement, and only then."""
    from fedcams.theory.constants import _measured

    task = "quadratic(dim=6, groups=8, size=10, smoothness=3, sigma_l=2)"
    keys = {"task": task, "model": "point", "partition": "natural", "clients": 8, "sampler": "full"}
    fresh, whole = (
        _measured(instance(local=f"sgd(steps=2, batch=20, replace={flag})", **keys)).s_l for flag in ("true", "false")
    )
    assert fresh == pytest.approx(2 / 10**0.5, rel=0.5)
    assert whole < 1e-6


UNEVEN = {"partition": "dirichlet(alpha=0.3)"}


@pytest.mark.parametrize(
    ("server", "more", "regime"),
    [
        ("fedams(eps=0.1)", {}, "floor: v̂ can never leave it"),
        ("fedamsgrad(eps=0.1)", {}, "floor: √v̂ never exceeds ε, so steps are 1/(1 + u) to 1 times"),
        ("fedams(eps=0.1)", {"local": "adamw(lr=1e-3, steps=2)"}, "probably floor: u ≤ 1, but not all"),
        ("fedams(eps=1e-6)", {}, "open: u > 1"),
        ("fedadagrad(eps=0.5)", {"rounds": 100}, "open: v̂ adds up all updates"),
        ("fedavg", {}, "not adaptive"),
    ],
)
def test_a_regime_is_certain_only_where_it_is_proven(server: str, more: dict[str, str], regime: str) -> None:
    assert check(Experiment.from_dict({**LOGISTIC, "server": server, **more})).regime.startswith(regime)


def test_what_a_run_recorded_wins_over_what_constants_suggest() -> None:
    experiment = Experiment.from_dict({**LOGISTIC, "server": "fedams(eps=0.1)"})
    _, record = build(experiment).simulation.advance_(build(experiment).state)
    left = dataclasses.replace(record, probes={**record.probes, "off_floor": 0.2})
    assert check(experiment, [left]).regime.startswith("mixed, as measured: v̂ left its floor in at most 20%")


def test_what_a_run_measured_or_refused_is_named() -> None:
    experiment = Experiment.from_dict({**LOGISTIC, "sampler": "full", "uplink": "sign", "probes": "q + gamma"})
    built = build(experiment)
    _, record = built.simulation.advance_(built.state)
    found = check(experiment, [dataclasses.replace(record, refused={3: "too long"})])
    assert "fixed n: the server refused updates in 1 of 1 rounds" in found.fails
    assert f"a proven γ: the bound uses the largest measured, {record.probes['gamma']:.4g}" in found.fails
    assert found.run.q == pytest.approx(record.probes["q_max"])


def test_only_compressors_that_never_lengthen_count_so() -> None:
    for uplink, shrinks in (("topk(k=1)", True), ("topk(k=1, values=bf16)", False), ("blockq", False)):
        experiment = Experiment.from_dict({**LOGISTIC, "uplink": uplink})
        assert setting_of(experiment, [25] * 8, Layout.flat(8)).shrinks == shrinks, uplink


# -- commands ----------------------------------------------------------------------------------------------------------


def invoke(*words: str) -> str:
    result = fedcams("theory", *words)
    assert result.exit_code == 0, result.output
    return result.output


UNCOVERED = """
task = "logistic(dim=4, size=200)"
model = "linear(bias=false)"
clients = 8
rounds = 20
partition = "dirichlet(alpha=0.3)"
local = "sgd(epochs=1, batch=4)"
sampler = "bernoulli(p=0.5)"
weighting = "examples"
server = "fedadam(lr=cosine(0.1, 0))"
uplink = "sign"
"""


def test_settings_that_no_theorem_covers_say_why_and_go_on(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(UNCOVERED)
    (found,) = json.loads(invoke("check", str(tmp_path / "own.toml"), "--json"))
    said = "\n".join(found["fails"])
    for reason in ("equal K", "fixed n", "uniform mean", "fresh examples", "constant rates", "second moment"):
        assert reason in said
    assert all(bound["value"] > 0 for bound in found["bounds"])
    text = invoke("check", str(tmp_path / "own.toml"))
    assert "does not hold: fixed n: cohorts of bernoulli(p=0.5) vary in size" in text
    assert f"theorem 4, n/m = 4/8, K = {found['run']['K']}, T = 20, q = 0.935414\n" in text  # √(1 - 1/d)


def test_batch_normalisation_is_named() -> None:
    keys = {"task": "digits", "model": "convmixer(dim=4, depth=1)", "clients": 5, "sampler": "full", "rounds": 2}
    assert any("batch normalisation" in fail for fail in check(Experiment.from_dict(keys)).fails)


def test_what_else_no_theorem_covers_is_named() -> None:
    noise = {"privacy": "server(clip=0.3, noise=1)", "sampler": "bernoulli(p=0.5)", "guard": "none"}
    for keys, reason in (
        (noise, "updates as trained: privacy=server("),
        ({"downlink": "replica(blockq(bits=4))"}, "clients that start from x"),
        ({**UNEVEN, "sampler": "systematic(n=5)", "weighting": "sampler"}, "uniform cohorts: systematic(n=5) draws"),
        ({**UNEVEN, "weighting": "examples"}, "uniform mean: weighting=examples"),
        ({"uplink": "topk(k=2)", "feedback": False}, "error feedback with q < 1: uplink=topk(k=2), feedback=false"),
        ({"uplink": "randk(ratio=1/4)"}, "a certain q < 1: that of randk(ratio=1/4) holds in expectation only"),
        ({"server": "fedams(lr=cosine(1, 0))"}, "a schedule sets server.lr; the bound uses the values of round 1"),
    ):
        found = check(Experiment.from_dict({**LOGISTIC, **keys}))
        assert any(reason in fail for fail in found.fails), reason


def test_clients_of_equal_size_have_equal_weights() -> None:
    for keys in ({"sampler": "systematic(n=5)", "weighting": "sampler"}, {"weighting": "examples"}):
        assert not check(Experiment.from_dict({**LOGISTIC, **keys})).fails


def test_constants_that_were_measured_are_not_taken_for_proven() -> None:
    measured = check(Experiment.from_dict({"task": "digits", "clients": 5, "sampler": "full", "rounds": 2})).fails
    assert any(fail.startswith("known constants: those of digits are measured") for fail in measured)
    assert not check(Experiment.from_dict(LOGISTIC)).fails


@pytest.mark.parametrize("model", ["linear", "mlp(hidden=6)"])
def test_constants_are_exact_only_for_the_model_of_their_task(model: str) -> None:
    """A bias is one more feature, of 1: the Hessian of an example has the norm ½ (‖x‖² + 1), not ½."""
    found = check(Experiment.from_dict({**LOGISTIC, "model": model, "partition": "iid"}))
    assert any("those of logistic(dim=4, size=200) are measured" in fail for fail in found.fails)
    assert found.constants.how["L"].startswith("lower bound")
    points = {"task": "quadratic(dim=8, groups=8)", "model": model, "partition": "natural", "clients": 8}
    assert check(Experiment.from_dict({**points, "sampler": "full"})).constants.how["L"].startswith("lower bound")


def test_only_several_steps_without_replacement_lack_fresh_examples() -> None:
    """One batch per round is drawn afresh; the variance of its mean counts that it is without replacement."""
    for rule, stale in (("sgd(steps=1, batch=4)", False), ("sgd(steps=2, batch=1)", True), ("sgd(epochs=1)", True)):
        fails = check(Experiment.from_dict({**LOGISTIC, "local": rule})).fails
        assert any("fresh examples" in fail for fail in fails) == stale, rule


def test_checks_come_in_the_order_of_their_file(tmp_path: Path) -> None:
    runs = "".join(f"[[run]]\nlabel = '{label}'\n" for label in ("first", "second"))
    (tmp_path / "own.toml").write_text(f"{UNCOVERED}\nseeds = [1, 2]\n{runs}")
    found = json.loads(invoke("check", str(tmp_path / "own.toml"), "--json"))
    assert [each["label"] for each in found] == ["first", "second"]


def test_only_applies_to_a_run_too(tmp_path: Path) -> None:
    run(Experiment(label="mine", task="quadratic", model="point", clients=2, sampler="full", rounds=1), tmp_path / "a")
    assert "mine: theorem" in invoke("check", str(tmp_path / "a"), "--only", "mine")
    assert fedcams("theory", "check", str(tmp_path / "a"), "--only", "yours").exit_code == 2


def test_steps_are_printed_with_the_corollaries() -> None:
    text = invoke("steps", "-T", "100", "-K", "2", "-n", "4", "-m", "4", "--batch", "5", "--task", "logistic(size=40)")
    assert "recommended" in text
    assert "corollary" in text
    assert "hold" in text
