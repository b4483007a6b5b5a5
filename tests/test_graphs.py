"""The engine `graphs`: programs and packing in plain PyTorch on a CPU, kernels and graphs on a GPU."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from cohort_updates import assert_close, start_of
from fedcams import Layout, models
from fedcams.engines import Problem, Shards, choose, engine
from fedcams.engines.batches import Batches
from fedcams.engines.graphs.block import ALIGN, Packing
from fedcams.engines.graphs.engine import check_device, check_loss, check_rule, check_values
from fedcams.engines.graphs.prepared import Prepared, prepared, refuse_single_values
from fedcams.engines.graphs.program import ConvNorm
from fedcams.engines.graphs.tiles import depth, power, splits, together
from fedcams.engines.graphs.translation import translate
from fedcams.errors import SpecError, UpdateError
from fedcams.local import local
from fedcams.models.networks.resnet import BasicBlock
from fedcams.tasks import CropFlip

SMALL = ["resnet18(width=4)", "convmixer(dim=8, depth=2)", "cnn(channels=4)", "mlp(hidden=8)", "linear"]
LOCALS = [
    "sgd(lr=0.05, epochs=2, batch=4)",
    "sgd(lr=0.1, momentum=0.9, weight_decay=0.01, clip=0.5, prox=0.3, steps=5, batch=3)",
    "adamw(lr=0.01, epochs=2, batch=4)",
    "adam(lr=0.01, weight_decay=0.1, epochs=2, batch=4)",
]
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="needs a CUDA device and Triton"
)


def per_example(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def problem(
    name: str,
    spec: str,
    sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    side: int = 16,
    seed: int = 0,
) -> Problem:
    draw = torch.Generator().manual_seed(seed)
    clients = {
        7 * i: (
            torch.randn(n, 3, side, side, dtype=dtype, generator=draw).to(device),
            torch.randint(0, 4, (n,), generator=draw).to(device),
        )
        for i, n in enumerate(sizes)
    }
    net = models.build(name, (3, side, side), 4, seed=0).to(device, dtype)
    return Problem(net, per_example, clients, local(spec), augment=CropFlip())


# -- the same steps in plain PyTorch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", LOCALS)
@pytest.mark.parametrize("name", SMALL)
def test_a_program_trains_as_the_loop_does(name: str, spec: str) -> None:
    """Uneven clients, a last partial batch, clients that are done before the others, and turns of two."""
    task = problem(name, spec, (8, 6, 3))
    x, buffers = start_of(task)
    truth = engine("loop").train(task, x, buffers, [0, 7, 14], round=2, seed=1)
    at_once, lanes = [(2, 1), (8, 2)][(SMALL.index(name) + LOCALS.index(spec)) % 2]  # each model and rule meets both
    ours = prepared(task).train(task, "float32", at_once, lanes, x, buffers, [0, 7, 14], round=2, seed=1)
    assert_close(ours, truth, 1e-9)


def losses_of_uneven_clients_are_those_of_the_loop(device: str, name: str) -> None:
    """Without examples, every batch-norm divides by the root of `eps`: with trained shifts, activations overflow."""
    task = problem("resnet18(width=16)", "sgd(lr=1e-3, epochs=1, batch=4)", (4, 16), torch.float32, device)
    for module in task.model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.constant_(module.bias, 3.0)
    x, buffers = start_of(task)
    truth = engine("loop").train(task, x, buffers, [0, 7], round=1, seed=0)
    if device == "cpu":
        ours = prepared(task).train(task, "float32", 8, 1, x, buffers, [0, 7], round=1, seed=0)
    else:
        ours = engine(name).train(task, x, buffers, [0, 7], round=1, seed=0)
    assert_close(ours, truth, 1e-4)


def test_clients_that_are_done_keep_their_loss() -> None:
    losses_of_uneven_clients_are_those_of_the_loop("cpu", "graphs")


@pytest.mark.parametrize("spec", LOCALS)
def test_rates_and_shifts_need_no_new_memory(spec: str) -> None:
    """Each round its own rate and shift, in turns of two, by one cohort with and one without a shift."""
    task = problem("convmixer(dim=8, depth=2)", spec, (8, 6, 3))
    (x, buffers), made = start_of(task), Prepared(task)
    shift = torch.randn(3, task.layout.d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for round, (rate, added) in enumerate(((0.05, None), (0.02, shift), (0.01, -shift), (0.03, None)), start=1):
        given = {"round": round, "seed": 1, "rate": rate, "shift": added}
        truth = engine("loop").train(task, x, buffers, [0, 7, 14], **given)
        ours = made.train(task, "float32", 2, 1, x, buffers, [0, 7, 14], **given)
        assert_close(ours, truth, 1e-9)
        assert ours.rate == truth.rate == rate
    assert len(made.cohorts) == 2


def test_a_rule_that_looks_at_shapes_is_refused() -> None:
    """Coordinates are stored in an order of their own; there is none for a rule of whole tensors."""
    rule = local("adamw")
    check_rule(rule)
    object.__setattr__(rule, "elementwise", False)
    with pytest.raises(SpecError, match=r"engine=graphs: local=adamw needs the layout's own order; use engine=stacked"):
        check_rule(rule)


@pytest.mark.parametrize("name", SMALL)
def test_a_program_predicts_as_the_model_does(name: str) -> None:
    task = problem(name, LOCALS[0], (8, 6))
    x, buffers = start_of(task)
    inputs = task.clients[0][0]
    expected = engine("loop").predictor(task, x, buffers)(inputs)
    torch.testing.assert_close(prepared(task).predictor(task, "float32").of(x, buffers, task.prepare)(inputs), expected)


def test_every_row_may_start_elsewhere() -> None:
    task = problem("cnn(channels=4)", LOCALS[0], (8, 6))
    starts = torch.stack([start_of(task)[0], 2 * start_of(task)[0]])
    truth = engine("loop").train(task, starts, None, [0, 7], round=1, seed=0)
    assert_close(prepared(task).train(task, "float32", 8, 1, starts, None, [0, 7], round=1, seed=0), truth, 1e-9)


def test_batch_norm_takes_in_what_surrounds_it() -> None:
    """Every batch-norm of both models is one operation with its convolution, its sum and its activation."""
    resnet = list(translate(models.build("resnet18", (3, 32, 32), 10, seed=0)).operations.values())
    fused = [operation for operation in resnet if isinstance(operation, ConvNorm)]
    assert len(fused) == 17
    assert {operation.post for operation in fused} == {"relu"}
    assert sum(isinstance(operation.residual, ConvNorm) for operation in fused) == 3
    assert sum(isinstance(operation.residual, str) for operation in fused) == 5
    mixer = list(translate(models.build("convmixer", (3, 32, 32), 10, seed=0)).operations.values())
    assert [type(operation).__name__ for operation in mixer].count("ConvNorm") == 17
    assert {operation.pre for operation in mixer if isinstance(operation, ConvNorm)} == {"gelu"}


@pytest.mark.parametrize(
    ("layers", "refused"),
    [
        ([nn.Flatten(), nn.Linear(12, 4), nn.Dropout(0.5)], "call_module 2 is not supported"),
        ([nn.Conv2d(3, 6, 3, groups=3)], "layer '0' is Conv2d"),
        ([nn.Conv2d(3, 6, 3, dilation=2)], "layer '0' is Conv2d"),
        ([nn.BatchNorm2d(3)], "a batch-norm that follows no convolution"),
        ([nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, affine=False)], "a batch-norm without weights"),
        ([nn.Flatten(), nn.Linear(12, 4).requires_grad_(False)], "parameter '1.weight' is frozen"),
        ([nn.Conv2d(3, 3, 1), nn.GELU("tanh")], "an approximate GELU"),
        ([nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Linear(3, 3)], "a linear layer of images"),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(layers: list[nn.Module], refused: str) -> None:
    with pytest.raises(SpecError, match=f"{refused}.*use engine=stacked"):
        translate(nn.Sequential(*layers))


class Written(nn.Module):
    """A convolution, and something that is written rather than made of modules."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.written = nn.Conv2d(3, 3, 1), forward
        self.scale, self.relu = nn.Parameter(torch.ones(1)), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.written(self, self.conv(x))


@pytest.mark.parametrize(
    ("forward", "refused"),
    [
        (lambda model, x: F.gelu(x, approximate="tanh"), "an approximate GELU"),
        (lambda model, x: x + model.relu(x), "an in-place activation of values that are used again"),
        (lambda model, x: x + F.relu(x, inplace=True), "an in-place activation of values that are used again"),
        (lambda model, x: x.mean((2, 3), keepdim=True), "is not supported"),
        (lambda model, x: x.mean((2, 3), True), "is not supported"),
        (lambda model, x: x * model.scale, "a separate tensor"),
        (lambda model, x: model.relu(input=x), "a call with keyword arguments"),
    ],
)
def test_what_it_would_get_wrong_is_refused(forward: Callable[[nn.Module, Tensor], Tensor], refused: str) -> None:
    with pytest.raises(SpecError, match=f"{refused}.*use engine=stacked"):
        translate(Written(forward))


def test_a_model_that_cannot_be_traced_is_refused_with_the_first_sentence_of_torchs_reason() -> None:
    with pytest.raises(SpecError) as refused:
        translate(Written(lambda model, x: torch.stack(list(x))))  # torch explains at length what a Proxy is
    said = "engine=graphs cannot follow Written (Proxy object cannot be iterated); use engine=stacked"
    assert str(refused.value) == said


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())
    model[1].register_forward_hook(lambda module, given, found: 2 * found)
    return model


def masked() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    model[0].weight.register_hook(torch.zeros_like)
    return model


class Frozen(nn.Sequential):
    """Keeps its batch-norm in evaluation mode, as fine-tuning of detectors does."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self[1].eval()
        return self


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        (Written(lambda model, x: (x, model.conv(x))[0]), "computes something that its outputs do not use"),
        (masked(), "parameter '0.weight' has a hook on its gradient"),
        (Frozen(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), "layer '1' evaluates in training"),
        (Written(lambda model, x: x + x if model.training else x), "the model branches on its mode"),
        (Written(lambda model, x: x + x if model.training else x).eval(), "the model branches on its mode"),
        (Written(lambda model, x: model.conv(torch.relu(x))), "layer 'conv' is used 2 times"),
        (hooked(), "layer '1' has a hook"),
        (nn.Sequential(weight_norm(nn.Conv2d(3, 3, 1))), "layer '0' has a hook or a parametrization"),
    ],
)
def test_what_tracing_does_not_show_is_refused(model: nn.Module, refused: str) -> None:
    mode = model.training
    with pytest.raises(SpecError, match=f"{refused}.*use engine="):
        translate(model)
    assert model.training == mode


class Broadcasting(nn.Module):
    """Adds one channel to all others."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.norm, self.one = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.many(x)) + self.one(x)).mean((2, 3))


@pytest.mark.parametrize(
    ("model", "shape", "refused"),
    [
        (Broadcasting(), (3, 3, 3), r"'add' gets \[1, 4, 3, 3\] and \[1, 1, 3, 3\]"),
        (nn.Sequential(nn.Linear(3, 3), nn.Flatten()), (3, 3, 3), r"'_0' gets \[1, 3, 3, 3\]"),
        (nn.Sequential(nn.Linear(3, 3), nn.Flatten()), (5, 3), r"'_0' gets \[1, 5, 3\]"),
        (nn.Sequential(nn.Conv2d(3, 3, 1)), (3, 3, 3), r"'output' gets \[1, 3, 3, 3\]"),
    ],
)
def test_values_that_kernels_would_take_for_others_are_refused(
    model: nn.Module, shape: tuple[int, ...], refused: str
) -> None:
    """A sum that broadcasts would read past the end of the smaller one, and a linear layer would mix channels."""
    translate(model)
    with pytest.raises(SpecError, match=f"{refused}.*use engine=stacked"):
        check_values(Problem(model, per_example, {0: (torch.ones(2, *shape), torch.zeros(2))}, local("sgd")))


@pytest.mark.parametrize("name", SMALL)
def test_what_models_compute_has_the_shapes_that_kernels_take(name: str) -> None:
    check_values(problem(name, "sgd", (3,)))


def test_an_activation_may_write_over_what_only_it_uses() -> None:
    program = translate(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)))
    assert [operation.post for operation in program.operations.values()] == ["relu"]


def test_a_batch_of_one_value_is_refused_with_its_client() -> None:
    task = problem("resnet18(width=4)", "sgd(batch=4)", (8, 5), side=8)  # the last stage has one pixel
    with pytest.raises(UpdateError, match="client 7: Expected more than 1 value per channel"):
        prepared(task).train(task, "float32", 8, 1, *start_of(task), [0, 7], round=1, seed=0)


@pytest.mark.parametrize("training", [True, False])
def test_asking_whether_it_can_train_leaves_the_mode_of_the_model(training: bool) -> None:
    task = problem("resnet18(width=4)", "sgd(batch=4)", (8, 5), side=8)
    task.model.train(training)
    check_loss(task)
    with pytest.raises(UpdateError, match="client 7"):
        refuse_single_values(task, [7], Batches(task, [7], 1, 0, 1))
    assert {module.training for module in task.model.modules()} == {training}
    assert not any(module._forward_pre_hooks for module in task.model.modules())


def test_a_loss_that_is_a_mean_is_refused() -> None:
    task = problem("mlp(hidden=8)", "sgd", (4,))
    check_loss(task)
    mean = Problem(task.model, F.cross_entropy, task.clients, task.local)
    with pytest.raises(SpecError, match=r"needs the loss of each example, got shape \[\]; use engine=loop"):
        check_loss(mean)
    with pytest.raises(SpecError, match="needs the loss of each example"):
        prepared(mean).train(mean, "float32", 8, 1, *start_of(mean), [0], round=1, seed=0)


def test_a_loss_that_mixes_examples_is_refused() -> None:
    """It would mix clients as well: the engine computes the losses of a whole cohort at once."""
    task = problem("mlp(hidden=8)", "sgd", (4,))

    def penalised(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none") + 0.1 * outputs.mean(0).square().sum()

    with pytest.raises(SpecError, match="the loss of an example depends on the others in its batch; use engine=loop"):
        check_loss(dataclasses.replace(task, loss=penalised))


def test_an_old_triton_or_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(SpecError, match=r"Tesla T4 has compute capability 7\.5; use a device with 8\.0 or more"):
        check_device(torch.device("cuda"))
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.raises(SpecError, match=r"Triton 3\.5\.1 is too old for its kernels; install torch 2\.11 or later"):
        check_device(torch.device("cuda"))


def test_without_a_gpu_it_says_what_to_do() -> None:
    task = problem("mlp(hidden=8)", "sgd", (4,))
    with pytest.raises(SpecError, match="the model is on cpu; move it to a CUDA device, or use engine=stacked"):
        engine("graphs").train(task, *start_of(task), [0], round=1, seed=0)
    assert choose("auto", task).name == "stacked"


# -- packing, plans, tiles ---------------------------------------------------------------------------------------------


def test_packing_is_aligned_and_exact() -> None:
    layout = Layout(("a", "b", "c"), ((5, 3, 2, 2), (7,), (4, 1, 3, 3)))
    packing = Packing.of(layout, {"a": (0, 2, 3, 1), "c": (2, 3, 1, 0)})
    rows = torch.randn(2, layout.d)
    block = torch.full((2, packing.width), -1.0)
    packing.pack(rows, block)
    assert all(place.start % ALIGN == 0 for place in packing.places.values())
    parts = layout.split(rows)
    assert torch.equal(packing.view(block, "a"), parts["a"].permute(0, 1, 3, 4, 2))
    assert torch.equal(packing.view(block, "c"), parts["c"].permute(0, 3, 4, 2, 1))
    assert int((block == -1).sum()) == 2 * (packing.width - layout.d), "what lies between tensors is left alone"
    back = torch.zeros_like(rows)
    packing.unpack(block, back)
    assert torch.equal(back, rows)


def test_rows_without_a_client_have_nothing_to_do() -> None:
    task = problem("mlp(hidden=8)", "sgd(epochs=2, batch=8)", (20, 7, 33))
    batches = Batches(task, [0, 7, 14], round=1, seed=0, clients=4)
    assert batches.weight.shape == (10, 4, 8)
    assert not batches.sizes[:, 3].any()
    assert not batches.weight[:, 3].any()
    assert batches.sizes.sum(0).tolist() == [40, 14, 66, 0]


def test_a_pool_and_gathered_clients_give_the_same_batches() -> None:
    task = problem("mlp(hidden=8)", "sgd(batch=4)", (8, 6, 3))
    x, y = (torch.cat(column).flip(0) for column in zip(*task.clients.values(), strict=True))
    parts = {0: np.arange(16, 8, -1), 7: np.arange(8, 2, -1), 14: np.arange(2, -1, -1)}
    held = Shards(x, y, [parts.get(client, np.arange(0)) for client in range(15)])
    pooled = Problem(task.model, task.loss, held, task.local, augment=task.augment)
    plain, ours = (Batches(each, [7, 14], round=1, seed=0, clients=2) for each in (task, pooled))
    real = plain.weight > 0
    assert torch.equal(ours.inputs(0, 2)[real], plain.inputs(0, 2)[real])
    assert torch.equal(ours.targets(0, 2)[real], plain.targets(0, 2)[real])


def test_sizes_of_tiles() -> None:
    assert [power(n, 16, 128) for n in (1, 16, 17, 100, 1000)] == [16, 16, 32, 128, 128]
    assert [depth(n, 64) for n in (3, 16, 48, 96, 256)] == [0, 16, 16, 32, 64]
    assert splits(tiles=90, rows=20480, precision="bf16") == 3
    assert splits(tiles=1440, rows=320, precision="bf16") == 1
    assert splits(tiles=1440, rows=1280, precision="float32") == 3
    assert [together(20, others) for others in (80, 40, 400, 1)] == [5, 3, 1, 1]


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def exact() -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


@on_gpu
@pytest.mark.parametrize("name", ["resnet18(width=16)", "convmixer(dim=32, depth=2)", "cnn", "mlp"])
def test_one_step_on_a_gpu_is_that_of_the_loop(name: str) -> None:
    """In float32 without TF32: clients of uneven size, one of them with a partial batch."""
    exact()
    task = problem(name, "sgd(lr=0.01, steps=1, batch=8)", (8, 5, 16), torch.float32, "cuda")
    x, buffers = start_of(task)
    truth = engine("loop").train(task, x, buffers, [0, 7, 14], round=1, seed=0)
    ours = engine("graphs(precision=float32)").train(task, x, buffers, [0, 7, 14], round=1, seed=0)
    assert_close(ours, truth, 1e-5)
    inputs = task.clients[14][0]
    expected = engine("loop").predictor(task, x, buffers)(inputs)
    found = engine("graphs(precision=float32)").predictor(task, x, buffers)(inputs)
    assert float((found - expected).detach().norm()) <= 1e-5 * float(expected.detach().norm())


@on_gpu
def test_clients_that_are_done_keep_their_loss_on_a_gpu() -> None:
    exact()
    losses_of_uneven_clients_are_those_of_the_loop("cuda", "graphs(precision=float32)")


@on_gpu
def test_a_round_on_a_gpu_repeats_bit_for_bit_and_in_turns() -> None:
    task = problem("resnet18(width=16)", "sgd(lr=0.01, epochs=2, batch=8)", (8, 5, 16), torch.float32, "cuda")
    x, buffers = start_of(task)
    first, again = (engine("graphs").train(task, x, buffers, [0, 7, 14], round=1, seed=0) for _ in range(2))
    assert torch.equal(first.delta, again.delta)
    turns = engine("graphs(clients=2)").train(task, x, buffers, [0, 7, 14], round=1, seed=0)
    assert float((turns.delta - first.delta).norm()) <= 0.05 * float(first.delta.norm())
    assert choose("auto", task).name == "graphs"


@on_gpu
@pytest.mark.parametrize("spec", LOCALS)
def test_one_graph_serves_every_rate(spec: str) -> None:
    """A rate given is that of the rule to the bit, after graphs were captured with another; and so without a shift."""
    exact()
    task = problem("resnet18(width=16)", spec, (8, 5, 16), torch.float32, "cuda")
    (x, buffers), made = start_of(task), Prepared(task)
    rule = dataclasses.replace(task.local, lr=0.02)  # type: ignore[type-var]
    own = Prepared(task).train(
        dataclasses.replace(task, local=rule), "float32", 8, 2, x, buffers, [0, 7, 14], round=1, seed=0
    )
    for rate in (0.5, 0.02):
        given = made.train(task, "float32", 8, 2, x, buffers, [0, 7, 14], round=1, seed=0, rate=rate)
    assert torch.equal(given.delta, own.delta)
    assert len(made.cohorts) == 1
    shift = torch.zeros(3, task.layout.d, device="cuda")
    unfused = made.train(task, "float32", 8, 2, x, buffers, [0, 7, 14], round=1, seed=0, rate=0.02, shift=shift)
    assert float((unfused.delta - own.delta).norm()) <= 0.05 * float(own.delta.norm())


def against_float64(task: Problem, by: str) -> float:
    """‖Δ - Δ₆₄‖/‖Δ₆₄‖ of one step by an engine in float32, where Δ₆₄ is what the loop gets in float64."""
    x, buffers = start_of(task)
    wide = dataclasses.replace(
        task,
        model=copy.deepcopy(task.model).double(),
        clients={client: (images.double(), labels) for client, (images, labels) in task.clients.items()},
    )
    held = None if buffers is None else buffers.double()
    truth = engine("loop").train(wide, x.double(), held, list(task.clients), round=1, seed=0).delta
    found = engine(by).train(task, x.clone(), buffers, list(task.clients), round=1, seed=0).delta
    return float((found.double() - truth).norm() / truth.norm())


class Smooth(BasicBlock):
    """Without kinks."""

    def forward(self, x: Tensor) -> Tensor:
        out = F.gelu(self.bn1(self.conv1(x)))
        return F.gelu(self.bn2(self.conv2(out)) + self.shortcut(x))


@on_gpu
@pytest.mark.parametrize("name", ["resnet18", "convmixer"])
def test_one_step_of_a_full_model_in_float32_is_exact_where_it_is_smooth(name: str) -> None:
    """Within 1e-5 of ‖Δ‖; a rate of one keeps the rounding of Δ itself, a difference of weights, below that."""
    exact()
    task = problem(name, "sgd(lr=1, steps=1, batch=20)", (20, 13), torch.float32, "cuda", side=32)
    for module in task.model.modules():
        if isinstance(module, BasicBlock):
            module.__class__ = Smooth
    assert against_float64(task, "graphs(precision=float32)") <= 1e-5


@on_gpu
def test_one_step_of_resnet18_in_float32_is_as_exact_as_that_of_the_loop() -> None:
    """A ReLU whose input is zero up to rounding may switch, in either engine: that alone moves Δ by up to a percent.

    On a CPU the loop's step is free of that for 3 of 16 seeds: of 32 some are, in both engines, and those are exact.
    """
    exact()
    errors: dict[str, list[float]] = {"loop": [], "graphs(precision=float32)": []}
    for seed in range(32):
        task = problem("resnet18", "sgd(lr=1, steps=1, batch=20)", (20,), torch.float32, "cuda", side=32, seed=seed)
        for by, found in errors.items():
            found.append(against_float64(task, by))
    theirs, ours = errors.values()
    assert max(ours) <= 5 * max(*theirs, 1e-3), errors
    assert min(ours) <= 5 * max(min(theirs), 1e-5), errors
