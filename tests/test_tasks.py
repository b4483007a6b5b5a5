"""The contract of every registered task, and what each of them claims."""

from __future__ import annotations

import pickle
import random
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.functional import cross_entropy

from fedcams import keys
from fedcams.errors import DataError, SpecError
from fedcams.experiment import Experiment
from fedcams.experiment import build as build_experiment
from fedcams.extras import ExtraMissing
from fedcams.models import build, model
from fedcams.partition import partition
from fedcams.registry import params, registered, resolve
from fedcams.tasks import CropFlip, Task, TaskData, digits, task
from fedcams.tasks.base import accuracy
from fedcams.tasks.logistic import Logistic
from fedcams.tasks.quadratic import Quadratic, noise
from fedcams.tasks.shakespeare import CHARACTERS, character_accuracy, character_loss, encode, speeches

# -- CIFAR: miniature files in the official layout, opcode by opcode as Python 2 wrote them ---------------------------

WIDTH = 3 * 32 * 32


def string(text: bytes) -> bytes:
    return b"T" + len(text).to_bytes(4, "little") + text


def integer(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little", signed=True)


def array(data: np.ndarray, dtype: bytes = b"u1", order: str = "C") -> bytes:
    """`numpy.ndarray.__reduce__` of the time: made empty, then given version, shape, type, order and bytes."""
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + integer(0) + b"t" + string(b"b") + b"tR"
    kind = b"cnumpy\ndtype\n(" + string(dtype) + integer(0) + integer(1) + b"tR"
    kind += b"(" + integer(3) + string(b"|") + b"NNN" + integer(-1) * 2 + integer(0) + b"tb"
    shape = b"(" + b"".join(integer(n) for n in data.shape) + b"t"
    fortran = b"\x88" if order == "F" else b"\x89"
    return empty + b"(" + integer(1) + shape + kind + fortran + string(data.tobytes(order)) + b"tb"  # type: ignore[arg-type]


def batch(**entries: bytes) -> bytes:
    """A pickled dict, its keys being byte strings."""
    return b"\x80\x02}(" + b"".join(string(key.encode()) + value for key, value in entries.items()) + b"u."


def labels(values: Sequence[int]) -> bytes:
    return b"](" + b"".join(integer(value) for value in values) + b"e"


def pixels(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size=(n, WIDTH), dtype=np.uint8)


def write_cifar10(folder: Path, n: int = 4) -> None:
    """n images a file, with the labels 0, 1, ..."""
    (folder / "cifar-10-batches-py").mkdir(parents=True)
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        content = batch(batch_label=string(b"mini"), labels=labels(range(n)), data=array(pixels(n, seed)))
        (folder / "cifar-10-batches-py" / name).write_bytes(content)


def write_cifar100(folder: Path, n: int = 4) -> None:
    """n images a file, with the fine labels 99, 98, ..."""
    (folder / "cifar-100-python").mkdir(parents=True)
    for seed, name in enumerate(["train", "test"]):
        fine, coarse = labels(range(99, 99 - n, -1)), labels([0] * n)
        content = batch(data=array(pixels(n, seed)), coarse_labels=coarse, fine_labels=fine)
        (folder / "cifar-100-python" / name).write_bytes(content)


# -- Shakespeare: a play of three roles in the format of the plays ----------------------------------------------------

PLAY = """\tTHE STORM

\tDRAMATIS PERSONAE

MIRA\ta sailor.

SCENE\tA ship
\tat sea.

ACT I

SCENE I\tThe deck.

\t[Enter MIRA and
\tSIR OTTO]

MIRA\tThe wind has turned, and every rope
\tis singing.   What is left to hope?

SIR
OTTO\t[Aside]  That is no song for those who fear
\tthe water. [To MIRA]  Is the harbour near?

\t[A wave]

\tI cannot swim, I never could.

First Sailor\tHold on to what is made of wood!
MIRA\tHe jests; be calm: the night is long,
\tand we shall have another song.
"""


def write_plays(folder: Path, roles: int = 2) -> None:
    """Two plays, the second with a number of roles more, each with 240 characters."""
    more = "".join(f"\nROLE {i}\tBut {'what a day, what a day! ' * 10}\n" for i in range(roles))
    (folder / "shakespeare").mkdir(parents=True)
    (folder / "shakespeare" / "storm.txt").write_text(PLAY)
    with zipfile.ZipFile(folder / "shakespeare" / "plays.zip", "w") as archive:
        archive.writestr("calm.txt", f"ACT I\n{more}")


# -- everyone ----------------------------------------------------------------------------------------------------

TASKS = [task(spec) for cls in registered("task").values() for spec in cls.examples]
everyone = pytest.mark.parametrize("spec", TASKS, ids=str)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every file that a task may look for, in miniature."""
    folder = tmp_path_factory.mktemp("data")
    write_cifar10(folder)
    write_cifar100(folder)
    write_plays(folder)
    return folder


def load(spec: Task, folder: Path) -> TaskData:
    try:
        return spec.load(folder)
    except DataError as error:
        if "pip install" in str(error):
            pytest.skip(str(error))
        raise


def outputs_and_targets(spec: Task, data: TaskData, n: int) -> tuple[Tensor, Tensor]:
    module = build(spec.model, data.shape, data.classes, seed=0).eval()
    x, y = data.prepare(data.train_x[:n]), data.train_y[:n]
    return module(x), y


@everyone
def test_it_documents_itself(spec: Task) -> None:
    cls = type(spec)
    assert cls.__doc__
    assert cls.reference
    assert all(param.doc for param, _ in params(cls).values())
    assert str(model(cls.model)) == cls.model
    for example in cls.examples:
        assert str(task(example)) == example
    for refused, message in cls.refused:
        with pytest.raises(SpecError, match=message):
            resolve("task", refused)


@everyone
def test_loading_twice_gives_the_same_and_touches_no_generator(spec: Task, folder: Path) -> None:
    first = load(spec, folder)  # which may import a package that draws
    before = torch.get_rng_state(), random.getstate()
    second = load(spec, folder)
    for name in ("train_x", "train_y", "test_x", "test_y"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert first.shape == second.shape
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@everyone
def test_prepared_examples_are_floats_or_tokens(spec: Task, folder: Path) -> None:
    data = load(spec, folder)
    x = data.prepare(data.train_x)
    assert x.dtype == (torch.int64 if model(spec.model).takes_tokens else torch.float32)
    assert data.has_tokens == model(spec.model).takes_tokens
    assert x.shape == data.train_x.shape
    assert bool(x.isfinite().all())
    assert torch.equal(data.prepare(data.train_x[:4].unflatten(0, (2, 2))), x[:4].unflatten(0, (2, 2)))
    assert torch.equal(data.prepare(x), x)


@everyone
def test_loss_is_a_mean_and_the_metric_a_score_for_each(spec: Task, folder: Path) -> None:
    data = load(spec, folder)
    outputs, y = outputs_and_targets(spec, data, 4)
    each = torch.cat([data.loss(outputs[i : i + 1], y[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(data.loss(outputs, y), each)
    scores = data.metric(outputs, y)
    assert scores.shape == (4,)
    assert scores.dtype == torch.float32


@everyone
def test_loss_and_metric_under_vmap_are_a_loop(spec: Task, folder: Path) -> None:
    data = load(spec, folder)
    outputs, y = outputs_and_targets(spec, data, 4)
    outputs, y = outputs.detach().unflatten(0, (2, 2)), y.unflatten(0, (2, 2))
    for score in (data.loss, data.metric):
        one_by_one = torch.stack([score(*pair) for pair in zip(outputs, y, strict=True)])
        torch.testing.assert_close(vmap(score)(outputs, y), one_by_one)


@everyone
def test_everything_moves_to_a_device(spec: Task, folder: Path) -> None:
    data = load(spec, folder)
    moved = data.to("cpu")
    assert torch.equal(moved.train_x, data.train_x)
    assert moved.loss == data.loss
    assert moved.augment == data.augment


# -- data --------------------------------------------------------------------------------------------------------


def test_a_regression_has_one_class_and_floats_for_targets() -> None:
    x, y = torch.randn(40, 3), torch.randn(40)

    @dataclass(frozen=True)
    class Line(Task):
        model = "linear"

        def load(self, folder: Path | None = None) -> TaskData:
            return TaskData(x, y, x, y, 1, loss=squared, metric=lambda outputs, targets: -squared(outputs, targets))

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).square()

    built = build_experiment(Experiment(task=Line(), partition="iid", clients=4, sampler="full"))  # type: ignore[arg-type]
    assert built.histogram.tolist() == [[10]] * 4
    _, record = built.simulation.advance_(built.state)
    assert record.test_loss is not None
    assert record.test_loss == pytest.approx(-(record.test_accuracy or 0))
    for wrong, classes, message in (
        (y.double(), 1, r"targets are torch.float64 \[40\]; expected: int64 or float32 \[40\]"),
        (y / 0, 1, "train: the targets have NaN or infinity; leave such examples out"),
        (y, 2, r"targets are torch.float32 \[40\]; expected: int64 \[40\]"),
    ):
        with pytest.raises(DataError, match=message):
            TaskData(x, wrong, x, y, classes, loss=squared, metric=squared)


def test_data_that_do_not_fit_are_refused() -> None:
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 2, 2])
    for wrong, message in [
        ({"train_x": x[:0], "train_y": y[:0]}, r"train: the examples are torch.float32 \[0, 2\]"),
        ({"test_x": x[:, :1]}, r"test: the examples are torch.float32 \[4, 1\]; expected: uint8 or float32 \[n, 2\]"),
        ({"test_x": x.double()}, "test: the examples are torch.float64"),
        ({"train_y": y[:3]}, r"train: the targets are torch.int64 \[3\]; expected: int64 \[4\]"),
        ({"train_y": y.float()}, "train: the targets are torch.float32"),
        ({"test_y": y - 1}, "test: targets range from -1 to 1; allowed: 0 to 2"),
        ({"test_y": y + 1}, "test: targets range from 1 to 3; allowed: 0 to 2"),
        ({"train_y": y[:, None].expand(4, 2)}, r"train: the targets are torch.int64 \[4, 2\]; expected: int64 \[4\]"),
        ({"groups": y[:3]}, r"train: the groups are torch.int64 \[3\]; expected: int64 \[4\]"),
    ]:
        tensors: dict[str, Any] = {"train_x": x, "train_y": y, "test_x": x, "test_y": y, **wrong}
        with pytest.raises(DataError, match=message):
            TaskData(**tensors, classes=3, loss=cross_entropy, metric=accuracy)


def test_pixels_without_statistics_become_fractions() -> None:
    x, y = torch.tensor([[0, 255]], dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    data = TaskData(x, y, x, y, classes=1, loss=cross_entropy, metric=accuracy)
    assert data.prepare(x).tolist() == [[0.0, 1.0]]


# -- Shakespeare -------------------------------------------------------------------------------------------------


def test_a_play_is_read_role_by_role() -> None:
    """Names over two lines, speeches that go on after a direction, and no blank line between two speeches."""
    assert list(speeches(PLAY)) == [
        ("MIRA", "The wind has turned, and every rope"),
        ("MIRA", "is singing. What is left to hope?"),
        ("SIR OTTO", "That is no song for those who fear"),
        ("SIR OTTO", "the water. Is the harbour near?"),
        ("SIR OTTO", "I cannot swim, I never could."),
        ("First Sailor", "Hold on to what is made of wood!"),
        ("MIRA", "He jests; be calm: the night is long,"),
        ("MIRA", "and we shall have another song."),
    ]
    assert list(speeches(PLAY.replace("\n", "\r\n"))) == list(speeches(PLAY))
    assert list(speeches("A\tWell [Exit\n\nB\tGone.")) == [("A", "Well"), ("B", "Gone.")]


def text_of(classes: Tensor) -> str:
    return "".join(CHARACTERS[i - 1] for i in classes.tolist())


def test_each_role_trains_on_its_earlier_and_is_tested_on_its_later_text(folder: Path) -> None:
    data = task("shakespeare(length=20)").load(folder)
    assert data.groups is not None
    assert data.groups.bincount().tolist() == [9, 9, 4, 3]  # two roles of the first play, MIRA, SIR OTTO
    own = data.groups == 2
    said = "".join(f"{line}\n" for role, line in speeches(PLAY) if role == "MIRA")
    pieces = [*data.train_y[own], *data.test_y[-3:-1]]  # SIR OTTO's one sequence is the last
    assert "".join(map(text_of, pieces)) == said[1:121]
    assert torch.equal(data.train_x[own][1:, 0], data.train_y[own][:-1, -1]), "a target is the next input"
    assert torch.equal(data.train_x[:, 1:], data.train_y[:, :-1])


def test_roles_keeps_those_with_most_text(folder: Path) -> None:
    every, most = (task(f"shakespeare({spec})").load(folder) for spec in ("length=20", "length=20, roles=3"))
    assert every.groups is not None
    assert most.groups is not None
    assert torch.equal(most.train_x, every.train_x[every.groups < 3]), "and their order"
    assert most.groups.tolist() == [0] * 9 + [1] * 9 + [2] * 4
    with pytest.raises(DataError, match=r"the plays have 4 roles with at least 2 .* of 20 characters; give roles="):
        task("shakespeare(roles=5, length=20)").load(folder)


def test_loss_and_accuracy_count_characters() -> None:
    targets = torch.tensor([[1, 2, 3], [4, 0, 0]])
    outputs = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0], [4, 4, 4]]), 3 + 2).float()
    torch.testing.assert_close(character_accuracy(outputs, targets), torch.tensor([2 / 3, 1 / 3]))
    sure, wrong = np.log(4 + np.e) - 1, np.log(4 + np.e)
    expected = torch.tensor([(2 * sure + wrong) / 3, (sure + 2 * wrong) / 3], dtype=torch.float32)
    torch.testing.assert_close(character_loss(outputs, targets), expected)
    square = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0))  # as long as there are classes
    torch.testing.assert_close(
        character_loss(square, torch.zeros(2, 5, dtype=torch.int64)), -square.log_softmax(-1)[..., 0].mean(-1)
    )


def test_unknown_characters_share_a_class() -> None:
    assert encode("a\u03b3|\n").tolist() == [1 + CHARACTERS.index("a"), 0, 0, 1]
    assert len(set(CHARACTERS)) == len(CHARACTERS)


def test_missing_and_damaged_plays_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"shakespeare has no plays; put plays.zip or its .txt files there, .*--data DIR"
    ):
        task("shakespeare").load(tmp_path)
    (tmp_path / "shakespeare").mkdir()
    archive = tmp_path / "shakespeare" / "plays.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as plays:
        plays.writestr("hamlet.txt", "HAMLET\tTo be, or not to be\n" * 100)
    whole = archive.read_bytes()
    place = whole.index(b"hamlet.txt") + len("hamlet.txt")  # where the compressed text begins
    for damaged in (b"PK not really", whole[:place] + b"\xff" * 8 + whole[place + 8 :]):
        archive.write_bytes(damaged)
        with pytest.raises(DataError, match=r"plays.zip cannot be read: .*; download it again"):
            task("shakespeare").load(tmp_path)


# -- digits ------------------------------------------------------------------------------------------------------


def test_digits_are_split_for_ever(folder: Path) -> None:
    data = load(task("digits"), folder)
    assert data.shape == (1, 8, 8)
    assert (len(data.train_y), len(data.test_y)) == (1437, 360)
    both = data.train_y.bincount() + data.test_y.bincount()
    assert float((data.test_y.bincount() - both / 5).abs().max()) < 1
    assert (float(data.train_x.min()), float(data.train_x.max())) == (0.0, 1.0)
    assert float(16 * data.test_x.sum()) + float(16 * data.train_x.sum()) == 561718  # all pixels, each once
    assert data.test_y[:12].tolist() == [0, 5, 1, 4, 6, 6, 7, 0, 8, 8, 0, 2]


def test_digits_can_be_learnt(folder: Path) -> None:
    data = load(task("digits"), folder)
    module = build("mlp", data.shape, data.classes, seed=0)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        data.loss(module(data.train_x), data.train_y).mean().backward()
        optimizer.step()
    assert float(data.metric(module(data.test_x), data.test_y).mean()) > 0.95


def test_digits_are_those_of_the_library_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is read without it, which is quicker; where the file is not found, the library reads it."""
    read = digits._read.__wrapped__
    quickly = read()
    monkeypatch.setattr(digits, "_file", lambda: None)
    for ours, theirs in zip(quickly, read(), strict=True):
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


def test_digits_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "_read", digits._read.__wrapped__)  # whoever has read them before
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ExtraMissing, match=r"the task 'digits' needs sklearn.datasets .* pip install 'fedcams\[tasks\]'"
    ):
        task("digits").load()


# -- problems with known constants -------------------------------------------------------------------------------


def example_gradients(spec: Task, data: TaskData, w: Tensor) -> Tensor:
    """By autograd, through the model and the loss: `[n, d]`."""
    module = build(spec.model, data.shape, data.classes, seed=0)
    ((name, parameter),) = module.named_parameters()

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return data.loss(functional_call(module, {name: w}, (x[None],)), y[None]).mean()

    assert parameter.shape == w.shape
    gradients: Tensor = vmap(grad(loss), (None, 0, 0))(w, data.train_x, data.train_y)
    return gradients.flatten(1)


def by_class(data: TaskData) -> list[Tensor]:
    return [(data.train_y == k).nonzero()[:, 0] for k in range(data.classes)]


def somewhere(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def test_noise_is_its_definition() -> None:
    g = somewhere(6, 2)
    a, b = g[:2].double().numpy(), g[2:].double().numpy()
    local = max(np.mean([np.sum((v - s.mean(0)) ** 2) for v in s]) for s in (a, b))
    middle = (a.mean(0) + b.mean(0)) / 2  # of the clients, however many examples they hold
    across = np.mean([np.sum((s.mean(0) - middle) ** 2) for s in (a, b)])
    found = noise(g, [torch.tensor([0, 1]), torch.tensor([2, 3, 4, 5])])
    assert found == pytest.approx((np.sqrt(local), np.sqrt(across)))


QUADRATICS = ["quadratic", "quadratic(dim=1, sigma_g=0)", "quadratic(smoothness=4, condition=100, sigma_l=0.3, seed=9)"]


@pytest.mark.parametrize("text", QUADRATICS)
def test_a_quadratic_has_the_constants_asked_for(text: str) -> None:
    spec = task(text)
    assert isinstance(spec, Quadratic)
    data = spec.load()
    w = somewhere(spec.dim)
    gradients = spec.gradients(data, w)
    torch.testing.assert_close(gradients, example_gradients(spec, data, w))
    for point in (w, 5 * w):
        found = noise(spec.gradients(data, point), by_class(data))
        assert found == pytest.approx((float(spec.sigma_l), float(spec.sigma_g)), rel=1e-4, abs=1e-5)
    assert float(spec.gradients(data, torch.ones(spec.dim)).mean(0).abs().max()) < 1e-5


@pytest.mark.parametrize("text", QUADRATICS)
def test_a_quadratic_has_the_curvature_asked_for(text: str) -> None:
    spec = task(text)
    assert isinstance(spec, Quadratic)
    data = spec.load()
    module = build(spec.model, data.shape, data.classes, seed=0)

    def objective(w: Tensor) -> Tensor:
        return data.loss(functional_call(module, {"w": w}, (data.train_x,)), data.train_y).mean()

    eigenvalues = torch.linalg.eigvalsh(jacrev(jacrev(objective))(somewhere(spec.dim)))
    smallest = float(spec.smoothness) / float(spec.condition) if spec.dim > 1 else float(spec.smoothness)
    assert float(eigenvalues[-1]) == pytest.approx(float(spec.smoothness), rel=1e-5)
    assert float(eigenvalues[0]) == pytest.approx(smallest, rel=1e-4)


def test_one_client_for_each_group_is_the_natural_partition_of_a_quadratic() -> None:
    spec = task("quadratic(groups=4, size=5)")
    data = spec.load()
    assert data.groups is not None
    parts = partition("natural").split(data.train_y.numpy(), 4, keys.generator(0, "test"), data.groups.numpy())
    assert [sorted(part.tolist()) for part in parts] == [list(range(5 * k, 5 * k + 5)) for k in range(4)]


def test_a_quadratic_wants_its_model() -> None:
    data = task("quadratic(dim=3)").load()
    with pytest.raises(DataError, match=r"the outputs are \[5, 10\]; expected \[n, 3\]: use model 'point'"):
        data.loss(torch.zeros(5, 10), data.train_y[:5])


@pytest.mark.parametrize("text", Logistic.examples)
def test_logistic_regression_keeps_its_bounds(text: str) -> None:
    spec = task(text)
    assert isinstance(spec, Logistic)
    data = spec.load()
    torch.testing.assert_close(data.train_x.norm(dim=1), torch.ones(spec.size))
    halves = list(torch.arange(spec.size).chunk(2))
    for scale in (0, 1, 30):
        w = scale * somewhere(spec.classes, spec.dim)
        gradients = spec.gradients(data, w)
        torch.testing.assert_close(gradients, example_gradients(spec, data, w))
        for shards in (halves, by_class(data)):
            found = noise(gradients, shards)
            assert found.sigma_l <= spec.sigma_l
            assert found.sigma_g <= spec.sigma_g
        assert largest_curvature(data, w) <= spec.smoothness + 1e-6


def largest_curvature(data: TaskData, w: Tensor, rows: int = 3) -> float:
    """Of the loss of a few examples, whose features point in nearly the same direction."""
    x, y = data.train_x[:1] + 0.01 * data.train_x[:rows], data.train_y[:rows]
    x = x / x.norm(dim=1, keepdim=True)
    h = jacrev(jacrev(lambda w: data.loss(x @ w.T, y).mean()))(w)
    return float(torch.linalg.eigvalsh(h.reshape(w.numel(), -1))[-1])


def test_the_smoothness_of_logistic_regression_is_reached() -> None:
    data = task("logistic").load()
    assert largest_curvature(data, torch.zeros(2, 20), rows=1) == pytest.approx(Logistic.smoothness, rel=1e-4)


def learnt(data: TaskData) -> float:
    """The test accuracy of logistic regression after 50 Newton-like steps."""
    module = build("linear(bias=false)", data.shape, data.classes, seed=0)
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=50)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = data.loss(module(data.train_x), data.train_y).mean()
        value.backward()
        return value

    optimizer.step(loss)
    return float(data.metric(module(data.test_x), data.test_y).mean())


def test_the_signal_decides_how_certain_labels_are() -> None:
    assert 0.4 < learnt(task("logistic(signal=0)").load()) < 0.6
    assert learnt(task("logistic(signal=1000)").load()) > 0.9


# -- reading CIFAR -------------------------------------------------------------------------------------------------

TWO = labels([0, 1])


def test_the_official_layout_of_cifar10(tmp_path: Path) -> None:
    write_cifar10(tmp_path, n=3)
    data = task("cifar10").load(tmp_path)
    assert data.train_x.dtype == torch.uint8
    expected = np.concatenate([pixels(3, seed) for seed in range(5)]).reshape(-1, 3, 32, 32)
    assert torch.equal(data.train_x, torch.from_numpy(expected))
    assert torch.equal(data.test_x, torch.from_numpy(pixels(3, 5).reshape(-1, 3, 32, 32)))
    assert data.train_y.tolist() == [0, 1, 2] * 5
    assert data.test_y.tolist() == [0, 1, 2]


def test_the_official_layout_of_cifar100(tmp_path: Path) -> None:
    write_cifar100(tmp_path, n=3)
    data = task("cifar100").load(tmp_path)
    assert data.shape == (3, 32, 32)
    assert data.classes == 100
    assert torch.equal(data.train_x.flatten(1), torch.from_numpy(pixels(3, 0)))
    assert data.train_y.tolist() == [99, 98, 97]


@pytest.mark.parametrize("protocol", [1, 2, 3, 4])
def test_files_that_python_3_wrote(tmp_path: Path, protocol: int) -> None:
    write_cifar100(tmp_path)
    content = {b"data": pixels(2), b"fine_labels": [5, 6], b"filenames": [b"a.png", b"\xff.png"]}
    (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps(content, protocol))
    data = task("cifar100").load(tmp_path)
    assert torch.equal(data.train_x.flatten(1), torch.from_numpy(pixels(2)))
    assert data.train_y.tolist() == [5, 6]


def test_arrays_in_column_order(tmp_path: Path) -> None:
    write_cifar100(tmp_path)
    content = batch(data=array(pixels(2), order="F"), fine_labels=TWO)
    (tmp_path / "cifar-100-python" / "train").write_bytes(content)
    assert torch.equal(task("cifar100").load(tmp_path).train_x.flatten(1), torch.from_numpy(pixels(2)))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_pixels_are_normalised_as_in_the_paper(tmp_path: Path, name: str) -> None:
    write_cifar10(tmp_path)
    write_cifar100(tmp_path)
    data = task(name).load(tmp_path)
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2023, 0.1994, 0.2010])
    expected = (data.test_x.numpy() / 255 - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(data.prepare(data.test_x).numpy(), expected, rtol=0, atol=1e-6)
    assert data.augment == CropFlip(padding=4)
    assert task(f"{name}(augment=false)").load(tmp_path).augment is None


def test_missing_files_are_named_with_their_source(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        task("cifar10").load(tmp_path)
    for part in (str(tmp_path / "cifar-10-batches-py"), "data_batch_1, ", "kriz/cifar.html", "--data", "FEDCAMS_DATA"):
        assert part in str(caught.value)
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    with pytest.raises(DataError, match="has no test_batch; unpack"):
        task("cifar10").load(tmp_path)


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_cifar100(tmp_path / "data", n=1)
    write_cifar100(tmp_path / "elsewhere", n=2)
    monkeypatch.delenv("FEDCAMS_DATA", raising=False)
    assert len(task("cifar100").load().train_x) == 1
    monkeypatch.setenv("FEDCAMS_DATA", str(tmp_path / "elsewhere"))
    assert len(task("cifar100").load().train_x) == 2
    assert len(task("cifar100").load(tmp_path / "data").train_x) == 1


CALL_OF_SYSTEM = b"cos\nsystem\n(" + string(b"true") + b"tR"
HUGE = b"](" + b"\x8a\x09" + (2**64).to_bytes(9, "little") + b"J\x00\x00\x00\x00e"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (batch(data=CALL_OF_SYSTEM, fine_labels=TWO), "it refers to os.system, which a file of arrays never does"),
        (batch(data=b"c__builtin__\neval\n", fine_labels=TWO), "it refers to __builtin__.eval"),
        (batch(data=b"cnumpy\nload\n", fine_labels=TWO), "it refers to numpy.load"),
        (batch(data=b"cnumpy\nndarray.tofile\n", fine_labels=TWO), "it refers to numpy.ndarray.tofile"),
        (pickle.dumps(Path("x")), "it refers to pathlib"),
        (batch(data=b"c_codecs\nencode\n(X\x01\0\0\0aX\x05\0\0\0rot13tR", fine_labels=TWO), "the encoding 'rot13'"),
        (batch(data=array(pixels(2), dtype=b"O8"), fine_labels=TWO), "whose type is not uint8"),
        (batch(data=array(pixels(2), dtype=b"f4"), fine_labels=TWO), "whose type is not uint8"),
        (b"", "cannot be read: .*; download it again"),
        (batch(data=array(pixels(2)), fine_labels=TWO)[:-5000], "cannot be read"),
        (b"a page that says: not found", "cannot be read"),
        (b"\x80\x02" + TWO + b".", "holds a list; expected: a dict"),
        (batch(), r"holds nothing; expected: b'data' and b'fine_labels'"),
        (batch(data=array(pixels(2)), labels=TWO), r"holds b'data', b'labels'; expected: b'data' and b'fine_labels'"),
        (batch(data=TWO, fine_labels=TWO), r"b'data' has type list; expected: an array \[n, 3072\]"),
        (batch(data=array(pixels(2)[:, :9]), fine_labels=TWO), r"b'data' has shape \[2, 9\]"),
        (batch(data=array(pixels(2)[0]), fine_labels=TWO), r"b'data' has shape \[3072\]"),
        (batch(data=array(np.empty((0, WIDTH), np.uint8)), fine_labels=labels([])), r"examples are torch.uint8 \[0, 3"),
        (batch(data=array(pixels(3)), fine_labels=TWO), r"targets are torch.int64 \[2\]; expected: int64 \[3\]"),
        (
            batch(data=array(pixels(2)), fine_labels=integer(3)),
            "b'fine_labels' has type int; expected: a list of integers",
        ),
        (batch(data=array(pixels(2)), fine_labels=labels([0, 100])), "label 100 in row 1; allowed: 0 to 99"),
        (batch(data=array(pixels(2)), fine_labels=labels([-1, 0])), "label -1 in row 0; allowed: 0 to 99"),
        (batch(data=array(pixels(2)), fine_labels=HUGE), "label 18446744073709551616 in row 0"),
        (batch(data=array(pixels(2)), fine_labels=b"](" + string(b"x") * 2 + b"e"), "label b'x' in row 0"),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    write_cifar100(tmp_path)
    path = tmp_path / "cifar-100-python" / "train"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        task("cifar100").load(tmp_path)
    assert str(path) in str(caught.value)
