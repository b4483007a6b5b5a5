"""The engine `captured`: steps, random draws and memory, uncompiled on a CPU, compiled and captured on a GPU."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cohort_updates import assert_close, start_of
from fedcams.engines import CohortUpdate, Problem, choose, choose_with_reason, engine
from fedcams.engines.captured import Captured
from fedcams.engines.captured import seat as seats
from fedcams.engines.captured.convolutions import use_kernels_
from fedcams.engines.captured.keyed_draws import key_words, keyed_draws
from fedcams.engines.captured.prepared import prepared, takes_channels_last
from fedcams.engines.captured.staging import Staging, as_channels_last
from fedcams.engines.captured.step import Batch, Computing, Memory, frozen_parameters, record_step, take_step_
from fedcams.errors import SpecError, UpdateError
from fedcams.local import local
from fedcams.tasks import CropFlip

SIZES = (9, 4, 13)
RULES = [
    "sgd(lr=0.1, batch=4)",
    "sgd(lr=0.05, momentum=0.9, nesterov=true, weight_decay=0.01, epochs=2, batch=4)",
    "adam(lr=0.01, eps=1e-3, weight_decay=0.1, epochs=2, batch=4)",
    "adamw(lr=0.01, eps=1e-3, epochs=2, batch=4)",
]
"""Adam has a large `eps`, because it divides rounding errors by their own size where a gradient is zero."""
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Encoder(nn.Module):
    """A transformer that takes tokens and a mask by keywords and returns a dict; its dropout may be zero."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = self.layers(self.embedding(tokens), src_key_padding_mask=mask)
        return {"logits": self.head(hidden.mean(1))}


class Adapted(nn.Module):
    """A frozen layer with a small trained one next to it, as in LoRA."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.base(x) + self.up(self.down(x)))


def adapted() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 24).requires_grad_(False), Adapted(24), nn.Linear(24, 3))


def normed() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4, 3))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.Dropout(0.5), nn.ReLU(), nn.Linear(32, 3))


def of_dicts(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs["logits"], batch["label"], reduction="none")


def of_pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


MODELS = {"encoder": Encoder, "adapted": adapted, "normed": normed}


def problem(
    model: str | nn.Module, spec: str, sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> Problem:  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = (MODELS[model]() if isinstance(model, str) else model).to(device, dtype)
    clients: dict[int, Any] = {}
    for i, n in enumerate(sizes):
        labels = torch.randint(0, 3, (n,), generator=draw)
        if isinstance(net, Encoder):
            mask = torch.zeros(n, 6, dtype=torch.bool)
            mask[:, 4:] = torch.rand(n, 2, generator=draw) < 0.5
            tokens = torch.randint(0, 11, (n, 6), generator=draw)
            clients[7 * i] = ({"tokens": tokens, "mask": mask}, {"label": labels})
        else:
            clients[7 * i] = (torch.randn(n, 3, 4, 4, dtype=dtype, generator=draw), labels)
    is_text = isinstance(net, Encoder)
    return Problem(
        net, of_dicts if is_text else of_pairs, clients, local(spec), augment=None if is_text else CropFlip(padding=1)
    )


def train(by: str, task: Problem, cohort: list[int] | None = None, **given: Any) -> CohortUpdate:
    given = {"round": 2, "seed": 1, **given}
    return engine(by).train(task, *start_of(task), cohort or list(task.clients), **given)


# -- the steps of the loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", RULES)
@pytest.mark.parametrize("model", MODELS)
def test_it_trains_as_the_loop_does(model: str, spec: str) -> None:
    """Examples as dicts, frozen layers and batch-norm, uneven clients, partial batches; then a rate and shifts."""
    task = problem(model, spec)
    shift = torch.randn(3, task.layout.d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for given in ({}, {"rate": 0.02, "shift": shift, "round": 3}):
        truth = train("loop", copy.deepcopy(task), **given)
        assert_close(train("captured(streams=2)", task, **given), truth, 1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_bf16_is_close(model: str) -> None:
    """Within 5% after one step: autocast rounds activations and products to 8 bits."""
    spec = "sgd(lr=0.1, steps=1, batch=4)"
    truth, ours = (train(by, problem(model, spec, dtype=torch.float32)) for by in ("loop", "captured"))
    assert_close(ours, truth, 0.05)
    assert not torch.equal(ours.delta, truth.delta)


def test_clients_may_have_examples_of_several_shapes() -> None:
    """As texts of different lengths: each shape has its own step."""
    task = problem("encoder", RULES[0])
    x, y = task.clients[7]
    longer = {**task.clients, 7: ({name: torch.cat([part, part], 1) for name, part in x.items()}, y)}
    tasks = [dataclasses.replace(task, clients=longer, model=copy.deepcopy(task.model)) for _ in range(2)]
    assert_close(train("captured(streams=2)", tasks[0]), train("loop", tasks[1]), 1e-9)


def test_a_seat_forgets_the_oldest_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats, "MOST_GRAPHS", 1)
    task = problem("normed", RULES[3])
    assert_close(train("captured(streams=1)", task), train("loop", problem("normed", RULES[3])), 1e-9)
    (only,) = (seat for each in prepared(task).seats.values() for seat in each)
    assert len(only.recorded) == 1


def test_a_batch_that_batch_norm_refuses_names_its_client() -> None:
    task = problem(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(48), nn.Linear(48, 3)), "sgd(batch=4)")
    with pytest.raises(UpdateError, match=r"client 0: Expected more than 1 value.*set drop_last=true"):
        train("captured", task)


def test_a_first_client_with_a_single_example_stops_nobody_else() -> None:
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(48), nn.Linear(48, 3))
    task = problem(net, "sgd(batch=4, drop_last=true)")
    x, y = task.clients[0]
    task = dataclasses.replace(task, clients={0: (x[:1], y[:1]), **{i: task.clients[i] for i in task.clients if i}})
    start, buffers = task.read()
    ours, truth = (engine(by).train(task, start, buffers, [7], 1, 0) for by in ("captured", "loop"))
    assert_close(ours, truth, 1e-9)
    alone = dataclasses.replace(task, clients={0: task.clients[0]}, model=copy.deepcopy(net))
    with pytest.raises(UpdateError, match=r"client 0: Expected more than 1 value.*set drop_last=true"):
        engine("captured").train(alone, start, buffers, [0], 1, 0)


class Viewing(nn.Conv2d):
    """Needs images that are contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(len(x), -1).view(x.shape)).flatten(1)


def test_channels_go_last_where_the_model_takes_them() -> None:
    x = torch.randn(2, 3, 4, 4)
    assert takes_channels_last(normed().eval(), x)
    assert not takes_channels_last(Viewing(3, 1, 1), x)
    assert not takes_channels_last(dropping(), x), "no convolutions"
    assert as_channels_last(x).is_contiguous(memory_format=torch.channels_last)
    task = problem("normed", RULES[0])
    plain, turned = (next(Staging(task, 0, 1, 0, way).parts()).batch(0) for way in (False, True))
    assert turned.x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain.x, turned.x)


def test_filters_turn_once_in_a_step_and_change_nothing() -> None:
    """Also frozen ones; not those of a subclass, which may look at them as they lie."""
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 2).requires_grad_(False), nn.Conv2d(5, 2, 1)]
    task = problem(nn.Sequential(*layers, Viewing(2, 3, 1), nn.Flatten()), "sgd(lr=0.1, batch=4)")
    batch = Batch(as_channels_last(task.clients[0][0]), task.clients[0][1], None)
    memories = [_memory(task, 0) for _ in range(2)]
    for memory, turned in zip(memories, (False, True), strict=True):
        take_step_(task, Computing("float32", channels_last=turned), memory, frozen_parameters(task), batch)
    torch.testing.assert_close(memories[1].row, memories[0].row, rtol=1e-12, atol=1e-14)
    how = Computing("float32", channels_last=True)
    recorded = record_step(task, how, memories[0], frozen_parameters(task), batch)
    turns = [node for node in recorded.graph.nodes if node.kwargs.get("memory_format") == torch.channels_last]
    assert [tuple(node.meta["val"].shape) for node in turns] == [(4, 3, 3, 3), (5, 4, 2, 2)], "1x1 filters are both"


# -- memory ------------------------------------------------------------------------------------------------------------


def test_frozen_weights_are_stored_once() -> None:
    task = problem("adapted", RULES[3])
    frozen = frozen_parameters(task)
    assert {name: tensor.data_ptr() for name, tensor in frozen.items()} == {
        name: p.data_ptr() for name, p in task.model.named_parameters() if not p.requires_grad
    }
    before = {name: tensor.clone() for name, tensor in frozen.items()}
    train("captured(streams=3)", task)
    assert all(torch.equal(frozen[name], value) for name, value in before.items())
    held = [seat.memory.row.numel() for each in prepared(task).seats.values() for seat in each]
    assert held == [task.layout.d] * 3
    assert task.layout.d < sum(tensor.numel() for tensor in frozen.values())


def test_seats_serve_every_round_and_leave_with_the_model() -> None:
    task = problem("adapted", RULES[0])
    for round in (1, 2, 3):
        train("captured(streams=2)", task, round=round)
    assert [len(each) for each in prepared(task).seats.values()] == [2]
    model = weakref.ref(task.model)
    del task
    gc.collect()
    assert model() is None


# -- draws -------------------------------------------------------------------------------------------------------------


def test_dropout_is_a_function_of_seed_round_and_client() -> None:
    task = problem(dropping(), RULES[0])
    together, again = (train("captured(streams=2)", task) for _ in range(2))
    assert torch.equal(together.delta, again.delta)
    alone = train("captured", task, [7])
    assert torch.allclose(alone.delta[0], together.delta[1], rtol=1e-12, atol=1e-15)
    for other in ({"round": 3}, {"seed": 2}):
        assert not torch.allclose(train("captured", task, **other).delta, together.delta)


def test_the_first_step_is_that_of_the_loop_with_the_same_draws() -> None:
    for model in (dropping(), Encoder(dropout=0.3)):
        task = problem(model, "sgd(lr=0.1, steps=1, batch=4)")
        ours = train("captured", copy.deepcopy(task))
        for row, client in enumerate(task.clients):
            with Captured().drawing(task, client, round=2, seed=1):
                truth = train("loop", copy.deepcopy(task), [client])
            assert torch.allclose(ours.delta[row], truth.delta[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_draws_have_the_right_distribution(p: float) -> None:
    """Means and variances within five standard errors, and successive draws and steps that are not alike."""
    words, n = torch.tensor(key_words(0x1234_5678_9ABC_DEF0)), 200_000
    with keyed_draws(words):
        kept = F.dropout(torch.ones(n), p) > 0
        other = F.dropout(torch.ones(n), p) > 0
        uniform, normal = torch.rand(n), torch.randn(n)
    words[2] += 1
    with keyed_draws(words):
        later = F.dropout(torch.ones(n), p) > 0
    error = 5 / n**0.5
    assert abs(float(kept.float().mean()) - (1 - p)) < error
    for mine in (other, later):
        both = (kept & mine).float().mean()
        assert abs(float(both) - (1 - p) ** 2) < error
    assert abs(float(uniform.mean()) - 0.5) < error
    assert abs(float(uniform.var()) - 1 / 12) < error
    assert abs(float(normal.mean())) < error
    assert abs(float(normal.var()) - 1) < 2 * error


class Ordering(nn.Linear):
    """Draws random numbers with an operation that takes no key."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1)[:, torch.randperm(48)])


def test_other_draws_are_refused() -> None:
    with pytest.raises(
        SpecError, match=r"draws random numbers with aten.randperm.*, which takes no key; use engine=loop"
    ):
        train("captured", problem(Ordering(48, 3), RULES[0]))
    recurrent = nn.Sequential(nn.Flatten(2), nn.LSTM(16, 3, 2, dropout=0.5))
    reason = "layer '1' is an LSTM with dropout, which takes no key; use engine=loop"
    assert reason in engine("captured").supports(problem(recurrent, RULES[0]))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    task = Problem(mixed, of_pairs, {}, local("sgd"))
    assert "trainable parameters are torch.float16 and torch.float32" in engine("captured").supports(task)


# -- recorded steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("model", [*MODELS, "dropping"])
def test_a_recorded_step_is_the_step_for_every_memory(model: str, precision: str) -> None:
    """What is compiled: recorded with the memory of one client, then run with that of another, two steps each."""
    net = dropping() if model == "dropping" else model
    task = problem(net, "adamw(lr=0.01, batch=4)", dtype=torch.float32)
    task.model.train()
    x, y = task.clients[14]
    both = [(_part(x, at), _part(y, at)) for at in (slice(4), slice(4, 8))]
    real = torch.tensor([1.0, 1.0, 1.0, 0.0]) if task.may_pad else None
    first, second = (Batch(*pair, real) for pair in both)
    frozen = frozen_parameters(task)
    memories = [_memory(task, key) for key in (1, 2, 2)]
    recorded = record_step(task, Computing(precision), memories[0], frozen, first)
    for batch in (first, second):
        take_step_(task, Computing(precision), memories[1], frozen, batch)
        leaves: list[Tensor] = []
        seats.map_tensors(leaves.append, (tuple(memories[2]), frozen, tuple(batch)))
        with torch.no_grad():
            recorded(*leaves)
    for ours, truth in zip(memories[2].changing(), memories[1].changing(), strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-6)


def _part(tree: Any, which: slice) -> Any:
    return {name: part[which] for name, part in tree.items()} if isinstance(tree, dict) else tree[which]


def _memory(task: Problem, key: int) -> Memory:
    memory = Memory.of(task, shifted=False)
    memory.row.copy_(task.read()[0])
    memory.rate.fill_(0.01)
    memory.words.copy_(torch.tensor(key_words(key)))
    return memory


class Branching(nn.Linear):
    """Drops out, and looks at its data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x.flatten(1), 0.1) * (2 if x.sum() > 0 else 1))


def test_a_model_that_looks_at_its_data_is_not_recorded() -> None:
    task = problem(Branching(48, 3), RULES[0])
    batch = Batch(task.clients[0][0], task.clients[0][1], None)
    with pytest.raises(RuntimeError, match="data-dependent"):
        record_step(task, Computing("float32"), _memory(task, 0), {}, batch)


def test_a_step_that_cannot_be_compiled_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("no compiler\nand more")

    monkeypatch.setattr(seats, "compile_step", fails)
    task = problem("adapted", RULES[0])
    recipe, memory = seats.Recipe(Computing("float32"), compile=True), _memory(task, 0)
    batch = Batch(task.clients[0][0], task.clients[0][1], None)
    with pytest.warns(UserWarning, match=r"captured without compiling them \(RuntimeError: no compiler\)"):
        step = recipe.stepper(task, memory, batch, is_full=True)
    before = memory.row.clone()
    step(task)
    assert not torch.equal(memory.row, before)


class Convolving(nn.Module):
    """Convolutions of every kind; the kernels of `graphs` compute the first three."""

    def __init__(self) -> None:
        super().__init__()
        dense = [nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 2, stride=2, bias=False), nn.Conv2d(6, 6, 1)]
        others = [
            nn.Conv2d(6, 6, 3, padding=1, groups=2),
            nn.Conv2d(6, 6, 3, padding=2, dilation=2),
            nn.Conv2d(6, 6, (1, 3), padding=(0, 1)),
            nn.ConvTranspose2d(6, 3, 2),
            nn.Conv2d(3, 3, 1, stride=256),
        ]
        self.layers = nn.Sequential(*dense, *others, nn.Flatten(), nn.LazyLinear(3))
        self.line = nn.Conv1d(3, 3, 1)
        self(torch.zeros(1, 3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + self.line(x.flatten(2)).mean(2)


@pytest.mark.parametrize(("precision", "replaced"), [("float32", 0), ("bf16", 3)])
def test_kernels_replace_dense_convolutions_alone(precision: str, replaced: int) -> None:
    """What takes their place has the same shape, type and order in memory."""
    task = problem(Convolving(), RULES[0], dtype=torch.float32)
    memory, (x, y) = _memory(task, 0), task.clients[14]
    batch = Batch(as_channels_last(x), y, None)
    recorded = record_step(task, Computing(precision, channels_last=True), memory, {}, batch)
    assert use_kernels_(recorded) == 2 * replaced
    targets = [str(node.target) for node in recorded.graph.nodes]
    for name in ("convolve", "convolve_gradient_weight"):
        assert targets.count(f"fedcams.{name}.default") == replaced
    for name in ("convolution", "convolution_backward"):
        assert targets.count(f"aten.{name}.default") == 9 - replaced
    before = {node: node.meta["val"] for node in recorded.graph.nodes if "val" in node.meta}
    leaves: list[Tensor] = []
    seats.map_tensors(leaves.append, (tuple(memory), {}, tuple(batch)))
    FakeTensorProp(recorded).propagate(*leaves)
    for node, old in before.items():
        if isinstance(old, Tensor):
            assert _form(node.meta["val"]) == _form(old), node


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, type and order in memory; an axis of length one may have any stride."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.shape, tensor.dtype, [stride for length, stride in strides if length > 1]


def test_images_with_channels_first_keep_their_convolutions() -> None:
    task = problem(Convolving(), RULES[0], dtype=torch.float32)
    batch = Batch(*task.clients[14], None)
    assert use_kernels_(record_step(task, Computing("bf16"), _memory(task, 0), {}, batch)) == 0


@pytest.mark.parametrize(("width", "replaced"), [(2**16 - 2, 1), (2**16 - 1, 0)])
def test_images_beyond_32_bits_keep_their_convolutions(width: int, replaced: int) -> None:
    """One of nearly 2**31 numbers too: kernels also count the pixels by which their last tiles go past the end."""
    with FakeTensorMode():
        image, weight = (torch.empty(1, 1, *size, dtype=torch.bfloat16) for size in ((2**15, width), (1, 1)))
    assert use_kernels_(make_fx(F.conv2d)(image, weight)) == replaced


# -- the choice --------------------------------------------------------------------------------------------------------


def test_auto_passes_it_over_on_a_cpu_and_says_why() -> None:
    chosen = choose_with_reason("auto", problem("adapted", RULES[0]))
    assert chosen.engine.name == "stacked"
    assert "engine=graphs: the model is on cpu; engine=captured" in chosen.reason, "without advice on the choice"
    assert "engine=captured: the model is on cpu, and only steps on a GPU can be captured" in chosen.reason
    assert choose_with_reason("captured", problem("adapted", RULES[0])).reason == "named"


class Centring(nn.Linear):
    """Its examples see each other."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return super().forward(x - x.mean(0))


class Checkpointing(nn.Module):
    """Computes a part again in its backward pass: a layer, or a function that reads the model's own parameters."""

    def __init__(self, by_layer: bool) -> None:
        super().__init__()
        self.body, self.head, self.by_layer = nn.Linear(48, 8), nn.Linear(8, 3), by_layer

    def forward(self, x: Tensor) -> Tensor:
        part = self.body if self.by_layer else lambda x: F.linear(x, self.body.weight, self.body.bias)
        return self.head(checkpoint(lambda x: torch.tanh(part(x)), x.flatten(1), use_reentrant=False))


def test_a_second_pass_is_refused() -> None:
    """It would compute with the parameters that the model holds by then, which are not those of the client."""
    with pytest.raises(SpecError, match="calls Linear again in its backward pass, as checkpointing does; use engine=l"):
        train("captured(precision=float32)", problem(Checkpointing(by_layer=True), RULES[0]))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("encoder", "captured"),
        (Centring(48, 3), "captured"),
        (Checkpointing(by_layer=True), "loop"),
        (Checkpointing(by_layer=False), "loop"),
        ("normed", "captured"),
        (dropping(), "captured"),
        (Encoder(dropout=0.3), "captured"),
        (Ordering(48, 3), "loop"),
    ],
)
def test_auto_takes_what_trains_as_the_loop_does(model: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU without `graphs`; also where layers drop out, because the trial draws alike."""
    monkeypatch.setattr(Captured, "declines", lambda self, problem: "")
    assert choose("auto", problem(model, RULES[0], dtype=torch.float32)).name == expected


def test_batches_are_counted_exactly_in_half_precision() -> None:
    """259 is no number in bfloat16."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    task = problem(net, "sgd(lr=0.1, batch=512)", (259,), torch.bfloat16)
    assert_close(train("captured(precision=float32)", task), train("loop", task), 0.01)


def test_auto_compiles_for_long_runs() -> None:
    """From 10,000 steps per client on; the first one has 9 examples, three steps per epoch with batches of 4."""
    task, captured = problem("adapted", RULES[0]), Captured()
    assert str(captured.tuned(task, rounds=3333, size_varies=False)) == "captured(compile=false)"
    assert str(captured.tuned(task, rounds=3334, size_varies=True)) == "captured"


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "float32"), ((8, 0), "bf16")])
def test_auto_rounds_only_where_that_is_fast(
    capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("fedcams.engines.captured.engine.trains", lambda by, problem: True)
    task = problem("adapted", RULES[0])
    object.__setattr__(task, "device", torch.device("cuda"))
    assert Captured().tuned(task, rounds=1, size_varies=False).precision == expected


class Adding(nn.Linear):
    """Adds its outputs to float32 numbers in place, which refuses other types."""

    def forward(self, x: Tensor) -> Tensor:
        each = super().forward(x.flatten(1))
        return torch.zeros(each.shape).index_add(0, torch.arange(len(each)), each)


def test_auto_does_not_round_where_the_model_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; the loop computes in float32, so it would not fail either."""
    monkeypatch.setattr(Captured, "declines", lambda self, problem: "")
    task = problem(Adding(48, 3), RULES[0], dtype=torch.float32)
    with pytest.raises(RuntimeError, match="must have the same"):
        train("captured", task)
    chosen = choose("auto", task)
    assert str(chosen) == "captured(precision=float32, compile=false)"
    assert_close(train(str(chosen), task), train("loop", task), 1e-5)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@on_gpu
@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("spec", RULES)
@pytest.mark.parametrize("model", MODELS)
def test_captured_steps_are_those_of_the_loop(model: str, spec: str) -> None:
    truth, ours = (
        train(by, problem(model, spec, dtype=torch.float64, device="cuda"))
        for by in ("loop", "captured(compile=false, streams=2)")
    )
    assert_close(ours, truth, 1e-9)


@on_gpu
@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("model", MODELS)
def test_compiled_steps_are_those_of_the_loop(model: str) -> None:
    """One step in float32, then in bf16; a whole round in float64, replayed for the second client on."""
    one = "sgd(lr=0.1, steps=1, batch=4)"
    tasks = [problem(model, one, dtype=torch.float32, device="cuda") for _ in range(3)]
    truth = train("loop", tasks[0])
    assert_close(train("captured(precision=float32)", tasks[1]), truth, 1e-5)
    assert_close(train("captured", tasks[2]), truth, 0.05)
    whole = [problem(model, RULES[3], dtype=torch.float64, device="cuda") for _ in range(2)]
    assert_close(train("captured(streams=2)", whole[0]), train("loop", whole[1]), 1e-9)


@on_gpu
def test_dropout_on_a_gpu_repeats() -> None:
    for by in ("captured", "captured(compile=false)"):
        task = problem(dropping(), RULES[0], dtype=torch.float32, device="cuda")
        first, again, alone = train(by, task), train(by, task), train(by, task, [7])
        assert torch.equal(first.delta, again.delta)
        torch.testing.assert_close(alone.delta[0], first.delta[1])


@on_gpu
@pytest.mark.parametrize("model", ["encoder", dropping()])
def test_auto_takes_it_for_what_has_no_kernels(model: Any) -> None:
    """Compiled only in a run that is long enough."""
    task = problem(model, RULES[0], dtype=torch.float32, device="cuda")
    chosen = choose_with_reason("auto", task, rounds=3)
    assert str(chosen.engine) == "captured(compile=false)"
    assert chosen.reason.startswith("engine=graphs")
    assert "captured" not in chosen.reason
    assert str(choose("auto", task, rounds=5000)) == "captured"


@on_gpu
@pytest.mark.parametrize("model", [Ordering(48, 3), Branching(48, 3)])
def test_auto_falls_back_to_the_loop(model: Any) -> None:
    """What cannot be captured leaves the device in order."""
    task = problem(model, RULES[0], dtype=torch.float32, device="cuda")
    chosen = choose_with_reason("auto", task)
    assert chosen.engine.name == "loop"
    assert "engine=captured: a trial step fails" in chosen.reason
    assert bool(train("loop", task).delta.isfinite().all())


@on_gpu
def test_a_step_that_waits_for_the_device_is_refused() -> None:
    with pytest.raises(SpecError, match=r"waits for the device, by .item\(\), a branch on data.*; use engine=loop"):
        train("captured(compile=false)", problem(Branching(48, 3), RULES[0], dtype=torch.float32, device="cuda"))
