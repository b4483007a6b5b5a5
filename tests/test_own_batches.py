"""`simulate` with all forms of data: columns, rows, dicts, several inputs, named clients, several metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedcams
from fedcams import SpecError
from fedcams.engines.trees import concatenate, map_tensors, named_tensors, size
from fedcams.own import History
from fedcams.simulation.evaluate import BATCH
from fedcams.simulation.examples import Reader

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(4, 6, 3, generator=GENERATOR)
Y = (X.sum(-1) > 0).long()
LOCAL = "sgd(lr=0.3, epochs=2, batch=4)"


def linear(outputs: int = 2) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, outputs)


class TwoInputs(nn.Module):
    """Takes its input in two parts, by position or by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        found: Tensor = self.layer(torch.cat([left, right], -1))
        return found


class WithLoss(TwoInputs):
    """Returns its loss and its logits, as models of `transformers` do."""

    def forward(self, left: Tensor, right: Tensor, labels: Tensor) -> Any:
        logits = super().forward(left, right)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def run(model: nn.Module, clients: Any, test: Any = None, **settings: Any) -> History:
    return fedcams.simulate(model, clients, test, rounds=3, **{"cohort": 2, "local": LOCAL, **settings}).run()


def flat(history: History) -> Tensor:
    return history.state.x


PLAIN = list(zip(X, Y, strict=True))


def rows(make: Any) -> list[list[Any]]:
    """Each client as a list of examples."""
    return [[make(x, y) for x, y in zip(*client, strict=True)] for client in PLAIN]


# -- columns and rows ------------------------------------------------------------------------------------------------

FORMS: dict[str, list[Any]] = {
    "arrays": [(x.numpy(), y.numpy()) for x, y in PLAIN],
    "lists": [(x.tolist(), y.tolist()) for x, y in PLAIN],
    "a list of two lists": [[x.tolist(), y.tolist()] for x, y in PLAIN],
    "lists of tensors": [(list(x), list(y)) for x, y in PLAIN],
    "a frame and a Series": [(pd.DataFrame(x.numpy()), pd.Series(y.numpy())) for x, y in PLAIN],
    "a Series of arrays": [(pd.Series(list(x.numpy())), pd.Series(y.numpy())) for x, y in PLAIN],
    "a frame of several types": [
        (pd.DataFrame(x.numpy()).astype({0: object}), pd.Series(y.numpy(), dtype="Int64")) for x, y in PLAIN
    ],
    "rows": rows(lambda x, y: (x, int(y))),
    "rows as lists": rows(lambda x, y: [x.tolist(), int(y)]),
    "a Dataset": [TensorDataset(x, y) for x, y in PLAIN],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_pair_trains_alike(form: str) -> None:
    expected = run(linear(), PLAIN, PLAIN[0])
    found = run(linear(), FORMS[form], FORMS[form][0])
    assert torch.equal(flat(found), flat(expected))
    assert found.records == expected.records


def test_two_examples_in_a_list_are_not_a_pair_of_columns() -> None:
    x, y = Reader().read([(X[0, 0], 1), (X[0, 1], 0)], "client")
    assert torch.equal(x, X[0, :2])
    assert y.tolist() == [1, 0]


STRUCTURES: dict[str, tuple[nn.Module, list[Any], dict[str, Any]]] = {
    "columns a, b, y": (TwoInputs(), [(x[:, :1], x[:, 1:], y) for x, y in PLAIN], {}),
    "a Dataset of a, b, y": (TwoInputs(), [TensorDataset(x[:, :1], x[:, 1:], y) for x, y in PLAIN], {}),
    "columns (a, b), y": (TwoInputs(), [((x[:, :1], x[:, 1:]), y) for x, y in PLAIN], {}),
    "columns by name, y": (TwoInputs(), [({"right": x[:, 1:], "left": x[:, :1]}, y) for x, y in PLAIN], {}),
    "rows of (a, b), y": (TwoInputs(), rows(lambda x, y: ((x[:1], x[1:]), y)), {}),
    "inputs by name, y": (TwoInputs(), rows(lambda x, y: ({"right": x[1:], "left": x[:1]}, y)), {}),
    "rows of dicts": (WithLoss(), rows(lambda x, y: {"left": x[:1], "right": x[1:], "labels": int(y)}), {}),
    "a dict of columns": (WithLoss(), [{"left": x[:, :1], "right": x[:, 1:], "labels": y} for x, y in PLAIN], {}),
    "keys that the model does not take": (
        TwoInputs(),
        rows(lambda x, y: {"left": x[:1], "right": x[1:], "target": y}),
        {"loss": lambda outputs, batch: nn.functional.cross_entropy(outputs, batch["target"])},
    ),
}


@pytest.mark.parametrize("engine", ["loop", "stacked", "auto"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_of_examples_trains_alike(structure: str, engine: str) -> None:
    model, clients, settings = STRUCTURES[structure]
    expected = run(linear(), PLAIN, PLAIN[0], engine="loop")
    found = run(model, clients, clients[0], engine=engine, **settings)
    torch.testing.assert_close(flat(found), flat(expected), rtol=1e-5, atol=1e-6)
    assert found.records[-1].test_loss == pytest.approx(expected.records[-1].test_loss, rel=1e-5)


def test_dicts_fit_into_a_folder_and_another_test_set_is_refused(tmp_path: Any) -> None:
    model, clients, _ = STRUCTURES["rows of dicts"]
    made = run(model, clients, clients[0], out=tmp_path / "run")
    assert torch.equal(flat(run(model, clients, clients[0], out=tmp_path / "run")), flat(made))
    with pytest.raises(fedcams.FedcamsError, match="another run: test set"):
        run(model, clients, clients[1], out=tmp_path / "run")


def pad(examples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Examples of any length as one batch."""
    x, y = zip(*examples, strict=True)
    return nn.utils.rnn.pad_sequence(list(x), batch_first=True), torch.tensor(y)


class Bag(nn.Module):
    """Sums its inputs over time, so padding with zeros changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.sum(1))
        return found


def test_collate_pads_each_client_to_its_own_length() -> None:
    ragged = [
        [(x[: 1 + i % (3 + c)].reshape(-1, 1).expand(-1, 3), int(y[i])) for i in range(6)]
        for c, (x, y) in enumerate(PLAIN)
    ]
    found = run(Bag(), ragged, ragged[0], collate=pad)
    padded = [pad([(nn.functional.pad(x, (0, 0, 0, 20 - len(x))), y) for x, y in client]) for client in ragged]
    expected = run(Bag(), padded, padded[0], engine="loop")
    torch.testing.assert_close(flat(found), flat(expected), rtol=1e-5, atol=1e-6)
    with pytest.raises(SpecError, match=r"do not stack into one tensor .*; pad them to one shape, or give collate="):
        run(Bag(), ragged)
    with pytest.raises(SpecError, match=r"the examples of clients .* differ in form .*; .*or use engine=loop"):
        run(Bag(), ragged, collate=pad, engine="stacked")


@pytest.mark.parametrize("form", ["arrays", "lists"])
def test_floats_without_a_precision_of_their_own_get_that_of_the_model(form: str) -> None:
    exact = [(x.double() / 3, y) for x, y in PLAIN]
    clients = [(x.numpy() if form == "arrays" else x.tolist(), y.tolist()) for x, y in exact]
    found, expected = (run(linear().double(), data, data[0]) for data in (clients, exact))
    assert found.records == expected.records
    assert torch.equal(flat(found), flat(expected))


class Views(nn.Module):
    """Calls `view`, which works only on contiguous inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.view(-1).view(-1, 3))
        return found


def test_parts_of_larger_tensors_are_contiguous_like_batches_of_a_loader() -> None:
    parts = [(torch.cat([x, x], 1)[:, :3], y) for x, y in PLAIN]
    assert torch.equal(flat(run(Views(), parts, parts[0])), flat(run(linear(), PLAIN)))


def test_several_targets_go_to_the_loss_together() -> None:
    clients = [(x, (y, x[:, 0])) for x, y in PLAIN]
    found = run(linear(), clients, loss=lambda o, y: nn.functional.cross_entropy(o, y[0], reduction="none") + 0 * y[1])
    assert torch.equal(flat(found), flat(run(linear(), PLAIN)))


# -- classes last ----------------------------------------------------------------------------------------------------


def test_classes_may_be_last_as_language_models_have_them() -> None:
    tokens = torch.randint(0, 5, (3, 8, 7), generator=GENERATOR)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))  # [B, T] -> [B, T, 5]
    clients = [(part[:, :-1], part[:, 1:]) for part in tokens]
    last = run(model, clients, clients[0])
    second = run(nn.Sequential(model, Transposed()), clients, clients[0])
    torch.testing.assert_close(flat(last), flat(second))
    assert last.records[-1].test_accuracy == second.records[-1].test_accuracy
    with pytest.raises(SpecError, match="the classes may be on the second or the last axis; give your own loss"):
        run(model, [(part[:, :5], part[:, 1:6]) for part in tokens])


class Transposed(nn.Module):
    """[B, T, V] -> [B, V, T]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT


# -- bad rows --------------------------------------------------------------------------------------------------------

BAD_ROWS: list[tuple[Any, str]] = [
    ([{"a": 1.0}, {"a": 2.0, "b": 1.0}], "client: example 1 has the keys a, b, but example 0 has a; give all the same"),
    ([({"a": 1.0}, 0), ({"b": 1.0}, 0)], "client: example 1 has the keys b, but example 0 has a"),
    ([(1.0, 0), (1.0, 0, 3)], "client: example 1 differs in length from example 0"),
    ([{"text": "to be", "y": 1}], "client, key 'text' holds text; turn it into numbers, remove it, or give collate="),
    (
        {"a": [1, 2], "b": [1, 2, 3]},
        "client has 2 inputs/a, 3 inputs/b, .*; give at least one, and equally many of each",
    ),
    ((torch.ones(3, 2), torch.ones(2)), "client has 3 inputs and 2 targets; give at least one, and one target per"),
    ((torch.ones(3), torch.ones(())), "client: targets is one number; give it one row per example"),
    (pd.DataFrame({"a": [1, 2]}), "client is a DataFrame; give a pair of tensors, a dict of them, or a dataset"),
    (iter([1, 2]), "client is a list_iterator; give a pair"),
    ([], "client has 0 inputs and 0 targets"),
    (([], []), "client has 0 inputs and 0 targets"),
    ((torch.ones(3), 5), "client: a column is 5; give a tensor, an array or a list with a row per example"),
    ([(None, 1), (None, 0)], "client holds a NoneType; turn it into numbers, remove it, or give collate="),
    ((np.array(["a", "b"]), [0, 1]), "client holds a <U1; turn it into numbers, remove it, or give collate="),
]


@pytest.mark.parametrize(("data", "message"), BAD_ROWS, ids=[message[:40] for _, message in BAD_ROWS])
def test_bad_examples_are_refused_with_what_to_do(data: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Reader().read(data, "client")


def test_a_model_that_returns_no_loss_for_dicts_needs_one() -> None:
    with pytest.raises(SpecError, match="the model returns no loss for examples with left, right; give loss="):
        run(TwoInputs(), [{"left": x[:, :1], "right": x[:, 1:]} for x in X])


# -- metrics, clients and devices ------------------------------------------------------------------------------------


def right(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(1) == y).float()


def auc(outputs: Tensor, y: Tensor) -> float:
    from sklearn.metrics import roc_auc_score  # takes seconds to load

    return float(roc_auc_score(y, outputs[:, 1] - outputs[:, 0]))


def test_several_metrics_by_name_and_over_the_whole_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcams.simulation.evaluate.BATCH", 5)  # so that the test set has several parts
    test = (X.flatten(0, 1), Y.flatten())
    metrics = {"auc": fedcams.over_test_set(auc), "right": right, "wrong": lambda o, y: 1 - right(o, y).mean()}
    history = run(linear(), PLAIN, test, metric=metrics, average="ema(0.5)")
    last, outputs = history.records[-1], history.model(test[0]).detach()
    assert last.get("test_auc") == last.test_accuracy == pytest.approx(auc(outputs, test[1]))
    assert last.get("test_right") == pytest.approx(float(right(outputs, test[1]).mean()))
    assert last.get("test_wrong") == pytest.approx(1 - last.get("test_right"))
    averaged = history.averaged_model(test[0]).detach()
    assert last.get("averaged_auc") == last.averaged_accuracy == pytest.approx(auc(averaged, test[1]))
    assert "test_right" in history.to_frame()


def test_a_metric_that_is_no_mean_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fedcams.simulation.evaluate.BATCH", 8)
    test = (X.flatten(0, 1), Y.flatten())

    def f1(outputs: Tensor, y: Tensor) -> Tensor:
        hit = (outputs.argmax(1) * y).sum()
        return 2 * hit / (outputs.argmax(1).sum() + y.sum())

    def fails(outputs: Tensor, y: Tensor) -> float:
        if len(y) < 6:
            raise ValueError("too few")
        return 0.5

    means = {"right": right, "mean": lambda o, y: right(o, y).mean(), "whole": fedcams.over_test_set(f1)}
    run(linear(), PLAIN, test, metric={**means, "f1": f1, "fails": fails}).evaluate_clients({"all": test})
    said = [record.getMessage() for record in caplog.records]
    assert [text.split()[1] for text in said] == ["f1", "fails"]
    assert "metric f1 is not a mean over examples" in said[0]
    assert "use fedcams.over_test_set(f1), or return one number per example" in said[0]
    caplog.clear()
    run(linear(), PLAIN, (test[0][:8], test[1][:8]), metric=f1)
    assert not caplog.records, "one batch is the whole test set"


@pytest.mark.parametrize("mark", [lambda metric: metric, fedcams.over_test_set])
def test_a_metric_that_fails_is_named_with_what_it_got(mark: Any) -> None:
    def matching(outputs: Tensor, y: Tensor) -> Tensor:
        return outputs.view(-1) - y

    message = (
        r"metric accuracy fails with outputs float32 \[6, 2\] and targets int64 \[6\]: The size of tensor .*argmax"
    )
    with pytest.raises(SpecError, match=message):
        run(linear(), PLAIN, PLAIN[0], metric=mark(matching))


def test_a_metric_without_a_value_is_none() -> None:
    one_class = (X[0], torch.ones(6).long())
    history = run(linear(), PLAIN, one_class, metric=fedcams.over_test_set(lambda o, y: float("nan")))
    assert history.records[-1].test_accuracy is None


def test_the_default_metric_fits_the_loss() -> None:
    mse = run(linear(1), [(x, x[:, :1]) for x in X], (X[0], X[0, :, :1]), loss=nn.functional.mse_loss).records[-1]
    assert mse.test_loss is not None
    assert mse.test_accuracy is None
    for loss in (nn.functional.cross_entropy, nn.CrossEntropyLoss()):
        assert run(linear(), PLAIN, PLAIN[0], loss=loss).records[-1].test_accuracy is not None


@pytest.mark.parametrize(
    ("loss", "ignored"), [(nn.CrossEntropyLoss(ignore_index=1), 1), (nn.functional.cross_entropy, -100)]
)
def test_the_default_metric_leaves_out_targets_that_the_loss_ignores(loss: Any, ignored: int) -> None:
    padded = Y.clone()
    padded[:, ::2] = ignored
    counted = padded != ignored
    examples = [(x.T[None].repeat(2, 1, 1), y.repeat(2, 1)) for x, y in zip(X, padded, strict=True)]
    history = run(nn.Conv1d(3, 2, 1), examples, examples[0], loss=loss)
    right = history.model(examples[0][0])[0].argmax(0) == padded[0]
    assert history[-1].test_accuracy == pytest.approx(float(right[counted[0]].float().mean()))


def test_batches_of_a_test_set_weigh_as_much_as_their_targets_that_count() -> None:
    """The first batch has a few targets that count, the second one only such."""
    x, y = X[0].repeat(250, 1), Y[0].repeat(250)
    y[5:BATCH] = -100
    history = run(linear(), PLAIN, (x, y), loss=nn.functional.cross_entropy)
    counted = y != -100
    assert history[-1].test_accuracy == pytest.approx(float(right(history.model(x), y)[counted].mean()))


def test_the_default_metric_accepts_targets_that_are_probabilities() -> None:
    def soft(y: Tensor) -> Tensor:
        return 0.2 + 0.6 * nn.functional.one_hot(y, 2)

    history = run(linear(), [(x, soft(y)) for x, y in PLAIN], (X[0], soft(Y[0])), loss=nn.CrossEntropyLoss())
    assert history[-1].test_accuracy == pytest.approx(float(right(history.model(X[0]), Y[0]).mean()))


def test_clients_with_names_and_their_own_scores(tmp_path: Any) -> None:
    names = ["nord", "ost", "süd", "west"]
    history = run(linear(), dict(zip(reversed(names), reversed(PLAIN), strict=True)), out=tmp_path / "run")
    assert torch.equal(flat(history), flat(run(linear(), PLAIN)))
    assert history.client_ids == names
    scores = history.evaluate_clients()
    assert list(scores) == names
    outputs = history.model(X[2]).detach()
    assert scores["süd"]["accuracy"] == pytest.approx(float(right(outputs, Y[2]).mean()))
    assert scores["süd"]["loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, Y[2])), rel=1e-5)
    assert history.evaluate_clients({"ost": PLAIN[2]}) == {"ost": scores["süd"]}
    assert history.evaluate_clients({"a new site": PLAIN[2]}) == {"a new site": scores["süd"]}
    with pytest.raises(fedcams.SpecError, match="new is a NoneType; give a pair of tensors"):
        history.evaluate_clients({"new": None})
    with pytest.raises(fedcams.SpecError, match="data is a list; give a mapping from names to examples"):
        history.evaluate_clients([PLAIN[2]])  # type: ignore[arg-type]
    with pytest.raises(fedcams.FedcamsError, match="another run: clients"):
        run(linear(), dict(zip("abcd", PLAIN, strict=True)), out=tmp_path / "run")


def test_a_device_may_be_named() -> None:
    model = linear()
    history = run(model, PLAIN, device="cpu")
    assert torch.equal(flat(history), flat(run(model, PLAIN)))
    with pytest.raises(SpecError, match=r"device='meat': .*; cpu always works"):
        run(model, PLAIN, device="meat")


# -- trees -----------------------------------------------------------------------------------------------------------


class Attributes(dict[str, Any]):
    """A dict whose values are attributes too."""

    __getattr__ = dict.__getitem__


class Named(NamedTuple):
    """Not a batch, but a tuple like any other."""

    a: Tensor


def test_trees_keep_the_class_of_mappings_and_stack_scalars() -> None:
    one = Attributes(logits=torch.ones(2, 3), loss=torch.tensor(1.0), cache=None)
    joined = concatenate([one, map_tensors(lambda part: part * 2, one)])
    assert isinstance(joined, Attributes)
    assert joined.logits.shape == (4, 3)
    assert joined.loss.tolist() == [1.0, 2.0]
    assert joined.cache is None
    assert [name for name, _ in named_tensors((one, Named(torch.ones(1))))] == ["0/logits", "0/loss", "1/0"]
    assert size({"a": (torch.ones(5), torch.ones(5))}) == 5
