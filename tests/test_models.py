"""The contract of every registered model, and the sizes that the paper gives."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedcams import Layout
from fedcams.errors import SpecError
from fedcams.models import Model, build, model
from fedcams.registry import params, registered, resolve
from together import together

SHAPE, CLASSES = (3, 8, 8), 5
MODELS = [model(spec) for cls in registered("model").values() for spec in cls.examples]
CLASSIFIERS = [spec for spec in MODELS if spec.name != "point"]  # which starts at zero and gives back w - x
OF_NUMBERS = [spec for spec in CLASSIFIERS if not spec.takes_tokens]
OF_TOKENS = [spec for spec in MODELS if spec.takes_tokens]
LENGTH = 7
everyone = pytest.mark.parametrize("spec", MODELS, ids=str)


def examples(*lead: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(*lead, *shape, generator=torch.Generator().manual_seed(1))


def tokens(*lead: int) -> Tensor:
    return torch.randint(0, CLASSES, (*lead, LENGTH), generator=torch.Generator().manual_seed(1))


def inputs(spec: Model, *lead: int) -> Tensor:
    return tokens(*lead) if spec.takes_tokens else examples(*lead)


def built(spec: str | Model, seed: int) -> nn.Module:
    return build(spec, (LENGTH,) if model(spec).takes_tokens else SHAPE, CLASSES, seed)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def warmed_up(spec: Model, seed: int) -> nn.Module:
    """In eval mode, after one batch in train mode, so that batch-norm statistics differ between seeds."""
    module = built(spec, seed)
    module(inputs(spec, 6) + (0 if spec.takes_tokens else seed))
    return module.eval()


@together(
    ("spec", "classes", "count"),
    [
        ("resnet18", 10, 11_173_962),
        ("resnet18", 100, 11_220_132),
        ("convmixer", 10, 594_186),
        ("mlp", 10, 3072 * 128 + 128 + 128 * 10 + 10),
        ("linear", 10, 30_730),
        ("linear(bias=false)", 10, 30_720),
        ("cnn", 10, 3 * 9 * 8 + 8 + 8 * 9 * 16 + 16 + 16 * 8 * 8 * 10 + 10),
        ("point", 10, 3072),
    ],
)
def test_parameters_for_cifar(spec: str, classes: int, count: int) -> None:
    assert Layout.of(build(spec, (3, 32, 32), classes, seed=0)).d == count


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        # 820,522 in Adaptive Federated Optimization, which has a vocabulary of 90 and one bias where torch has two
        ("lstm", 820_522 + 2 * 4 * 256 - 4 * (8 + 256 + 1)),
        ("transformer", 86 * 128 + 80 * 128 + 4 * (12 * 128**2 + 13 * 128) + 2 * 128 + 129 * 86),
    ],
)
def test_parameters_for_shakespeare(spec: str, count: int) -> None:
    assert Layout.of(build(spec, (80,), 86, seed=0)).d == count


@pytest.mark.parametrize("spec", OF_TOKENS, ids=str)
def test_predictions_depend_on_all_tokens_before_and_none_after(spec: Model) -> None:
    module, x = built(spec, seed=0), tokens(2)
    place = 3
    changed = x.clone()
    changed[:, place] = (x[:, place] + 1) % CLASSES
    before, after = module(x), module(changed)
    assert before.shape == (2, LENGTH, CLASSES)
    assert torch.equal(before[:, :place], after[:, :place])
    assert bool((before[:, place:] != after[:, place:]).any(-1).all())


@everyone
def test_it_documents_itself(spec: Model) -> None:
    cls = type(spec)
    assert cls.__doc__
    assert cls.reference
    assert all(param.doc for param, _ in params(cls).values())
    for example in cls.examples:
        assert str(model(example)) == example
    for refused, message in cls.refused:
        with pytest.raises(SpecError, match=message):
            resolve("model", refused)


@together("spec", OF_NUMBERS, ids=str)
@together("shape", [(1, 8, 8), (3, 32, 32), (3, 9, 13)], ids=str)
def test_outputs(spec: Model, shape: tuple[int, ...]) -> None:
    module = build(spec, shape, CLASSES, seed=0).eval()
    with torch.no_grad():
        outputs = module(examples(2, shape=shape))
    assert outputs.shape == (2, CLASSES)
    assert bool(outputs.isfinite().all())
    assert float(outputs.std()) > 0


def test_a_point_gives_the_way_to_it() -> None:
    module = build("point", (2, 3), CLASSES, seed=0)
    x = examples(4, shape=(2, 3))
    assert torch.equal(module(x), -x.flatten(1))


@everyone
def test_the_seed_decides(spec: Model) -> None:
    first = state(built(spec, seed=7))
    assert same(first, state(built(str(spec), seed=7)))
    if spec in CLASSIFIERS:
        assert not same(first, state(built(spec, seed=8)))


@everyone
def test_no_trace_in_the_global_generators(spec: Model) -> None:
    before = torch.get_rng_state(), random.getstate()
    first = state(built(spec, seed=0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    with torch.random.fork_rng(devices=[]), torch.device("meta"):  # nor does what stands around it matter
        torch.default_generator.manual_seed(5)
        assert same(first, state(built(spec, seed=0)))


@everyone
def test_every_parameter_learns_and_nothing_works_in_place(spec: Model) -> None:
    module = built(spec, seed=0)
    x = inputs(spec, 6)
    before = x.clone()
    module(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
    assert torch.equal(x, before)
    assert not any(getattr(part, "inplace", False) for part in module.modules())


@pytest.mark.parametrize("spec", [spec for spec in MODELS if spec.name != "lstm"], ids=str)
def test_vmap_over_clients_is_a_loop(spec: Model) -> None:
    """In eval mode: outputs and gradients of clients that differ in parameters and statistics."""
    modules = [warmed_up(spec, seed) for seed in (0, 1)]
    skeleton = copy.deepcopy(modules[0]).to("meta")
    parameters, buffers = stack_module_state(modules)
    x = inputs(spec, 2, 3)

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        outputs: Tensor = functional_call(skeleton, (parameters, buffers), (x,))
        return outputs.square().mean(), outputs

    gradients, outputs = vmap(grad(loss, has_aux=True))(parameters, buffers, x)
    for client, module in enumerate(modules):
        expected = module(x[client])
        expected.square().mean().backward()
        torch.testing.assert_close(outputs[client], expected.detach(), rtol=1e-4, atol=1e-5)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name][client], parameter.grad, rtol=1e-3, atol=1e-5)


@everyone
def test_a_functional_call_is_a_call(spec: Model) -> None:
    """In train mode, one client: the same outputs, and statistics go to the buffers that were handed in."""
    module = built(spec, seed=0)
    untouched, handed_in = state(module), state(module)
    outputs = functional_call(module, handed_in, (inputs(spec, 6),))
    assert same(state(module), untouched)
    # without gradients, the CPU's LSTM rounds in another order
    torch.testing.assert_close(outputs, module(inputs(spec, 6)).detach(), rtol=0, atol=1e-6 if spec.takes_tokens else 0)
    assert same(state(module), handed_in)


@together(
    ("spec", "shape", "classes", "message"),
    [
        ("resnet18", (64,), 10, r"resnet18: an example has shape \[64\]; it takes images"),
        ("cnn(channels=4)", (1, 3, 8), 10, r"cnn\(channels=4\): .* of at least 4x4"),
        ("convmixer", (1, 8, 1), 10, "of at least 2x2"),
        ("lstm", (3, 8, 8), 10, r"lstm: an example has shape \[3, 8, 8\]; it takes sequences of tokens"),
        ("transformer", (3, 8, 8), 10, "it takes sequences of tokens"),
        ("mlp", (), 10, "give sizes of at least 1"),
        ("mlp", (3, 0), 10, "give sizes of at least 1"),
        ("mlp", (3,), 0, "classes=0: give sizes of at least 1"),
        ("resnet81", (3, 8, 8), 10, "did you mean 'resnet18'"),
    ],
)
def test_what_does_not_fit_is_refused(spec: str, shape: tuple[int, ...], classes: int, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build(spec, shape, classes, seed=0)
