"""Constants of the theorems measured during a run: their values, unchanged training, resumption, `theory check`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedcams
from command_line import fedcams as command
from fedcams.durable import sealed
from fedcams.engines import Problem
from fedcams.errors import SpecError
from fedcams.experiment import Experiment, build
from fedcams.experiment.assembly import assemble
from fedcams.local import local
from fedcams.runs import RunError, extend, read_run, resume, run
from fedcams.tasks import Task, TaskData
from fedcams.tasks.logistic import Logistic
from fedcams.tasks.quadratic import Quadratic
from fedcams.theory.check import check
from fedcams.theory.constants import Instance, client_weights, constants_of
from fedcams.theory.gradients import Point
from fedcams.theory.measure import Measured, measure
from test_runs import (
    MIXER,
    _digits_once,  # noqa: F401  (a fixture)
    _quick_sync,  # noqa: F401  (a fixture)
    small,
    stopped,
)

FILE = "theory.jsonl"
NORMED = {**MIXER, "local": "sgd(lr=0.1, steps=1, batch=128)"}  # large batches, so that measuring takes few of them


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


# -- what is measured --------------------------------------------------------------------------------------------------

QUADRATIC = {
    "task": "quadratic(dim=6, groups=8, size=40, smoothness=3, condition=2, sigma_l=2, sigma_g=0.5)", "model": "point",
    "partition": "natural", "clients": 8, "sampler": "uniform(n=4)", "rounds": 7, "engine": "loop",
    "local": "sgd(lr=0.02, steps=2, batch=4, replace=true)", "server": "fedams(lr=0.3, eps=0.1)",
}  # fmt: skip
LOGISTIC = {
    **QUADRATIC, "task": "logistic(dim=4, size=200)", "model": "linear(bias=false)", "partition": "shards",
}  # fmt: skip


def states(experiment: Experiment) -> tuple[Instance, TaskData, list[Tensor]]:
    """Return the problem of an experiment, its data, and the models before each of its rounds and after the last."""
    data = experiment.task.load()
    built = assemble(experiment, data)
    instance = Instance(experiment, built.simulation.problem, data, built.state.x.clone())
    state, models = built.state, [built.state.x.clone()]
    for _ in range(experiment.rounds):
        state, _ = built.simulation.advance_(state)
        models.append(state.x.clone())
    return instance, data, models


def all_gradients(task: Task, data: TaskData, x: Tensor) -> Tensor:
    """Return the gradient of every example, in closed form."""
    assert isinstance(task, Quadratic | Logistic)
    return task.gradients(data, x.view(task.classes, task.dim) if isinstance(task, Logistic) else x)


@pytest.mark.parametrize("keys", [QUADRATIC, LOGISTIC], ids=["quadratic", "logistic"])
def test_measured_constants_are_within_the_exact_ones(folder: Path, keys: dict[str, Any]) -> None:
    experiment = Experiment.from_dict({**keys, "theory_every": 3})
    found = run(experiment, folder).measured
    one, data, models = states(experiment)
    exact, weights = constants_of(one), client_weights(one.problem, len(data.train_y)).float()
    assert [line.round for line in found] == [1, 3, 6, 7]
    for line in found:
        at = models[line.round - 1]
        full = weights @ all_gradients(experiment.task, data, at)
        assert line.gradient_sq == pytest.approx(float(full.square().sum()), rel=1e-4)
        assert line.gradient_sq_of_all == line.gradient_sq, "all 8 clients are measured"
        assert (line.clients, line.population, line.missing) == (8, 8, {})
        assert None not in (line.L_secant, line.L_power, line.G, line.G_inf, line.s_l, line.s_l_mean, line.s_g)
        assert 0 < line.L_secant <= exact.L * (1 + 1e-3)  # type: ignore[operator]
        assert 0 < line.L_power <= exact.L * (1 + 1e-5)  # type: ignore[operator]
        assert 0 < line.G_inf <= line.G <= exact.G  # type: ignore[operator]
        assert 0 < line.s_l_mean <= line.s_l <= 1.7 * exact.s_l  # type: ignore[operator]
        assert 0 < line.s_g <= exact.s_g * (1 + 1e-4)  # type: ignore[operator]


def test_on_a_quadratic_measured_constants_are_close_to_the_exact_ones(folder: Path) -> None:
    experiment = Experiment.from_dict({**QUADRATIC, "theory_every": 3})
    found = run(experiment, folder).measured
    one, _, models = states(experiment)
    exact = constants_of(one)
    curvature = experiment.task.curvature()  # type: ignore[attr-defined]
    for line in found:
        before, after = models[line.round - 1], models[line.round]
        step = after - before
        assert line.L_power == pytest.approx(3, rel=0.1)  # ten products of power iteration do not reach it
        assert line.L_secant == pytest.approx(float((curvature * step).norm() / step.norm()), rel=1e-3)
        assert line.s_g == pytest.approx(exact.s_g, rel=1e-3)
        assert line.s_l_mean == pytest.approx(exact.s_l, rel=0.3)
    first = found[0].loss
    assert first is not None
    inf = first - exact.F
    for line in found:
        gap = 0.5 * float((curvature * (models[line.round - 1] - 1).square()).sum())
        assert line.loss == pytest.approx(inf + gap, rel=1e-3)


def test_secant_and_loss_are_those_of_the_gradients_on_logistic_regression(folder: Path) -> None:
    experiment = Experiment.from_dict({**LOGISTIC, "theory_every": 7})
    first = run(experiment, folder).measured[0]
    one, data, models = states(experiment)
    grads = [all_gradients(experiment.task, data, x) for x in models[:2]]
    parts = [torch.from_numpy(part) for part in one.problem.clients.parts]  # type: ignore[attr-defined]
    changes = [float((grads[1][rows].mean(0) - grads[0][rows].mean(0)).norm()) for rows in parts]
    assert first.L_secant == pytest.approx(max(changes) / float((models[1] - models[0]).norm()), rel=1e-3)
    losses = nn.functional.cross_entropy(data.train_x @ models[0].view(2, 4).T, data.train_y, reduction="none")
    assert first.loss == pytest.approx(float(np.mean([float(losses[rows].mean()) for rows in parts])), rel=1e-5)


def test_the_first_line_is_what_a_check_measures_at_the_start(folder: Path) -> None:
    experiment = small(theory_every=7, clients=14)
    first = run(experiment, folder).measured[0]
    now = check(experiment).constants
    assert (first.L_power, first.G, first.s_l, first.s_g, first.loss) == (now.L, now.G, now.s_l, now.s_g, now.F)


def test_the_estimate_for_all_clients_is_unbiased() -> None:
    """Over all cohorts of 3 of 6 clients, it is ‖∇f‖² on average; that of the measured clients is longer."""
    rows = np.random.default_rng(1).normal(size=(6, 4)) + 1
    estimates, raw = [], []
    for chosen in itertools.combinations(rows, 3):
        mean = np.mean(chosen, 0)
        spread = float(np.mean(np.sum((np.array(chosen) - mean) ** 2, 1)))
        line = Measured(1, 3, 6, s_g=spread**0.5, gradient_sq=float(mean @ mean))
        estimates.append(line.gradient_sq_of_all)
        raw.append(line.gradient_sq)
    truth = float(rows.mean(0) @ rows.mean(0))
    assert np.mean(estimates) == pytest.approx(truth, rel=1e-12)  # type: ignore[arg-type]
    assert np.mean(raw) > 1.05 * truth  # type: ignore[arg-type]
    assert Measured(1, 1, 6, s_g=0.0, gradient_sq=1.0).gradient_sq_of_all is None
    assert Measured(1, 3, 6, gradient_sq=1.0).gradient_sq_of_all is None, "without s_g, its bias is not known"


def test_differences_of_clients_do_not_overflow_before_their_gradients_do() -> None:
    """Squares of gradients beyond 1e19 are too large for float32."""

    def found(scale: float) -> float:
        clients = {i: (scale * x, y) for i, (x, y) in enumerate(examples(6))}
        rule = local("sgd(steps=1, batch=9)")
        problem = Problem(nn.Linear(3, 1), lambda output, labels: output.squeeze(1) * (labels - 0.5), clients, rule)
        s_g = measure(problem, Point(problem.read()[0], None), None, done=0).s_g
        assert s_g is not None
        return s_g

    assert found(1e25) == pytest.approx(1e12 * found(1e13), rel=1e-4)


def test_pieces_of_a_client_add_up_to_all_its_examples() -> None:
    """Gradients, loss and curvature do not depend on the size of the pieces that memory allows."""
    found = []
    for batch in (4, 13, 1000):
        built = build(small(clients=6, local=f"sgd(steps=1, batch={batch})"))
        found.append(measure(built.simulation.problem, Point(built.state.x, None), None, done=0))
    for each in found[1:]:
        for name in ("L_power", "s_g", "loss", "gradient_sq"):
            assert getattr(each, name) == pytest.approx(getattr(found[0], name), rel=1e-4), name


def test_augmentation_counts_as_noise() -> None:
    class Shift:
        """Adds a random number to the inputs."""

        def draw(self, rng: np.random.Generator, count: int) -> Tensor:
            return torch.from_numpy(rng.normal(size=(count, 1))).float()

        def apply(self, x: Tensor, draws: Tensor) -> Tensor:
            return x + draws

    def noise(augment: Shift | None) -> float | None:
        torch.manual_seed(0)
        clients = {i: (torch.randn(6, 3), torch.randint(2, (6,))) for i in range(3)}
        rule = local("sgd(steps=1, batch=6)")
        problem = Problem(nn.Linear(3, 2), nn.functional.cross_entropy, clients, rule, augment=augment)
        return measure(problem, Point(problem.read()[0], None), None, done=0).s_l

    whole, shifted = noise(None), noise(Shift())
    assert whole is not None
    assert shifted is not None
    assert whole < 1e-6 < 1e-2 < shifted, "the batch is the whole client"


# -- what cannot be measured -------------------------------------------------------------------------------------------


class Once(torch.autograd.Function):
    """A layer whose backward pass cannot be differentiated, like some fused kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Once.apply(self.linear(x))
        return found


def examples(count: int = 12, size: int = 9) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [(torch.randn(size, 3, generator=draw), torch.randint(2, (size,), generator=draw)) for _ in range(count)]


def test_without_second_derivatives_the_run_goes_on(folder: Path) -> None:
    fedcams.simulate(Fused(), examples(), rounds=3, cohort=4, out=folder, theory_every=1, engine="loop").run()
    for line in lines(folder):
        assert line["L_power"] is None
        assert "once_differentiable" in line["missing"]["L_power"]
        assert line["L_secant"] > 0
        assert line["G"] > 0
    assert read_run(folder).finished


def test_a_linear_loss_has_no_curvature() -> None:
    problem = Problem(
        nn.Linear(3, 1), lambda output, labels: output.squeeze(1) * labels, dict(enumerate(examples())), local("sgd")
    )
    found = measure(problem, Point(problem.read()[0], None), None, done=0)
    assert (found.L_power, found.missing) == (0.0, {})


def test_a_model_that_does_not_move_has_no_secant() -> None:
    built = build(small())
    found = measure(built.simulation.problem, Point(built.state.x, None), built.state.x.clone(), done=4)
    assert found.L_secant is None
    assert found.missing == {"L_secant": "gradients changed too little for float32"}
    assert found.round == 5
    assert found.L_power is not None


def test_numbers_that_are_not_finite_are_left_out_with_the_reason() -> None:
    built = build(small())
    broken = torch.full_like(built.state.x, torch.nan)
    found = measure(built.simulation.problem, Point(broken, None), built.state.x, done=0)
    assert (found.loss, found.G, found.s_g, found.s_l, found.L_secant, found.L_power) == (None,) * 6
    assert found.missing["s_g"] == found.missing["G"] == "it is nan"
    assert Measured.from_dict(json.loads(found.to_json())) == found


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))


def test_a_client_that_cannot_be_measured_is_left_out_by_name() -> None:
    clients = dict(enumerate([*examples(3), *examples(2, size=1)]))  # batch-norm needs two examples
    problem = Problem(normed(), nn.functional.cross_entropy, clients, local("sgd(steps=1)"))
    found = measure(problem, Point(*problem.read()), None, done=0)
    assert (found.clients, found.population) == (3, 5)
    for client in (3, 4):
        assert f"client {client}: Expected more than 1 value per channel" in found.missing["clients"]
    assert found.G is not None


def test_a_last_piece_of_one_example_does_not_stop_batch_norm() -> None:
    problem = Problem(
        normed(), nn.functional.cross_entropy, dict(enumerate(examples(2, size=9))), local("sgd(steps=1, batch=4)")
    )
    assert measure(problem, Point(*problem.read()), None, done=0).missing == {}


def test_examples_need_not_be_pairs_of_tensors(folder: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, values: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.linear(values), labels)}

    clients = [{"values": x, "labels": y} for x, y in examples()]
    fedcams.simulate(Named(), clients, rounds=2, cohort=4, out=folder, theory_every=1).run()
    pairs = folder.with_name("pairs")
    model = Named()
    for clients_given, where in ((clients, folder.with_name("dicts")), (examples(), pairs)):
        given: nn.Module = model if where != pairs else model.linear
        fedcams.simulate(given, clients_given, rounds=2, cohort=4, out=where, theory_every=1, engine="loop").run()
    for one, other in zip(lines(folder.with_name("dicts")), lines(pairs), strict=True):
        assert {key: pytest.approx(value) for key, value in one.items() if key != "missing"} == {
            key: value for key, value in other.items() if key != "missing"
        }


# -- training is left as it was ----------------------------------------------------------------------------------------


def test_the_model_and_the_generators_are_left_as_they_were() -> None:
    model = normed()
    model[1].eval()
    model[0].bias.grad = held_grad = torch.ones(4)
    problem = Problem(model, nn.functional.cross_entropy, dict(enumerate(examples())), local("sgd(steps=1)"))
    x, buffers = problem.read()
    held = {name: value.clone() for name, value in model.state_dict().items()}
    objects = [id(part) for part in (*model.parameters(), *model.buffers())]
    modes, drawn = [module.training for module in model.modules()], torch.get_rng_state()
    assert buffers is not None
    found = measure(problem, Point(x + 1, buffers + 1), x + 2, done=0)
    assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())
    assert [id(part) for part in (*model.parameters(), *model.buffers())] == objects
    assert [parameter.grad for parameter in model.parameters() if parameter.grad is not None] == [held_grad]
    assert torch.equal(held_grad, torch.ones(4))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), drawn)
    torch.rand(1)
    with torch.no_grad():
        assert measure(problem, Point(x + 1, buffers + 1), x + 2, done=0) == found
    with torch.inference_mode():
        assert measure(problem, Point(x + 1, buffers + 1), x + 2, done=0) == found
    assert found.missing == {}


def trained(folder: Path) -> dict[str, bytes]:
    """The records of a run and its last model."""
    kept = [folder / "rounds.jsonl", *sorted((folder / "checkpoint").glob("*.safetensors"))]
    return {path.name: path.read_bytes() for path in kept}


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("kind", [{}, {**NORMED, "buffers": "blockq", "control": "scaffold"}], ids=["plain", "buffers"])
def test_measuring_changes_no_bit_of_training(tmp_path: Path, engine: str, kind: dict[str, Any]) -> None:
    for every in (0, 2):
        run(small(**kind, engine=engine, theory_every=every), tmp_path / str(every))
    assert trained(tmp_path / "0") == trained(tmp_path / "2")
    assert not (tmp_path / "0" / FILE).exists()
    assert [line["round"] for line in lines(tmp_path / "2")] == [1, 2, 4, 6, 7]


def test_measuring_changes_no_bit_of_training_with_dropout_and_buffers_that_stay_at_home(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = normed()
    for every in (0, 1):
        out = tmp_path / str(every)
        fedcams.simulate(
            model, examples(), examples()[0], rounds=5, cohort=4, out=out, theory_every=every, engine="loop"
        ).run()
    assert trained(tmp_path / "0") == trained(tmp_path / "1")
    assert len(lines(tmp_path / "1")) == 5


def test_the_time_of_measuring_is_apart(folder: Path) -> None:
    made = run(small(rounds=3, theory_every=3), folder)
    phases = [timing["phases"] for timing in made.timings]
    assert ["theory" in each for each in phases] == [True, False, True]
    for seconds, timing, each in zip(made.seconds, made.timings, phases, strict=True):
        rest = timing["seconds"] - each["evaluate"] - each.get("theory", 0.0)
        assert seconds == pytest.approx(rest, abs=1e-9)


# -- resumption --------------------------------------------------------------------------------------------------------


def test_a_resumed_run_measures_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    experiment = small(theory_every=2, **NORMED)
    run(experiment, tmp_path / "whole")
    folder = stopped(tmp_path / "run", 5, experiment, every=3)
    with (folder / FILE).open("ab") as file:
        file.write(b'{"round": 6, "cli')  # as a kill may leave it
    resume(folder)
    assert (folder / FILE).read_bytes() == (tmp_path / "whole" / FILE).read_bytes()


@pytest.mark.parametrize(
    "spoil", [lambda data: data.replace(b"1", b"2"), lambda data: data.split(b"\n")[0] + b"\n", lambda data: b""]
)
def test_changed_or_lost_lines_are_refused(folder: Path, spoil: Any) -> None:
    path = stopped(folder, 5, small(theory_every=2)) / FILE
    held = path.read_bytes()
    path.write_bytes(spoil(held))
    message = r"theory\.jsonl: changed, its lines up to round 3 are not those of the checkpoint; restore the file"
    with pytest.raises(RunError, match=message):
        resume(folder)
    path.write_bytes(held)
    assert resume(folder).finished
    held = path.read_bytes()
    path.write_bytes(spoil(held))
    with pytest.raises(RunError, match=message.replace("3", "7")):
        resume(folder)
    path.unlink()
    with pytest.raises(RunError, match=r"theory\.jsonl.*restore the file"):
        resume(folder)
    path.write_bytes(held)
    assert resume(folder).finished


def test_a_run_without_its_checkpoint_measures_from_the_first_round(folder: Path) -> None:
    stopped(folder, 2, small(theory_every=2), every=9)
    (folder / FILE).write_bytes(b"anything\n")
    for path in sorted((folder / "checkpoint").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    resume(folder)
    assert [line["round"] for line in lines(folder)] == [1, 2, 4, 6, 7]


def test_runs_of_versions_without_the_key_load_and_resume(tmp_path: Path) -> None:
    results = Path(__file__).resolve().parents[1] / "results"
    old = read_run(results / "compression-resnet18" / "fedams-s1")
    assert "theory_every" not in (old.path / "experiment.toml").read_text()
    assert (old.experiment.theory_every, old.measured) == (0, [])
    run(small(), tmp_path / "whole")
    folder = stopped(tmp_path / "run", 5)
    path, state = folder / "experiment.toml", folder / "checkpoint" / "state.json"
    kept = [line for line in path.read_text().splitlines() if not line.startswith("theory_every")]
    path.write_text("\n".join(kept) + "\n")
    values = json.loads(state.read_text())
    del values["digest"]
    assert "theory" not in values
    values["identity"].pop("theory_every", None)
    state.write_bytes(sealed(values))
    assert resume(folder).finished
    assert trained(folder) == trained(tmp_path / "whole")
    assert not (folder / FILE).exists()


def test_a_run_can_begin_to_measure_when_it_is_resumed(folder: Path) -> None:
    path = stopped(folder, 5) / "experiment.toml"
    path.write_text(path.read_text().replace("theory_every = 0", "theory_every = 2"))
    found = resume(folder)
    assert [line.round for line in found.measured] == [4, 6, 7]
    known, start = check(found.experiment, found.records, measured=found.measured).constants, check(small()).constants
    assert known.F == start.F, "at the start, which no line has"
    assert known.how["F"] == "bound if the loss is never negative, at the start, 6 of 6 clients"
    assert known.how["G"] == "lower bound, the largest in 4 rounds from 1 to 7, 6 of 6 clients each"
    fails = check(found.experiment, found.records, measured=found.measured).fails
    assert any("are measured in 4 rounds, so L and G may be larger" in fail for fail in fails)


def test_an_extended_run_keeps_its_lines(tmp_path: Path) -> None:
    """Round 5 was once the last one, so it has a line that the longer run lacks; all others are equal."""
    run(small(rounds=9, theory_every=3), tmp_path / "whole")
    run(small(rounds=5, theory_every=3), tmp_path / "run", keep_rows=True)
    extend(tmp_path / "run", 9)
    resume(tmp_path / "run")
    found, whole = lines(tmp_path / "run"), lines(tmp_path / "whole")
    assert [line["round"] for line in found] == [1, 3, 5, 6, 9]
    assert [line for line in found if line["round"] != 5] == whole


def test_a_run_from_python_measures_resumes_and_may_change_its_mind(tmp_path: Path) -> None:
    def simulate(out: Path, rounds: int, every: int) -> None:
        fedcams.simulate(
            nn.Linear(3, 2, device="cpu"), examples(), rounds=rounds, cohort=4, out=out, theory_every=every,
            engine="loop",
        ).run()  # fmt: skip

    with torch.random.fork_rng():
        for every, rounds, measured in ((2, 2, [1, 2]), (0, 4, [1, 2]), (3, 7, [1, 2, 6, 7])):
            torch.manual_seed(1)
            simulate(tmp_path / "run", rounds, every)
            assert [line["round"] for line in lines(tmp_path / "run")] == measured
        torch.manual_seed(1)
        simulate(tmp_path / "whole", 7, 1)
    whole = {line["round"]: line for line in lines(tmp_path / "whole")}
    assert lines(tmp_path / "run") == [whole[round] for round in (1, 2, 6, 7)]
    assert read_run(tmp_path / "run").experiment.theory_every == 3
    assert trained(tmp_path / "run")["rounds.jsonl"] == trained(tmp_path / "whole")["rounds.jsonl"]


def test_a_run_from_python_refuses_changed_lines(folder: Path) -> None:
    model = nn.Linear(3, 2)

    def simulate(rounds: int) -> fedcams.History:
        return fedcams.simulate(model, examples(), rounds=rounds, cohort=4, out=folder, theory_every=1, engine="loop")

    simulate(2).run()
    held = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(held.replace(b"loss", b"less"))
    with pytest.raises(RunError, match=r"theory\.jsonl: changed, its lines up to round 2"):
        simulate(3).run()
    (folder / FILE).write_bytes(held)
    simulate(3).run()
    assert len(lines(folder)) == 3


# -- files, errors and checks ------------------------------------------------------------------------------------------


def test_with_privacy_only_the_owner_reads_the_file(folder: Path) -> None:
    private = {"privacy": "server(clip=1, noise=1)", "sampler": "bernoulli(p=1/2)", "guard": "none"}
    run(small(**private, rounds=2, theory_every=1), folder)
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600
    assert FILE in (folder / "PRIVATE.txt").read_text()


def test_a_damaged_file_is_refused_by_name(folder: Path) -> None:
    run(small(rounds=2, theory_every=1), folder)
    for text in ("3\n", "{}\n", "x\n"):
        (folder / FILE).write_text(text)
        with pytest.raises(RunError, match=r"theory\.jsonl: damaged"):
            read_run(folder)


@pytest.mark.parametrize(
    "changed",
    [
        {"G": "abc"}, {"G": True}, {"s_g": [1]}, {"round": "x"}, {"round": 0}, {"clients": None}, {"clients": 9},
        {"population": 0}, {"missing": None}, {"missing": {"G": 1}}, {"loss": float("nan")}, {"G": -1.0},
    ],
    ids=str,
)  # fmt: skip
def test_a_line_with_an_impossible_value_is_refused(changed: dict[str, Any]) -> None:
    line = dataclasses.asdict(Measured(1, 2, 3, G=1.0))
    with pytest.raises(ValueError, match=f"{next(iter(changed))} is "):
        Measured.from_dict({**line, **changed})


def test_a_check_refuses_damaged_files(folder: Path) -> None:
    """Values of a wrong kind, and rounds in a wrong order, which would give a wrong mean."""
    run(small(rounds=2, theory_every=1), folder)
    rounds, measured = ((folder / name).read_text() for name in ("rounds.jsonl", FILE))
    damaged = {"rounds.jsonl": re.sub('"q_max": [^,}]+', '"q_max": "x"', rounds), FILE: f"{measured}{measured}"}
    for name, text in damaged.items():
        (folder / "rounds.jsonl").write_text(rounds)
        (folder / name).write_text(text)
        said = command("theory", "check", str(folder))
        assert said.exit_code == 2, name
        assert f"error: {folder}: damaged (" in said.output, name


def test_bad_values_are_refused_with_the_field_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"theory_every=-1: out of range; allowed: an integer in \[0, inf\)"):
        Experiment.from_dict({"theory_every": -1})
    said = command("run", "demo", "-s", "theory_every=-1", "--out", str(tmp_path / "run"))
    assert said.exit_code != 0
    assert "theory_every=-1" in said.output
    with pytest.raises(SpecError, match="theory_every=-1; allowed: 0 or more"):
        fedcams.simulate(nn.Linear(3, 2), examples(), out=tmp_path / "run", theory_every=-1)
    with pytest.raises(SpecError, match=r"theory_every=2 writes to the run's folder; give out="):
        fedcams.simulate(nn.Linear(3, 2), examples(), theory_every=2)
    assert not (tmp_path / "run").exists()


def test_a_check_takes_the_largest_values_of_the_run(folder: Path) -> None:
    experiment = small(clients=14, rounds=7, theory_every=3, local="sgd(lr=0.1, steps=2, batch=8)")
    made = run(experiment, folder)
    found = json.loads(command("theory", "check", str(folder), "--json").output)[0]
    known, measured = found["constants"], made.measured
    assert known["L"] == max(max(line.L_secant, line.L_power) for line in measured)  # type: ignore[type-var]
    for name in ("G", "s_l", "s_g"):
        assert known[name] == max(getattr(line, name) for line in measured)
    assert known["F"] == measured[0].loss
    powers, secants = ([getattr(line, name) for line in measured] for name in ("L_power", "L_secant"))
    clients = 1 if max(powers) > max(secants) else 10
    assert known["how"]["L"] == f"lower bound, the largest in 4 rounds from 1 to 7, {clients} of 14 clients each"
    assert known["how"]["G"] == "lower bound, the largest in 4 rounds from 1 to 7, 10 of 14 clients each"
    assert known["how"]["F"] == "estimate of a bound if the loss is never negative, at the start, 10 of 14 clients"
    assert known["how"]["s_g"] == "estimate, the largest in 4 rounds from 1 to 7, 10 of 14 clients each"
    assert any("are measured in 4 rounds, so L and G may be larger" in fail for fail in found["fails"])
    values = [line.gradient_sq_of_all for line in measured]
    mean = float(np.interp(range(1, 8), [1, 3, 6, 7], values).mean())  # type: ignore[arg-type]
    assert found["seen"]["measured_gradient_sq"] == pytest.approx(mean)
    said = " ".join(command("theory", "check", str(folder)).output.split())
    assert "measured (estimate from updates)" in said
    assert f"measured (gradients in 4 rounds) {mean:.4g}" in said


def test_without_the_file_a_check_measures_at_the_start(folder: Path) -> None:
    made = run(small(rounds=2, theory_every=1), folder)
    (folder / FILE).unlink()
    found = json.loads(command("theory", "check", str(folder), "--json").output)[0]
    assert found == json.loads(json.dumps(check(made.experiment, made.records).to_dict()))
    assert found["constants"]["how"]["L"] == "lower bound, at the start, 1 of 6 clients"
    assert "measured_gradient_sq" not in found["seen"]


def test_exact_constants_stay_exact_beside_the_file(folder: Path) -> None:
    made = run(Experiment.from_dict({**QUADRATIC, "theory_every": 3}), folder)
    found = check(made.experiment, made.records, measured=made.measured)
    assert found.constants == check(made.experiment, made.records).constants
    assert found.constants.how["L"] == "exact"
    assert found.seen["measured_rounds"] == 4


def test_constants_that_cannot_be_measured_at_all_are_refused(folder: Path) -> None:
    built = build(small())
    one = Instance(small(), built.simulation.problem, digits_data(), torch.full_like(built.state.x, torch.nan))
    message = r"model=mlp\(hidden=8\): L, G, s_l, s_g, F cannot be measured \(it is nan\); check another model"
    with pytest.raises(SpecError, match=message):
        constants_of(one)
    lines = [Measured(1, 6, 6, G=1.0, s_l=1.0, s_g=1.0, loss=1.0, missing={"L_power": "it has none"})]
    with pytest.raises(SpecError, match=r"L cannot be measured \(it has none\); check a run with theory_every"):
        constants_of(one, lines)
    assert constants_of(one, [*lines, Measured(3, 6, 6, L_secant=2.0)]).L == 2
    flat = [dataclasses.replace(lines[0], L_power=0.0, missing={})]
    with pytest.raises(SpecError, match=r"L cannot be measured \(it is 0\); check a run with theory_every"):
        constants_of(one, flat)


def digits_data() -> TaskData:
    return small().task.load()


def test_lines_of_a_later_version_still_load() -> None:
    line = dataclasses.asdict(Measured(1, 2, 3, G=1.0))
    assert Measured.from_dict({**line, "unheard_of": 1}) == Measured(1, 2, 3, G=1.0)
