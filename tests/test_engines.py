"""Engines: each one gives the same updates as `loop`, for all models, client sizes and local rules."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cohort_updates import assert_close, start_of
from fedcams import models
from fedcams.engines import CohortUpdate, Engine, Problem, choose, engine
from fedcams.engines.batches import lay_out
from fedcams.engines.compiled import has_compiler
from fedcams.engines.padding import is_near
from fedcams.errors import SpecError, UpdateError
from fedcams.local import Local, Rate, Slots, batch_order, local
from fedcams.local.base import descend_, only_active
from fedcams.registry import registered, table
from fedcams.tasks.shakespeare import character_loss

ENGINES = [cls for cls in registered("engine").values() if not cls.needs_cuda]  # test_graphs.py has the others
EAGER = [spec for cls in ENGINES for spec in cls.examples if "compile" not in spec]
FAST = [spec for spec in EAGER if spec != "loop"]
UNEVEN = [20, 7, 33, 1, 45]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(3, 4),
    )


class Tied(nn.Module):
    """Tied, frozen and scalar parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.head = nn.Linear(16, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x.flatten(1)))))) * self.scale


def counted() -> nn.Module:
    """Its running averages depend on an integer buffer, the number of batches seen."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 4))


MODELS = {"mlp": mlp, "batch-norm": normed, "tied and frozen": Tied}


def per_example(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


class Shift:
    """A tiny augmentation: rolls the image by a number of columns."""

    def draw(self, rng: np.random.Generator, n: int) -> Tensor:
        return torch.from_numpy(rng.integers(0, 4, n))

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        columns = (torch.arange(4) - draws[:, None]) % 4
        return x.gather(-1, columns[:, None, None, :].expand_as(x))


def problem(
    model: str = "mlp",
    spec: str = "sgd(lr=0.1, epochs=2, batch=8)",
    sizes: list[int] = UNEVEN,
    dtype: torch.dtype = torch.float64,
    mean_loss: bool = False,
    augment: bool = False,
) -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = MODELS[model]().to(dtype)
        clients = {
            10 * i: (torch.randn(n, 1, 4, 4, dtype=dtype), torch.randint(0, 4, (n,))) for i, n in enumerate(sizes)
        }
    loss = F.cross_entropy if mean_loss else per_example
    return Problem(net, loss, clients, local(spec), augment=Shift() if augment else None)


def train(
    spec: str | Engine,
    task: Problem,
    cohort: list[int] | None = None,
    rate: float | None = None,
    shift: Tensor | None = None,
) -> CohortUpdate:
    chosen = cohort or list(task.clients)
    return engine(spec).train(task, *start_of(task), chosen, round=3, seed=5, rate=rate, shift=shift)


LOCALS = [
    "sgd(lr=0.1, epochs=2, batch=8)",
    "sgd(lr=0.1, momentum=0.9, weight_decay=0.01, steps=5, batch=8)",
    "sgd(lr=0.1, clip=0.1, prox=0.5, batch=8, drop_last=true)",
    "adamw(lr=0.01, epochs=2, batch=8)",
    "adam(lr=0.01, weight_decay=0.1, epochs=2, batch=8)",
    "sgd(lr=0.05, momentum=0.9, nesterov=true, batch=8)",
]


@pytest.mark.parametrize("spec", LOCALS)
@pytest.mark.parametrize("model", MODELS)
def test_a_whole_round_in_float64(spec: str, model: str) -> None:
    """Engines in turn, and losses of examples or their mean: every pair of engine, rule, model and loss occurs."""
    place, kind = LOCALS.index(spec), [*MODELS].index(model)
    fast, mean_loss = FAST[(place + kind) % len(FAST)], (place // 2 + kind) % 2 == 1
    task = problem(model, spec, mean_loss=mean_loss)
    truth = train("loop", problem(model, spec, mean_loss=mean_loss))
    assert_close(train(fast, task), truth, 1e-9)


# -- rates, shifts and your own rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("by", EAGER)
@pytest.mark.parametrize("spec", LOCALS)
def test_a_rate_of_the_round_stands_for_that_of_the_rule(by: str, spec: str) -> None:
    given = train(by, problem(spec=spec), rate=0.03)
    rule = dataclasses.replace(local(spec), lr=0.03)  # type: ignore[type-var]
    truth = train(by, dataclasses.replace(problem(spec=spec), local=rule))
    assert torch.equal(given.delta, truth.delta)
    assert given.rate == truth.rate == 0.03
    assert train(by, problem(spec=spec)).rate == float(local(spec).lr)
    for bad in (-0.1, float("nan"), float("inf")):
        with pytest.raises(SpecError, match="give a local learning rate of at least 0"):
            train(by, problem(spec=spec), rate=bad)


def test_the_loop_adds_a_shift_to_every_gradient() -> None:
    """Without momentum and for one step: `Δ = -rate (gradient + shift)`, for each client its own."""
    spec = "sgd(lr=0.1, steps=1, batch=50)"
    shift = torch.randn(5, problem().layout.d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain, shifted = (train("loop", problem(spec=spec), shift=added) for added in (None, shift))
    torch.testing.assert_close(shifted.delta, plain.delta - 0.1 * shift, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("spec", LOCALS)
def test_shifted_rounds_with_a_rate(fast: str, spec: str) -> None:
    """With uneven clients; a shift is in the order of the cohort, which need not be ascending."""
    model = ["mlp", "batch-norm"][(FAST.index(fast) + LOCALS.index(spec)) % 2]  # every engine and rule meets both
    task, cohort = problem(model, spec), [40, 0, 30, 20]
    shift = torch.randn(4, task.layout.d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, truth = (train(by, problem(model, spec), cohort, 0.02, shift) for by in (fast, "loop"))
    assert_close(ours, truth, 1e-9)
    assert not torch.allclose(ours.delta, train(fast, problem(model, spec), cohort, 0.02).delta)


@dataclasses.dataclass(frozen=True)
class Signs(Local):
    """A custom rule with a slot: steps along the signs of a running sum."""

    lr: float = 0.01
    epochs: int | None = 2
    steps: int | None = None
    batch: int = 8
    drop_last: bool = False

    def __post_init__(self) -> None:
        """Fields of a class in a test are no declared params."""

    def init(self, x: Tensor) -> Slots:
        return {"sum": torch.zeros_like(x), "count": torch.zeros(len(x), dtype=torch.int64, device=x.device)}

    def step_(self, x: Tensor, gradient: Tensor, slots: Slots, rate: Rate, active: Tensor | None = None) -> None:
        with only_active(active, x, *slots.values()):
            slots["sum"].mul_(0.5).add_(gradient)
            slots["count"].add_(1)
            descend_(x, slots["sum"].tanh() / slots["count"][:, None], rate)


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("model", MODELS)
def test_a_rule_of_ones_own_trains_in_every_engine(fast: str, model: str) -> None:
    ours, truth = (train(by, dataclasses.replace(problem(model), local=Signs())) for by in (fast, "loop"))
    assert_close(ours, truth, 1e-9)


class Layerwise(Signs):
    """A rule that looks at whole tensors: each takes a step of the same length."""

    elementwise = False

    def init(self, x: Tensor) -> Slots:
        return {}

    def step_(self, x: Tensor, gradient: Tensor, slots: Slots, rate: Rate, active: Tensor | None = None) -> None:
        with only_active(active, x):
            parts = gradient.split(self.sections, dim=-1)
            descend_(x, torch.cat([part / (1e-3 + part.norm(dim=-1, keepdim=True)) for part in parts], -1), rate)


@pytest.mark.parametrize("fast", FAST)
def test_a_rule_of_whole_tensors_knows_them_in_every_engine(fast: str) -> None:
    ours, truth = (train(by, dataclasses.replace(problem("mlp"), local=Layerwise())) for by in (fast, "loop"))
    assert_close(ours, truth, 1e-9)


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("model", MODELS)
def test_one_step_in_float32(fast: str, model: str) -> None:
    pair = [problem(model, "sgd(lr=0.1, steps=1)", dtype=torch.float32) for _ in range(2)]
    assert_close(train(fast, pair[0]), train("loop", pair[1]), 1e-5)


@pytest.mark.parametrize("fast", FAST)
def test_augmentation_is_drawn_alike(fast: str) -> None:
    assert_close(train(fast, problem(augment=True)), train("loop", problem(augment=True)), 1e-9)
    plain, changed = train(fast, problem()), train(fast, problem(augment=True))
    assert not torch.equal(plain.delta, changed.delta)


@pytest.mark.parametrize("spec", ["loop", *FAST])
def test_rows_follow_the_cohort_and_do_not_depend_on_it(spec: str) -> None:
    everybody = train(spec, problem())
    some = train(spec, problem(), [40, 0, 20])
    assert torch.allclose(some.delta, everybody.delta[[4, 0, 2]], rtol=1e-12, atol=1e-15)
    assert some.examples == [45, 20, 33]


def test_integer_buffers_start_anew_for_every_client() -> None:
    """They stay at home, and a run that is resumed knows nothing of them; only the loop trains this model."""
    task = dataclasses.replace(problem(sizes=[16, 24, 8]), model=counted().double())
    start, held = task.layout.read(task.model).double(), torch.zeros(12, dtype=torch.float64)
    cohorts = [[0, 10, 20], [0, 10, 20], [20]]
    first, again, alone = (engine("loop").train(task, start, held, cohort, round=1, seed=0) for cohort in cohorts)
    assert first.buffers is not None
    assert again.buffers is not None
    assert alone.buffers is not None
    assert torch.equal(again.buffers, first.buffers)
    assert torch.equal(alone.buffers[0], first.buffers[2])


@pytest.mark.parametrize("fast", FAST)
def test_padding_leaves_running_statistics_of_single_examples_alone(fast: str) -> None:
    """Instance-norm normalises each example alone, but its running statistics are means over the batch."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.InstanceNorm2d(1, track_running_stats=True), nn.Flatten(), nn.Linear(16, 4)
        model = nn.Sequential(*layers).double()
    ours, truth = (train(by, dataclasses.replace(problem(), model=copy.deepcopy(model))) for by in (fast, "loop"))
    assert_close(ours, truth, 1e-9)


@pytest.mark.parametrize("spec", ["loop", *FAST])
def test_clients_may_start_from_models_of_their_own(spec: str) -> None:
    task = problem()
    start = torch.randn(3, task.layout.d, dtype=torch.float64) * 0.1
    together = engine(spec).train(task, start, None, [0, 10, 20], round=1, seed=0)
    for i, client in enumerate([0, 10, 20]):
        alone = engine(spec).train(task, start[i], None, [client], round=1, seed=0)
        assert torch.allclose(alone.delta[0], together.delta[i], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("spec", ["loop", *FAST])
def test_an_empty_client_is_refused_by_name(spec: str) -> None:
    with pytest.raises(UpdateError, match="client 10 has 0 inputs"):
        train(spec, problem(sizes=[5, 0]))


@pytest.mark.parametrize("spec", ["loop", *FAST])
def test_a_client_of_64_bits_is_named_by_its_number(spec: str) -> None:
    """Next to smaller numbers, NumPy would round it to a float."""
    (few, many), largest = problem("batch-norm", sizes=[1, 9]).clients.values(), 2**64 - 1
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4)).double()
    task = dataclasses.replace(problem(), model=net, clients={3: many, largest: few})
    with pytest.raises(UpdateError, match=rf"^client {largest}: Expected more than 1 value per channel"):
        train(spec, dataclasses.replace(task, local=local("sgd(steps=1, batch=9)")))


def test_layers_that_draw_are_left_to_the_loop() -> None:
    tasks = [problem() for _ in range(2)]
    for task in tasks:
        task.model.append(nn.Dropout(0.5))  # type: ignore[operator]
        with pytest.raises(SpecError, match=r"layer '4' is a random Dropout; use engine=loop"):
            train("stacked", task)
    first, second = (train("loop", task) for task in tasks)
    assert torch.equal(first.delta, second.delta), "dropout is a function of seed, round and client too"


@pytest.mark.parametrize("fast", FAST)
def test_padding_brings_no_other_clients_numbers(fast: str) -> None:
    """Zero times NaN is NaN: a client that pads its batches with a stranger's example would be lost with it."""
    task, sound = problem(), problem()
    task.clients[0][0].fill_(float("nan"))
    ours, truth = train(fast, task), train("loop", sound)
    assert bool(ours.delta[0].isnan().all())
    assert torch.allclose(ours.delta[1:], truth.delta[1:], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_models_of_another_precision_than_vectors(fast: str, dtype: torch.dtype) -> None:
    """Vectors are float32 whatever a model computes with, and so are updates."""
    updates = []
    for spec in (fast, "loop"):
        task = problem("batch-norm", "sgd(lr=0.1, steps=1)", sizes=[20, 7], dtype=dtype)
        assert task.buffer_layout is not None
        start = task.layout.read(task.model), task.buffer_layout.read(task.model)
        updates.append(engine(spec).train(task, *start, list(task.clients), round=1, seed=0))
    ours, truth = updates
    assert ours.delta.dtype == truth.delta.dtype == torch.float32
    assert_close(ours, truth, {torch.float64: 1e-5}.get(dtype, 0.1))


class Spare(nn.Linear):
    """Has a parameter that it does not use."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.spare = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))


@pytest.mark.parametrize("spec", ["loop", *FAST])
def test_half_precision_stays_in_the_model(spec: str) -> None:
    """A sum of many losses would stand still in it, and the rounding of what was received is no training."""
    task = problem(spec="sgd(lr=1e-6, batch=1, steps=400)", sizes=[20], dtype=torch.bfloat16)
    task = dataclasses.replace(task, model=Spare(16, 4).bfloat16())
    start = torch.linspace(0.1, 0.3, task.layout.d)  # none of which fits
    update = engine(spec).train(task, start, None, [0], round=1, seed=0)
    spare = task.layout.split(update.delta)["spare"]
    assert torch.equal(spare, torch.zeros_like(spare))
    model = task.load(start, None).float()
    x, y = task.clients[0]
    assert torch.allclose(update.loss.float(), per_example(model(x.float()), y).mean(), rtol=0.01)


class Scaled(nn.Linear):
    """A layer in half precision, and a scale in float32."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1).bfloat16()) * self.scale


def test_parameters_of_several_precisions_train_in_the_widest() -> None:
    """In bfloat16, small steps would be rounded away one by one."""
    lengths = []
    for steps in (1, 8):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            task = problem(spec=f"sgd(lr=1e-4, batch=20, steps={steps})", dtype=torch.float32)
            task = dataclasses.replace(task, model=Scaled(16, 4))
        update = engine(choose("auto", task)).train(task, *task.read(), [0], round=1, seed=0)
        lengths.append({name: float(part.norm()) for name, part in task.layout.split(update.delta).items()})
    assert all(7 < lengths[1][name] / length < 9 for name, length in lengths[0].items())


@pytest.mark.parametrize("fast", FAST)
def test_losses_of_several_numbers_each_are_averaged(fast: str) -> None:
    """As of `[n, 1]` in a regression, or one for each place of a sequence."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets[:, None]).square()

    truth, ours = (train(spec, dataclasses.replace(problem(), loss=loss)) for spec in ("loop", fast))
    assert_close(ours, truth, 1e-9)


class Trains(nn.Linear):
    """Another function in training than in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)) * (2.0 if self.training else 1.0)


@pytest.mark.parametrize("fast", FAST)
def test_the_first_round_is_in_training_mode_too(fast: str) -> None:
    task = dataclasses.replace(problem(), model=Trains(16, 4).double())
    truth, ours = (train(spec, copy.deepcopy(task)) for spec in ("loop", fast))
    assert_close(ours, truth, 1e-9)


class Recurrent(nn.Module):
    """vmap has no rule for it."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.squeeze(1))[0][:, -1])


class Branching(nn.Linear):
    """Looks at its data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1) * (2 if x.sum() > 0 else 1))


class Drawing(nn.Linear):
    """Drops out by a function, of which no layer tells."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x.flatten(1)), 0.5, self.training)


class Centring(nn.Linear):
    """Its examples see each other, so that padding would be seen as well."""

    strength = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return super().forward(x - self.strength * x.mean(0))


class Normalizing(nn.Linear):
    """Normalises its batch by a function, which no layer shows."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.register_buffer("mean", torch.zeros(shape[1]))
        self.register_buffer("var", torch.ones(shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x.flatten(1))
        return F.batch_norm(x, self.mean, self.var, training=self.training and len(x) > 1)


class Dividing(nn.Linear):
    """Divides by the number of examples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)) / len(x)


class Single(nn.Linear):
    """Treats a single example in another way."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1) * (1 if len(x) > 1 else 2))


class Counting(nn.Linear):
    """Puts new tensors in place of its buffers: one does not travel, and one takes what another held."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("before", torch.zeros(16))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        x, self.seen = x.flatten(1), self.seen + 1
        if self.training:
            self.before, self.mean = self.mean, 0.9 * self.mean + 0.1 * x.detach()[0]
        return super().forward(x - self.mean - self.before) * (1 + 0.1 * self.seen)


@pytest.mark.parametrize("fast", FAST)
def test_a_model_may_replace_its_buffers(fast: str) -> None:
    """Those that do not travel start anew for every client, also after an evaluation."""
    task = dataclasses.replace(problem(), model=Counting(16, 4).double())
    start, held = torch.ones(task.layout.d, dtype=torch.float64), torch.zeros(32, dtype=torch.float64)
    for _ in range(2):
        both = (engine(spec).train(task, start, held, list(task.clients), 1, 0) for spec in ("loop", fast))
        assert_close(*both, 1e-9)
        task.model(torch.zeros(1, 16, dtype=torch.float64))


ALONE = [
    Recurrent(),
    Branching(16, 4),
    Drawing(16, 4),
    nn.Sequential(mlp(), Trains(4, 4)),
]


@pytest.mark.parametrize("model", ALONE, ids=lambda model: type(model).__name__)
def test_auto_takes_the_loop_where_only_that_is_right(model: nn.Module) -> None:
    task = dataclasses.replace(problem(dtype=torch.float32), model=model)
    before, mode = copy.deepcopy(model.state_dict()), model.training
    assert str(choose("auto", task)) == ("stacked" if isinstance(model, nn.Sequential) else "loop")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "it was only tried"
    assert model.training == mode


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("model", [Centring(16, 4), Normalizing(16, 4), Dividing(16, 4), Single(16, 4)], ids=str)
def test_models_whose_examples_see_each_other_are_not_padded(fast: str, model: nn.Module) -> None:
    task = dataclasses.replace(problem(), model=model.double())
    assert_close(train(fast, task), train("loop", task), 1e-9)


@pytest.mark.parametrize(
    "constant",
    [torch.full((4,), -torch.inf), torch.tensor([True, False]), torch.arange(3), torch.tensor([1j])],
    ids=["infinite", "bool", "int", "complex"],
)
@pytest.mark.parametrize("persistent", [True, False])
def test_constant_buffers_of_any_kind_do_not_prevent_padding(constant: Tensor, persistent: bool) -> None:
    """Such as a causal mask with infinities, or the rotations of positions."""
    task = problem(dtype=torch.float32)
    task.model.register_buffer("constant", constant, persistent=persistent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert task.may_pad


@pytest.mark.parametrize("found", [1.0, torch.inf, torch.nan])
def test_an_infinity_is_near_itself_alone(found: float) -> None:
    mask = torch.tensor([0.0, 1.0, -torch.inf])
    assert is_near(mask, mask.clone(), 1e-3)
    assert not is_near(torch.tensor([0.0, 1.0, found]), mask, 1e-3)
    assert not is_near(torch.tensor([0.0, 2.0, -torch.inf]), mask, 1e-3)


@pytest.mark.parametrize("strength", [1.0, 0.03])
@pytest.mark.parametrize("first", [1, 20])
def test_padding_is_seen_to_mix_examples(first: int, strength: float) -> None:
    """Also a little, and where all examples of the first client are one."""
    model = Centring(16, 4)
    model.strength = strength
    task = dataclasses.replace(problem(sizes=[first, 20], dtype=torch.float32), model=model)
    assert not task.may_pad
    assert_close(train(choose("auto", task), task), train("loop", task), 1e-5)


@pytest.mark.parametrize("fast", FAST)
def test_hooks_on_gradients_are_left_to_the_loop(fast: str) -> None:
    """They belong to a parameter, in whose place an engine puts another tensor."""
    task = problem(dtype=torch.float32)
    first = task.layout.names[0]
    task.model.get_parameter(first).register_hook(torch.zeros_like)
    with pytest.raises(SpecError, match=f"parameter '{first}' has a hook on its gradient; use engine=loop"):
        train(fast, task)
    chosen = choose("auto", task)
    assert str(chosen) == "loop"
    assert not task.layout.split(train(chosen, task).delta)[first].any()


def one_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)[None]


def penalised(outputs: Tensor, targets: Tensor) -> Tensor:
    return per_example(outputs, targets) + outputs.mean(0).square().sum()


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("loss", [one_mean, penalised])
def test_losses_that_depend_on_the_batch_are_not_padded(fast: str, loss: Any) -> None:
    truth, ours = (train(spec, dataclasses.replace(problem(), loss=loss)) for spec in ("loop", fast))
    assert_close(ours, truth, 1e-9)


@pytest.mark.parametrize("name", registered("model"))
def test_auto_takes_the_fast_one_for_what_comes_with_it(name: str) -> None:
    """Also where a client has one example: all that is tried on then are copies of it."""
    for n in (1, 20):
        task = small_problem(name, (n,), torch.float32, "sgd")
        assert str(choose("auto", task)) == ("loop" if name == "lstm" else "stacked")


def test_a_recurrent_layer_is_named_where_it_cannot_be_stacked() -> None:
    with pytest.raises(SpecError, match=r"layer 'lstm' is an LSTM, which torch.func cannot batch; use engine=loop"):
        choose("stacked", small_problem("lstm", (4,), torch.float32, "sgd"))


@pytest.mark.parametrize("options", [{"padding_idx": 0}, {"scale_grad_by_freq": True}], ids=str)
def test_a_table_with_gradients_of_its_own_is_left_to_the_loop(options: dict[str, Any]) -> None:
    """A trial may see no difference, if the texts that it takes need no padding and repeat no word."""
    table, tokens = nn.Embedding(9, 4, **options), torch.arange(20).view(5, 4) % 8 + 1
    task = Problem(nn.Sequential(table, nn.Flatten()), per_example, {0: (tokens, torch.arange(5))}, local("sgd"))
    with pytest.raises(SpecError, match=r"layer '0' is an Embedding with padding_idx or scale_grad_by_freq"):
        train("stacked", task)
    assert str(choose("auto", task)) == "loop"
    table.requires_grad_(False)
    task.model.append(nn.Linear(16, 9))  # type: ignore[operator]
    assert str(choose("auto", dataclasses.replace(task))) == "stacked"


class Lookup(nn.Linear):
    """Its table is no layer."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight, padding_idx=0).sum(1) + self.bias.mean()


def test_a_table_without_a_layer_is_left_to_the_loop_too() -> None:
    tokens = torch.arange(20).view(5, 4) % 8 + 1
    task = Problem(Lookup(4, 9), per_example, {0: (tokens, torch.arange(4)[torch.arange(5) % 4])}, local("sgd"))
    with pytest.raises(SpecError, match=r"the model calls F.embedding with padding_idx.*; use engine=loop"):
        train("stacked", task)
    assert str(choose("auto", task)) == "loop"
    task.model.weight.requires_grad_(False)  # type: ignore[union-attr]
    assert str(choose("auto", dataclasses.replace(task))) == "stacked"


def test_sparse_gradients_are_those_of_the_loop_too() -> None:
    tokens, y = torch.arange(20).view(5, 4) % 9, torch.arange(5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        table = nn.Embedding(9, 4)
    tasks = [
        Problem(
            nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Flatten()), per_example, {0: (tokens, y)}, local("sgd")
        )
        for sparse in (False, True)
    ]
    dense, sparse = (engine("loop").train(task, table.weight.detach().flatten(), None, [0], 1, 0) for task in tasks)
    assert_close(sparse, dense, 1e-6)


class UnitRows(nn.Linear):
    """Scales its weights in place before it uses them, as a cosine classifier does."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.div_(self.weight.data.norm(dim=1, keepdim=True))
        return super().forward(x.flatten(1))


def test_weights_that_forward_changes_train_as_in_plain_torch() -> None:
    task = dataclasses.replace(problem(spec="sgd(lr=0.5, batch=4)"), model=UnitRows(16, 4).double())
    model, (x, y) = copy.deepcopy(task.model), task.clients[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for rows in batch_order(task.local, len(x), seed=5, round=3, client=0).batches():
        optimizer.zero_grad()
        per_example(model(x[rows]), y[rows]).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    before = task.layout.read(task.model, out=torch.empty(task.layout.d, dtype=torch.float64))
    after = task.layout.read(model, out=torch.empty_like(before))
    assert torch.allclose(train(choose("auto", task), task, [0]).delta[0], after - before, rtol=1e-9, atol=1e-12)


class Limited(Scaled):
    """Limits its weights, which are in half precision, before it uses them."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.125, 0.125)
        return super().forward(x)


def test_what_forward_changes_in_half_precision_is_kept() -> None:
    task = dataclasses.replace(problem(spec="sgd(lr=1e-6, steps=3)", dtype=torch.float32), model=Limited(16, 4))
    start = task.read()[0]
    start[: 16 * 4] = torch.linspace(-0.3, 0.3, 16 * 4)
    after = start + engine("loop").train(task, start, None, [0], round=1, seed=0).delta[0]
    limited = start.clone()
    limited[: 16 * 4].clamp_(-0.125, 0.125)
    assert torch.allclose(after, limited, rtol=0, atol=1e-4), "weights within the limits do not become rounded"


class Optional(nn.Linear):
    """One input is optional, such as a mask."""

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        return super().forward(x if more is None else x + more)


@pytest.mark.parametrize("other", ["first", "second", "tensor"])
def test_examples_of_several_forms_are_left_to_the_loop(other: str) -> None:
    """An input that only some clients have must not be lost."""
    x, y = torch.ones(5, 4), torch.arange(5) % 3
    both: Any = [{"x": x}, x if other == "tensor" else {"x": x, "more": x}]
    clients = {client: (inputs, y) for client, inputs in enumerate(reversed(both) if other == "first" else both)}
    task = Problem(Optional(4, 3), per_example, clients, local("sgd"))
    with pytest.raises(SpecError, match=r"clients 0, 1 differ in form .*or use engine=loop"):
        train("stacked", task)
    assert train("loop", task).examples == [5, 5]


def test_training_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    for spec in ("loop", *FAST):
        train(spec, problem("batch-norm"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("width", [None, 11])
def test_the_grid_covers_every_plan(width: int | None) -> None:
    """Each client sees its own examples, in its own order, with weights that sum to one."""
    sizes = [45, 33, 20, 7, 1]
    orders = [batch_order(local("sgd(epochs=2, batch=8)"), n, 0, 1, i) for i, n in enumerate(sizes)]
    places = np.split(np.random.default_rng(0).permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    grid = lay_out(orders, places, width)
    assert grid.example.shape == (12, 5, width or 8)
    seen: list[list[int]] = [[] for _ in sizes]
    drawn: list[list[int]] = [[] for _ in sizes]
    for step, active in enumerate(grid.active):
        assert np.allclose(grid.weight[step].sum(-1), np.arange(5) < active)
        for row in range(5):
            real = grid.weight[step, row] > 0
            seen[row] += grid.example[step, row, real].tolist()
            drawn[row] += grid.draw[step, row, real].tolist()
    assert seen == [part[order.order].tolist() for part, order in zip(places, orders, strict=True)]
    assert np.concatenate(drawn).tolist() == list(range(sum(map(len, drawn))))


def test_groups_hold_every_active_client_once() -> None:
    orders = [batch_order(local("sgd(epochs=2, batch=8)"), n, 0, 1, i) for i, n in enumerate([45, 33, 20, 7, 1])]
    grid = lay_out(orders, [np.arange(n) for n in (45, 33, 20, 7, 1)])
    for step, active in enumerate(grid.active):
        groups = [(np.arange(5)[rows].tolist(), size) for rows, size in grid.groups(step)]
        assert sorted(row for rows, _ in groups for row in rows) == list(range(active))
        assert all(grid.size[step, row] == size for rows, size in groups for row in rows)


def test_auto_compiles_where_that_pays() -> None:
    """From 10,000 steps on, for cohorts of one size; each client has 20 examples, 3 steps per epoch in batches of 8."""
    few, many = problem(spec="sgd(batch=8)"), problem(spec="sgd(epochs=10, batch=8)")
    compiled = "stacked(compile=true)" if has_compiler() else "stacked"
    assert str(choose("auto", few, rounds=3000)) == "stacked"
    assert str(choose("auto", many, rounds=334)) == compiled
    assert str(choose("auto", many, rounds=334, size_varies=True)) == "stacked"
    assert str(choose("auto", problem("batch-norm", "sgd(epochs=10, batch=8)"), rounds=334)) == "stacked"
    assert str(choose("loop", many, rounds=334)) == "loop"
    many.model.append(nn.Dropout(0.5))  # type: ignore[operator]
    assert str(choose("auto", many, rounds=334)) == "loop"


def test_an_engine_that_cannot_train_a_model_is_refused_before_it_runs() -> None:
    dropping = problem()
    dropping.model.append(nn.Dropout(0.5))  # type: ignore[operator]
    cases = {
        "stacked": (dropping, "layer '4' is a random Dropout; use engine=loop"),
        "stacked(compile=true)": (problem("batch-norm"), "compiling needs a model without buffers"),
        "graphs": (problem(), "the model is on cpu; move it to a CUDA device"),
    }
    for spec, (task, reason) in cases.items():
        assert reason in engine(spec).supports(task)
        with pytest.raises(SpecError, match=reason):
            choose(spec, task)
    assert not any(engine(by).supports(problem()) for by in ("loop", "stacked", "stacked(compile=true)"))
    assert not engine("loop").supports(dropping)


class Eager(Engine):
    """Says that it takes everything, and trains wrong."""

    priority, needs_trial = 9, True

    def supports(self, problem: Problem) -> str:
        return ""

    def train(self, problem: Problem, *given: Any, **named: Any) -> CohortUpdate:
        right = engine("loop").train(problem, *given, **named)
        return right._replace(delta=2 * right.delta)


def test_auto_knows_engines_by_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new engine is asked in the order of its priority, and tried where it says that only a trial shows."""
    new = dataclasses.dataclass(frozen=True)(Eager)
    known = table._REGISTRY["engine"]
    new.name = "eager"
    monkeypatch.setitem(known, "eager", new)
    assert choose("auto", problem()).name == "stacked"
    monkeypatch.setattr(new, "needs_trial", False)
    assert choose("auto", problem()).name == "eager"
    monkeypatch.setattr(new, "priority", -1)
    assert choose("auto", problem()).name == "stacked"


# -- every registered model --------------------------------------------------------------------------------------------

SMALL = {
    "resnet18": "resnet18(width=4)",
    "convmixer": "convmixer(dim=8, depth=2)",
    "mlp": "mlp(hidden=8)",
    "lstm": "lstm(hidden=4)",
    "transformer": "transformer(dim=8, depth=2)",
}


def small_problem(name: str, sizes: tuple[int, ...], dtype: torch.dtype, spec: str) -> Problem:
    """A registered model in miniature, and clients with so many images, or sequences of tokens with targets each."""
    small, draw = models.model(SMALL.get(name, name)), torch.Generator().manual_seed(0)
    if small.takes_tokens:
        shape, loss = (5,), character_loss
        pairs = [[torch.randint(0, 4, (n, *shape), generator=draw) for _ in "xy"] for n in sizes]
    else:
        shape, loss = (3, 16, 16), per_example if name != "point" else (lambda out, y: out.flatten(1).square().sum(-1))
        pairs = [
            [torch.randn(n, *shape, dtype=dtype, generator=draw), torch.randint(0, 4, (n,), generator=draw)]
            for n in sizes
        ]
    net = models.build(small, shape, 4, seed=0).to(dtype)
    return Problem(net, loss, {i: (x, y) for i, (x, y) in enumerate(pairs)}, local(spec))


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("name", registered("model"))
@pytest.mark.parametrize(
    ("dtype", "spec", "tolerance"),
    [
        (torch.float64, "sgd(lr=0.05, batch=4)", 1e-9),
        (torch.float32, "sgd(lr=0.05, steps=1, batch=4)", 1e-5),
    ],
)
def test_every_registered_model(fast: str, name: str, dtype: torch.dtype, spec: str, tolerance: float) -> None:
    """A whole round in float64, one step in float32, with clients of uneven size."""
    pair = [small_problem(name, (8, 6, 4), dtype, spec) for _ in range(2)]
    if reason := engine(fast).supports(pair[0]):
        assert name == "lstm", reason
    else:
        assert_close(train(fast, pair[0]), train("loop", pair[1]), tolerance)
