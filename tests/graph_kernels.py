"""The kernels of the engine `graphs` against plain PyTorch, on a CUDA device or interpreted on the CPU.

`tests/test_graph_kernels.py` runs this file in a separate process, with TRITON_INTERPRET=1 where there is no CUDA
device: the interpreter must be chosen before Triton is imported. It knows no tensor cores, so every path is taken with
float32 numbers there, those of bfloat16 as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from triton.runtime import interpreter

from cohort_updates import assert_close, start_of
from fedcams.engines import Problem, engine
from fedcams.engines.captured.convolutions import (
    convolve,
    convolve_gradient_input,
    convolve_gradient_weight,
    use_kernels_,
)
from fedcams.engines.captured.staging import as_channels_last
from fedcams.engines.captured.step import Batch, Computing, Memory, record_step, run_compiled, take_step_
from fedcams.engines.graphs import launch, launch_norms
from fedcams.engines.graphs.kernels.convolution import activate, slope
from fedcams.engines.graphs.launch import Epilogue, Slot
from fedcams.engines.graphs.launch_norms import Normalized
from fedcams.engines.graphs.prepared import Prepared
from fedcams.engines.graphs.program import Conv
from fedcams.errors import SpecError
from fedcams.models.networks.convmixer import GlobalAverage
from fedcams.models.networks.resnet import BasicBlock
from fedcams.optimizers import server
from test_graphs import problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {"float32": 1e-5, "tf32": 2e-3, "bf16": 1e-2}
IMAGES = 5 if DEVICE == "cuda" else 2
SIDE = 10 if DEVICE == "cuda" else 6
PRECISIONS = ["float32", "tf32", "bf16"] if DEVICE == "cuda" else ["float32", "bf16"]


@pytest.fixture(autouse=True)
def _no_overflow_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes half its time to see that no index is over 2**31, as none can be in arrays so small."""
    if DEVICE == "cpu":
        unchecked = interpreter.InterpreterOptions(sanitize_overflow=False)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", unchecked)


@pytest.fixture(autouse=True)
def _one_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter patches `tl` for a kernel, and again for each function that the kernel calls: once will do."""

    def call(function: interpreter.InterpretedFunction, *args: object, **named: object) -> object:
        if function.fn.__globals__.get("tl") is not tl:  # one of Triton's own, which works on other modules
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **named)

    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


@pytest.fixture(autouse=True)
def _types_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter makes the type of every value anew, half of the time that is left: they are few, so keep them."""
    if DEVICE == "cpu":
        numpy_type, types = interpreter._get_np_dtype, dict[str, object]()
        fill_block = filled_once(tl.block_type.__init__, lambda element, shape: (element.name, *shape))
        fill_tensor = filled_once(tl.tensor.__init__, lambda handle, type: type.name)

        def known_type(type: tl.dtype) -> object:
            return types[type.name] if type.name in types else types.setdefault(type.name, numpy_type(type))

        def init_tensor(tensor: tl.tensor, handle: object, type: tl.dtype) -> None:
            fill_tensor(tensor, handle, type)
            tensor.handle = handle

        monkeypatch.setattr(interpreter, "_get_np_dtype", known_type)
        monkeypatch.setattr(tl.block_type, "__init__", fill_block)
        monkeypatch.setattr(tl.tensor, "__init__", init_tensor)


def filled_once(init: Callable[..., None], key: Callable[..., object]) -> Callable[..., None]:
    """A constructor that copies the attributes of the first object whose arguments had the same key."""
    known: dict[object, dict[str, object]] = {}

    def fill(made: object, *args: object) -> None:
        if (held := known.get(key(*args))) is not None:
            made.__dict__.update(held)
        else:
            init(made, *args)
            known[key(*args)] = dict(made.__dict__)

    return fill


@pytest.fixture(autouse=True)
def _exact() -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)


def randn(*shape: int, precision: str = "float32") -> Tensor:
    """Fresh numbers, in bfloat16 where there are tensor cores for it."""
    kind = torch.bfloat16 if precision == "bf16" and DEVICE == "cuda" else torch.float32
    return torch.randn(*shape, device=DEVICE).to(kind)


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, device=DEVICE)


def assert_near(mine: Tensor, truth: Tensor, precision: str = "float32") -> None:
    bound = TOLERANCE["float32" if DEVICE == "cpu" else precision]
    mine, truth = mine.detach().double(), truth.detach().double()
    assert float((mine - truth).norm()) <= bound * float(truth.norm())


# -- convolutions ------------------------------------------------------------------------------------------------------

GEOMETRIES = [
    (6, 64, 64, 3, 1),
    (7, 48, 32, 3, 2),
    (8, 64, 24, 1, 2),
    (9, 3, 16, 3, 1),
    (6, 16, 20, 2, 2),
    (1, 30, 10, 1, 1),
    (5, 4, 8, 7, 1),
]
LARGE = [(16, 64, 64, 3, 1), (32, 64, 64, 3, 1), (16, 128, 128, 3, 1), (8, 128, 64, 3, 2), (4, 512, 512, 3, 1)]
DENSE = GEOMETRIES + (LARGE if DEVICE == "cuda" else [])


def dense(kernel: int, stride: int, bias: str | None = None) -> Conv:
    return Conv("w", bias, (kernel, kernel), stride, 0 if kernel == stride else kernel // 2, depthwise=False)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("side", "inputs", "outputs", "kernel", "stride"), DENSE)
def test_convolutions(side: int, inputs: int, outputs: int, kernel: int, stride: int, precision: str) -> None:
    """Result and both gradients against float64; interpreted, one client where there are many channels."""
    conv = dense(kernel, stride)
    clients = 1 if DEVICE == "cpu" and inputs * outputs > 1000 else 2
    x = randn(clients, IMAGES, side, side, inputs, precision=precision)
    w = randn(clients, outputs, kernel, kernel, inputs, precision=precision)
    y, _ = launch.convolve(conv, x, w, None, precision)
    dy = torch.randn_like(y)
    dw = poisoned(*w.shape)
    launch.gradient_weight(conv, dy, x, Slot(dw), precision)
    found = (y, launch.gradient_input(conv, dy, x, w, precision), dw)
    for mine, truth in zip(found, reference(conv, x, w, dy), strict=True):
        assert_near(mine, truth, precision)


@pytest.mark.parametrize("depthwise", [False, True])
def test_more_numbers_than_kernels_can_count_are_refused(depthwise: bool) -> None:
    conv = Conv("w", None, (3, 3), 1, 1, depthwise)
    x = torch.empty(1, 512, 256, 256, 64 if depthwise else 3, device="meta")  # without memory
    w = torch.empty((1, 3, 3, 1, 64) if depthwise else (1, 64, 3, 3, 3), device="meta")
    with pytest.raises(SpecError, match=r"2,147,483,648 numbers for one batch .* fewer than 2\*\*31"):
        launch.convolve(conv, x, w, None, "float32")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("side", "channels", "kernel"), [(6, 16, 5), (7, 6, 3), (5, 16, 7)])
def test_depthwise_convolutions(side: int, channels: int, kernel: int, precision: str) -> None:
    conv = Conv("w", None, (kernel, kernel), 1, kernel // 2, depthwise=True)
    x = randn(2, IMAGES, side, side, channels, precision=precision)
    w = randn(2, kernel, kernel, 1, channels, precision=precision)
    y, _ = launch.convolve(conv, x, w, None, precision)
    dy = torch.randn_like(y)
    dw = poisoned(*w.shape)
    launch.gradient_weight(conv, dy, x, Slot(dw), precision)
    found = (y, launch.gradient_input(conv, dy, x, w, precision), dw)
    truths = reference(conv, x, w.permute(0, 4, 1, 2, 3), dy)
    for mine, truth in zip(found, (*truths[:2], truths[2].permute(0, 2, 3, 4, 1)), strict=True):
        assert_near(mine, truth, precision)


@pytest.mark.parametrize(("kernel", "stride", "depthwise"), [(3, 1, False), (1, 2, False), (3, 1, True)])
def test_the_gradient_of_an_input_is_added_to_what_is_known(kernel: int, stride: int, depthwise: bool) -> None:
    conv = Conv("w", None, (kernel, kernel), stride, kernel // 2, depthwise)
    x, w = randn(1, 2, 6, 6, 16), randn(1, 3, 3, 1, 16) if depthwise else randn(1, 16, kernel, kernel, 16)
    for precision in ("float32", "bf16"):
        dy, added = randn(1, 2, 6 // stride, 6 // stride, 16), randn(*x.shape)
        apart = launch.gradient_input(conv, dy, x, w, precision) + added
        torch.testing.assert_close(launch.gradient_input(conv, dy, x, w, precision, added), apart)


def reference(conv: Conv, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result and the gradients of x and w in float64, client after client."""
    rows = []
    for image, kernel, gradient in zip(x.double(), w.double(), dy.double(), strict=True):
        a, b = image.permute(0, 3, 1, 2).requires_grad_(), kernel.permute(0, 3, 1, 2).requires_grad_()
        y = forward(conv, a, b, None)
        da, db = torch.autograd.grad(y, (a, b), gradient.permute(0, 3, 1, 2))
        rows.append([each.detach().permute(0, 2, 3, 1) for each in (y, da, db)])
    y, da, db = (torch.stack(column) for column in zip(*rows, strict=True))
    return y, da, db


def forward(conv: Conv, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    groups = len(w) if conv.depthwise else 1
    return F.conv2d(x, w, bias, stride=conv.stride, padding=conv.padding, groups=groups)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("depthwise", [False, True])
def test_a_convolution_with_all_that_follows_it(depthwise: bool, residual: bool) -> None:
    """`relu(gelu(conv + bias) scale + shift + residual)`, as an evaluation takes it, on both paths of both kinds."""
    conv = Conv("w", "b", (3, 3), 1, 1, depthwise)
    x, bias = randn(1, 3, 7, 7, 16), randn(1, 16)
    w = randn(1, 3, 3, 1, 16) if depthwise else randn(1, 16, 3, 3, 16)
    scale, shift, added = randn(1, 16), randn(1, 16), randn(1, 3, 7, 7, 16)
    kernel = w[0].permute(3, 2, 0, 1) if depthwise else w[0].permute(0, 3, 1, 2)
    raw = forward(conv, x[0].permute(0, 3, 1, 2).double(), kernel.double(), bias[0].double()).permute(0, 2, 3, 1)
    truth = F.gelu(raw) * scale[0] + shift[0] + (added[0] if residual else 0)
    epilogue = Epilogue(added if residual else None, scale, shift, "gelu", "relu")
    for precision in ("float32", "bf16"):
        y, _ = launch.convolve(conv, x, w, bias, precision, epilogue=epilogue)
        assert_near(y[0], truth.relu(), "tf32" if precision == "bf16" else precision)


# -- activations -------------------------------------------------------------------------------------------------------


@triton.jit
def _activations(x, y, d, ACT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(y + at, activate(value, ACT))
    tl.store(d + at, slope(value, ACT))


@pytest.mark.parametrize(("number", "function"), [(1, F.relu), (2, F.gelu), (3, F.gelu)])
def test_activations_and_their_slopes(number: int, function: object) -> None:
    x = torch.linspace(-9, 9, 512, device=DEVICE, dtype=torch.float32)
    y, d = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    _activations[(1,)](x, y, d, ACT=number, BLOCK=512)
    wide = x.double().requires_grad_()
    truth = function(wide)  # type: ignore[operator]
    (slopes,) = torch.autograd.grad(truth.sum(), wide)
    torch.testing.assert_close(y.double(), truth.detach(), rtol=0, atol=2e-6)
    torch.testing.assert_close(d.double(), slopes, rtol=0, atol=2e-6)


# -- batch-norm --------------------------------------------------------------------------------------------------------

SIZES = [4, 1, 0]
"""Of a batch of 4: all real, partial, a client that is done."""


@pytest.mark.parametrize("kind", ["dense", "depthwise", "rolling"])
@pytest.mark.parametrize("pre", ["none", "gelu"])
def test_statistics_of_real_examples_alone(pre: str, kind: str) -> None:
    conv = Conv("w", None, (3, 3), 1, 1, kind != "dense")
    x, sizes = randn(3, 4, 5, 5, 16), torch.tensor(SIZES, device=DEVICE, dtype=torch.int32)
    w = randn(3, 3, 3, 1, 16) if conv.depthwise else randn(3, 16, 3, 3, 16)
    y, stats = launch.convolve(conv, x, w, None, "bf16" if kind == "rolling" else "float32", sizes, pre)
    assert stats is not None
    gamma, beta, mean, var = randn(3, 16), randn(3, 16), randn(3, 16), randn(3, 16).abs()
    running = mean.clone(), var.clone()
    moments = launch_norms.finalize(stats, sizes, (gamma, beta), running, 0.1, 1e-5, 25)
    for i, size in enumerate(SIZES):
        real = (F.gelu(y[i, :size].double()) if pre == "gelu" else y[i, :size].double()).flatten(0, -2)
        if not size:
            assert torch.equal(running[0][i], mean[i])
            assert torch.equal(running[1][i], var[i])
            continue
        rstd = (real.var(0, correction=0) + 1e-5).rsqrt()
        scale = gamma[i] * rstd
        truth = torch.stack([real.mean(0), rstd, scale, beta[i] - real.mean(0) * scale])
        assert_near(moments[i], truth)
        assert_near(running[0][i], 0.9 * mean[i] + 0.1 * real.mean(0))
        assert_near(running[1][i], 0.9 * var[i] + 0.1 * real.var(0))


@pytest.mark.parametrize(
    ("pre", "post", "residual"),
    [("none", "relu", 0), ("none", "relu", 1), ("none", "relu", 2), ("gelu", "none", 0), ("gelu", "none", 1)],
)
def test_normalization_and_its_gradients(pre: str, post: str, residual: int) -> None:
    """Against autograd in float64; the residual as it is (1) or normalised too (2). Padding has no gradient."""
    size, (clients, images, side, channels) = 3, (2, 4, 5, 40)
    x = randn(clients, images, side, side, channels)
    other = randn(*x.shape) if residual else None
    dy = randn(*x.shape)
    dy[:, size:] = 0
    gammas, betas = randn(2, clients, channels), randn(2, clients, channels)
    act = {"none": lambda t: t, "relu": torch.relu, "gelu": F.gelu}

    leaves = [t.double().requires_grad_() for t in (x, gammas, betas)]
    wide_other = None if other is None else other.double().requires_grad_()
    truth = [_plain_norm(act[pre](leaves[0]), leaves[1][0], leaves[2][0], size)]
    if wide_other is not None:
        normal = _plain_norm(wide_other, leaves[1][1], leaves[2][1], size)
        truth.append(normal if residual == 2 else wide_other)
    y = act[post](sum(truth))
    wanted = [*leaves, *([] if wide_other is None else [wide_other])]
    dx, dgamma, dbeta, *dother = torch.autograd.grad(y, wanted, dy.double())

    moments = [
        _moments(each, gammas[i], betas[i], size) for i, each in enumerate((act[pre](x), other)) if each is not None
    ]
    op = Normalized(x, moments[0], other, moments[1] if residual == 2 else None, pre, post)
    mine = launch_norms.normalize(op)
    assert_near(mine[:, :size], y[:, :size])
    sizes = torch.full((clients,), size, device=DEVICE, dtype=torch.int32)
    slots = tuple(poisoned(clients, channels) for _ in range(4 if residual == 2 else 2))
    bias = poisoned(clients, channels)
    found, found_other = launch_norms.normalize_backward(op, dy, mine, sizes, slots, bias)
    assert_near(found, dx)
    assert_near(slots[0], dgamma[0])
    assert_near(slots[1], dbeta[0])
    assert float((bias - dx.sum((1, 2, 3))).norm()) <= 1e-5 * float(dx.norm())
    if residual:
        assert found_other is not None
        assert_near(found_other, dother[0])
    if residual == 2:
        assert_near(slots[2], dgamma[1])
        assert_near(slots[3], dbeta[1])


def _plain_norm(x: Tensor, gamma: Tensor, beta: Tensor, size: int) -> Tensor:
    """Batch-norm of each client by itself; only the first examples count."""
    real = x[:, :size].flatten(1, -2)
    mean, var = real.mean(1)[:, None, None, None], real.var(1, correction=0)[:, None, None, None]
    scaled = (x - mean) * torch.rsqrt(var + 1e-5)
    return scaled * gamma[:, None, None, None] + beta[:, None, None, None]


def _moments(x: Tensor, gamma: Tensor, beta: Tensor, size: int) -> Tensor:
    real = x[:, :size].double().flatten(1, -2)
    mean, rstd = real.mean(1), (real.var(1, correction=0) + 1e-5).rsqrt()
    scale = gamma * rstd
    return torch.stack([mean, rstd, scale, beta - mean * scale], 1).float()


# -- descent and sums --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [False, True])
def test_descent_leaves_clients_that_are_done(copied: bool) -> None:
    values, gradient = randn(3, 4100), randn(3, 4100)
    before, copy = values.clone(), torch.zeros_like(values) if copied else None
    sizes, rates = torch.tensor([2, 0, 1], device=DEVICE, dtype=torch.int32), torch.tensor([0.1, 0.2, 0.3]).to(DEVICE)
    launch.descend_(values, gradient, copy, sizes, rates)
    truth = before - rates[:, None] * gradient
    truth[1] = before[1]
    torch.testing.assert_close(values, truth)
    if copy is not None:
        assert torch.equal(copy[[0, 2]], values[[0, 2]])


@pytest.mark.parametrize("count", [1, 3, 16, 70])
def test_parts_are_added(count: int) -> None:
    parts, out = randn(2, count, 70), poisoned(2, 70)
    launch.add_parts(parts, Slot(out))
    assert_near(out, parts.double().sum(1))


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("depthwise", [False, True])
def test_weights_may_step_where_their_gradient_is_made(depthwise: bool, images: int) -> None:
    """As the gradient and then the step; in one part or several; clients that are done stay as they are."""
    conv = Conv("w", None, (3, 3), 1, 1, depthwise)
    x, dy = randn(2, images, 16, 16, 4), randn(2, images, 16, 16, 4)
    w = randn(2, 3, 3, 1, 4) if depthwise else randn(2, 4, 3, 3, 4)
    sizes, gradient, before, copy = torch.tensor([3, 0], device=DEVICE), torch.empty_like(w), w.clone(), w.clone()
    launch.gradient_weight(conv, dy, x, Slot(gradient), "float32")
    launch.gradient_weight(conv, dy, x, Slot(w, copy, sizes.int(), torch.tensor([0.1, 0.2]).to(DEVICE)), "float32")
    torch.testing.assert_close(w[0], before[0] - 0.1 * gradient[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(w[1], before[1])
    assert torch.equal(copy, w)


# -- the server's step -------------------------------------------------------------------------------------------------

SERVERS = [
    "fedavg",
    "fedavgm",
    "fedadagrad",
    "fedadam",
    "fedyogi",
    "fedyogi(bias_correction=true)",
    "fedamsgrad",
    "fedams",
    "fedams(bias_correction=true)",
]


@pytest.mark.parametrize("spec", SERVERS)
def test_the_servers_step_as_one_kernel(spec: str) -> None:
    from fedcams.optimizers._fused import fused_step_

    optimizer = server(spec)
    mine = randn(1000)
    plain = mine.clone()
    held = {name: vector for name, vector in optimizer.init(mine)._asdict().items() if name != "t"}
    truth = [vector.clone() for vector in held.values()]
    for t in range(1, 4):
        delta = randn(1000) * 0.1
        fused_step_(optimizer, t, mine, delta, held)
        optimizer.update_(t, plain, delta, *truth)
    for ours, theirs in zip((mine, *held.values()), (plain, *truth), strict=True):
        torch.testing.assert_close(ours, theirs)


# -- whole steps -------------------------------------------------------------------------------------------------------

CNN, MLP = "cnn(channels=4)", "mlp(hidden=8)"
MODELS = ["residual", "convmixer(dim=8, depth=1)", CNN, MLP]
LOCALS = [
    "sgd(lr=0.05, epochs=1, batch=3)",
    "sgd(lr=0.1, momentum=0.9, weight_decay=0.01, clip=0.5, prox=0.3, steps=2, batch=3)",
]


def small(name: str, spec: str, sizes: tuple[int, ...]) -> Problem:
    """A problem of small images; `residual` has blocks with and without a projection, as ResNet-18 has."""
    if name != "residual":
        return problem(name, spec, sizes, torch.float32, DEVICE, side=SIDE)
    blocks = [BasicBlock(3, 8, 2), BasicBlock(8, 8, 1)]
    task = problem("linear", spec, sizes, torch.float32, DEVICE, side=SIDE)
    return dataclasses.replace(task, model=nn.Sequential(*blocks, GlobalAverage(), nn.Linear(8, 4)).to(DEVICE))


# The interpreter takes seconds for a model: there each of them and each rule once or twice, in place of all pairs.
STEPS = (
    [(name, spec) for name in MODELS for spec in LOCALS]
    if DEVICE == "cuda"
    else [*zip(MODELS, LOCALS * 2, strict=True)]
)


@pytest.mark.parametrize(("name", "spec"), STEPS)
def test_steps_of_whole_models(name: str, spec: str) -> None:
    """Two steps of uneven clients with a partial batch, one of which is done after the first; padding everywhere."""
    task = small(name, spec, (4, 2))
    x, buffers = start_of(task)
    truth = engine("loop").train(task, x, buffers, [0, 7], round=1, seed=0)
    assert_close(Prepared(task).train(task, "float32", 8, 2, x, buffers, [0, 7], round=1, seed=0), truth, 1e-4)


def test_adamw_rates_and_shifts_by_kernels() -> None:
    """By the rule's own step on what the kernels leave; a plain rule reads the rate of each round inside them."""
    adamw, plain = "adamw(eps=0.01, steps=2, batch=3)", LOCALS[0]
    for name, spec, shifted in ((MLP, adamw, False), (CNN, plain, False), (MLP, plain, True)):
        task = small(name, spec, (4, 2))
        (x, buffers), made = start_of(task), Prepared(task)
        shift = randn(2, task.layout.d) if shifted else None
        for rate in (0.1, 0.02):
            truth = engine("loop").train(task, x, buffers, [0, 7], round=1, seed=0, rate=rate, shift=shift)
            ours = made.train(task, "float32", 8, 2, x, buffers, [0, 7], round=1, seed=0, rate=rate, shift=shift)
            assert_close(ours, truth, 1e-4)
        assert len(made.cohorts) == 1


@pytest.mark.parametrize("name", MODELS)
def test_predictions_of_whole_models(name: str) -> None:
    task = small(name, LOCALS[0], (3,))
    x, buffers = start_of(task)
    inputs = task.clients[0][0]
    expected = engine("loop").predictor(task, x, buffers)(inputs)
    assert_near(Prepared(task).predictor(task, "float32").of(x, buffers, task.prepare)(inputs), expected)


# -- steps of the engine `captured` ------------------------------------------------------------------------------------

UNUSUAL = [
    pytest.param((1, 3, 1, 1), (5, 3, 3, 3), 1, 1, id="one pixel"),
    pytest.param((2, 1, 4, 1), (1, 1, 3, 1), 2, 1, id="one channel, one column"),
    pytest.param((2, 3, 5, 7), (4, 3, 5, 3), 2, 2, id="a rectangular kernel"),
    pytest.param((2, 3, 5, 6), (4, 3, 2, 2), 1, 5, id="more padding than kernel"),
    pytest.param((2, 3, 9, 8), (4, 3, 2, 3), 5, 1, id="more stride than kernel"),
]


@pytest.mark.parametrize(("images", "filters", "stride", "padding"), UNUSUAL)
def test_operations_of_unusual_shapes(
    images: tuple[int, ...], filters: tuple[int, ...], stride: int, padding: int
) -> None:
    """They compute what PyTorch does, and declare the shape, type and order in memory that they return."""
    x, weight = (as_channels_last(randn(*size, precision="bf16")).requires_grad_() for size in (images, filters))
    y = F.conv2d(x, weight, None, stride, padding)
    dy = as_channels_last(randn(*y.shape, precision="bf16"))
    truth = (y, *torch.autograd.grad(y, (x, weight), dy))
    operations = (convolve, convolve_gradient_input, convolve_gradient_weight)
    given = [(x, weight), (dy, x, weight), (dy, x, weight)]
    for operation, tensors, expected in zip(operations, given, truth, strict=True):
        arguments = [tensor.detach() for tensor in tensors]
        result = operation(*arguments, stride, padding)
        assert_near(result, expected, "bf16")
        with FakeTensorMode() as fake:
            declared = operation(*map(fake.from_tensor, arguments), stride, padding)
        assert (declared.shape, declared.dtype, declared.stride()) == (result.shape, result.dtype, result.stride())


def test_a_recorded_step_by_kernels() -> None:
    """Convolutions with and without a bias, one right after another, strided ones, and two that no kernel computes."""
    task = small("residual", "sgd(lr=0.05, batch=3)", (3,))
    first = [nn.Conv2d(3, 3, 3, padding=1, groups=3), nn.Conv2d(3, 4, 2), nn.Conv2d(4, 3, 3, padding=2, dilation=2)]
    task = dataclasses.replace(task, model=nn.Sequential(*first, *task.model).to(DEVICE).train())
    images, labels = task.clients[0]
    batch, (begin, _) = Batch(as_channels_last(images), labels, None), task.read()
    precision = "bf16" if DEVICE == "cuda" else "float32"
    how = Computing(precision, channels_last=True)
    mine, truth = (Memory.of(task, shifted=False) for _ in range(2))
    recorded = record_step(task, how, mine, {}, batch)
    for memory in (mine, truth):
        memory.row.copy_(begin)
        memory.rate.fill_(0.1)
        memory.loss.zero_()
    assert use_kernels_(recorded, torch.bfloat16 if DEVICE == "cuda" else torch.float32) == 2 * (1 + 5)
    run_compiled(recorded, mine, {}, batch)
    take_step_(task, how, truth, {}, batch)
    assert_near(mine.row - begin, truth.row - begin, precision)
    assert_near(mine.loss, truth.loss, precision)
