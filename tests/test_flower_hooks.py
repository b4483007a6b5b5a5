"""Flower's own options and hooks, in apps like Flower's examples."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fedcams import SpecError
from fedcams.flower import FedCAMS, uplink
from fedcams.flower.checkpoint import read_ledger
from fedcams.flower.records import to_array
from fedcams.method import SAFE_SERVER, Method
from fedcams.rounds.alarm import Alarm
from fedcams.tasks import task
from flower_apps import quick  # noqa: F401  (a fixture)
from flower_grid import LocalGrid

DIGITS = task("digits").load()
NODES, PART = 4, 300
README = Path(__file__).parent.parent / "README.md"
logging.getLogger("flwr").propagate = True


def net(hidden: int = 32) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def app(mods: list[Any], seen: list[dict[str, Any]] | None = None, hidden: int = 32) -> ClientApp:
    """An app of the shape of Flower's quickstart-pytorch, with `momentum` and a rate from the config."""
    made = ClientApp(mods=mods)

    @made.train()
    def train(message: Message, context: Context) -> Message:
        model, config = net(hidden), message.content.config_records["config"]
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        if seen is not None:
            seen.append(dict(config))
        part, lr = int(str(context.node_config["partition-id"])), float(str(config["lr"]))
        own = slice(part * PART, (part + 1) * PART)
        x, y = DIGITS.prepare(DIGITS.train_x[own]), DIGITS.train_y[own]
        optimizer, total = torch.optim.SGD(model.parameters(), lr, momentum=0.9), 0.0
        for batch in torch.arange(PART).split(20):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        metrics = MetricRecord({"train_loss": total / PART, "num-examples": PART})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    return made


def run(
    strategy: FedAvg,
    mods: list[Any],
    rounds: int,
    lr: float = 0.05,
    seen: Any = None,
    nodes: int = NODES,
    hidden: int = 32,
) -> float:
    """Start the strategy; return the last accuracy on the server, in percent."""
    model, accuracies = net(hidden), []

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            right = model(DIGITS.prepare(DIGITS.test_x)).argmax(1) == DIGITS.test_y
        accuracies.append(100 * float(right.float().mean()))
        return MetricRecord({"accuracy": accuracies[-1]})

    made = app(mods, seen, hidden)
    grid = LocalGrid(dict.fromkeys(range(5, 5 + nodes), made), {5 + i: {"partition-id": i} for i in range(nodes)})
    arrays, config = ArrayRecord(net(hidden).state_dict()), ConfigRecord({"lr": lr})
    strategy.start(grid, arrays, num_rounds=rounds, train_config=config, evaluate_fn=evaluate)
    return accuracies[-1]


def ours(folder: Path, cls: type[FedCAMS] = FedCAMS, **options: Any) -> FedCAMS:
    return cls(checkpoint=folder / "server", **options)


# -- two lines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [11, 32], ids=lambda hidden: f"{75 * hidden + 10} weights")
def test_the_two_lines_of_the_readme_train_as_well_as_fedavg(tmp_path: Path, hidden: int) -> None:
    theirs = run(FedAvg(fraction_evaluate=0.0), [], 10, hidden=hidden)
    assert theirs > 85
    (spec,) = re.findall(r'fedcams\.flower\.uplink\("(.*)", state_dir=', README.read_text("utf-8"))
    for each in ("identity", spec):
        folder = tmp_path / each[:4]
        assert run(ours(folder), [uplink(each, state_dir=folder / "site")], 10, hidden=hidden) > theirs - 2


def test_a_sparse_uplink_trains_as_well_as_fedavg_where_a_model_has_thousands_of_weights(tmp_path: Path) -> None:
    theirs = run(FedAvg(fraction_evaluate=0.0), [], 10)
    assert run(ours(tmp_path), [uplink("ternary(ratio=1/16)", state_dir=tmp_path / "site")], 10) > theirs - 2


def test_the_default_server_steps_by_the_mean_update_where_updates_are_small() -> None:
    server = Method(server=SAFE_SERVER).server
    x, delta = torch.zeros(4), torch.tensor([1e-3, -1e-4, 0.0, 50.0])
    x, _ = server.step_(server.init(x), x, delta.clone())
    np.testing.assert_allclose(x[:3] / 0.9487, delta[:3], rtol=1e-3)
    assert x[3] < 1, "large updates are cut"


def test_a_server_that_explodes_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flwr"):
        run(ours(tmp_path, server="fedams(lr=10, eps=1e-3)"), [uplink("identity", state_dir=tmp_path / "site")], 3)
    (said,) = [each.getMessage() for each in caplog.records if "too long" in each.getMessage()]
    assert "training loss" in said
    assert "lower the server's lr (now fedams(lr=10))" in said


def test_the_alarm_is_raised_once_and_not_by_ordinary_training() -> None:
    calm, alarm = Alarm(), Alarm()
    assert not any(calm.hear(t, 2.3 / t, 5.0 / t) for t in range(1, 50))
    assert not any(calm.hear(t, None, 0.0) for t in range(50, 52))
    said = [alarm.hear(t, loss, 1.0) for t, loss in enumerate([2.3, 4.5, 4.7, 3341.0], 1)]
    assert [bool(line) for line in said] == [False, False, True, False]
    assert said[2].startswith("round 3: training loss 4.7, up from 2.3")
    assert not Alarm(0.1, 1.0).hear(2, 0.19, 99.0), "twice the first loss, a hundred times the first norm"
    assert Alarm(0.1, 1.0).hear(2, 0.21, 1.0)
    assert "mean update of norm 101" in [Alarm(1.0, 1.0).hear(2, 1.0, 101.0)][0]
    assert Alarm(1.0, 1.0).hear(2, float("inf"), 1.0)


# -- options ---------------------------------------------------------------------------------------------------------


def test_a_fraction_of_the_nodes_trains_as_in_flower(tmp_path: Path) -> None:
    run(ours(tmp_path, fraction_train=0.5), [uplink("sign", state_dir=tmp_path / "site")], 4)
    cohorts = [line["cohort"] for line in read_ledger(tmp_path / "server")]
    assert [len(cohort) for cohort in cohorts] == [2] * 4
    assert len({tuple(cohort) for cohort in cohorts}) > 1


def test_min_nodes_are_waited_for(tmp_path: Path) -> None:
    few = ours(tmp_path, fraction_train=0.1, min_train_nodes=3, min_available_nodes=4)
    run(few, [uplink("sign", state_dir=tmp_path / "site")], 1)
    (line,) = read_ledger(tmp_path / "server")
    assert len(line["cohort"]) == 3
    assert few.min_available == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fraction_train": 0.5, "sampler": "uniform(n=2)"},
            r"fraction_train=0.5 and sampler=uniform\(n=2\): give only",
        ),
        ({"fraction_train": 0.0}, r"fraction_train=0.0; allowed: a number in \(0, 1\]"),
        (
            {"weighted_by_key": "num-batches"},
            "updates carry only 'num-examples'; .*weighting='uniform' to weight only metrics",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ours(tmp_path, **options)


def test_a_model_in_place_of_its_arrays_is_refused(tmp_path: Path) -> None:
    start: Any = ours(tmp_path).start  # as an app without types calls it
    for given in (net(), net().state_dict()):
        with pytest.raises(SpecError, match=r"initial_arrays is a .*; give ArrayRecord\(model.state_dict\(\)\)"):
            start(LocalGrid({}, {}), given)


def test_a_weight_by_examples_is_taken_from_flowers_option(tmp_path: Path) -> None:
    assert ours(tmp_path, weighted_by_key="num-examples").method.weighting == "examples"
    assert ours(tmp_path).method.weighting == "uniform"


def shifted(strategy: FedCAMS, mods: list[Any], keys: tuple[str, str], metrics: list[dict[str, Any]]) -> Any:
    """Two rounds with a node for each of these metrics; its app adds the config's `by` to a model of one number."""
    made, (arrays_key, config_key) = ClientApp(mods=mods), keys

    @made.train()
    def train(message: Message, context: Context) -> Message:
        values = message.content.array_records[arrays_key]["w"].numpy()
        by = float(str(message.content.config_records[config_key]["by"]))
        said = MetricRecord(metrics[int(str(context.node_config["partition-id"]))])
        content = RecordDict({arrays_key: ArrayRecord({"w": to_array(values + np.float32(by))}), "metrics": said})
        return Message(content, reply_to=message)

    @made.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        said = MetricRecord(metrics[int(str(context.node_config["partition-id"]))])
        return Message(RecordDict({"metrics": said}), reply_to=message)

    nodes = range(5, 5 + len(metrics))
    grid = LocalGrid(dict.fromkeys(nodes, made), {node: {"partition-id": node - 5} for node in nodes})
    initial = ArrayRecord({"w": to_array(np.zeros(3, np.float32))})
    return strategy.start(grid, initial, num_rounds=2, train_config=ConfigRecord({"by": 0.5}), timeout=5)


@pytest.mark.parametrize(
    ("options", "keys"),
    [({}, ("weights", "settings")), ({"arrays_key": "w", "config_key": "c"}, ("w", "c"))],
    ids=["the strategy's keys", "the app's own"],
)
def test_the_mod_passes_records_under_the_keys_that_the_app_expects(
    tmp_path: Path, options: dict[str, Any], keys: tuple[str, str]
) -> None:
    named = ours(tmp_path, server="fedavg", arrayrecord_key="weights", configrecord_key="settings")
    found = shifted(named, [uplink("identity", state_dir=tmp_path / "site", **options)], keys, [{}])
    assert [line["refused"] for line in read_ledger(tmp_path / "server")] == [{}, {}]
    np.testing.assert_allclose(found.arrays["w"].numpy(), 1.0)


@pytest.mark.parametrize("mod", [True, False])
def test_an_update_without_its_weight_is_refused_by_the_name_of_the_metric(tmp_path: Path, mod: bool) -> None:
    mods = [uplink("identity", state_dir=tmp_path / "site")] if mod else []
    strategy = ours(tmp_path, weighted_by_key="num-examples")
    shifted(strategy, mods, ("arrays", "config"), [{"num-examples": 3, "loss": 1.0}, {"samples": 3, "loss": 1.0}])
    line = read_ledger(tmp_path / "server")[-1]
    ((client, why),) = line["refused"].items()
    assert client == ("1" if mod else "6")
    assert "weighting=examples needs the metric 'num-examples', but the app reports samples, loss; add it" in why


def test_metrics_without_their_weight_are_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategy = ours(tmp_path, weighting="uniform", weighted_by_key="batches", fraction_evaluate=1.0)
    mods = [uplink("identity", state_dir=tmp_path / "site")]
    sent: list[dict[str, Any]] = [{"batches": 2, "x": 1.0}, {"x": 9.0}, {"num-examples": 4, "x": 9.0}]
    with caplog.at_level(logging.WARNING, "flwr"):
        found = shifted(strategy, mods, ("arrays", "config"), sent)
    assert found.train_metrics_clientapp[2] == found.evaluate_metrics_clientapp[2] == {"x": 1.0}
    said = [each.getMessage() for each in caplog.records if each.getMessage().startswith("round 2: ")]
    lacks = "reports no weighted_by_key='batches', only x; it is missing from 2 of 3 replies"
    assert said == [
        f"round 2: training metrics are left out of the mean: client 1, node 6, {lacks}",
        f"round 2: evaluation metrics are left out of the mean: node 6 {lacks}",
    ]


@pytest.mark.parametrize(("more", "said"), [({}, 1), ({"fraction_evaluate": 1.0}, 0)])
def test_the_log_says_if_nobody_evaluates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: dict[str, Any], said: int
) -> None:
    """Clients do with Flower's FedAvg; whoever changes two lines would miss their metrics without knowing why."""
    mods = [uplink("identity", state_dir=tmp_path / "site")]
    with caplog.at_level(logging.INFO, "flwr"):
        shifted(ours(tmp_path, **more), mods, ("arrays", "config"), [{"num-examples": 3, "x": 1.0}] * 2)
    assert "".join(each.getMessage() for each in caplog.records).count("nobody evaluates the model; give ") == said


def test_evaluation_does_not_wait_for_clients_that_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower waits for them without a limit, and the run would never end."""

    def waits(seconds: float) -> None:
        raise AssertionError("Flower waits")

    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", waits)
    mods, alone = [uplink("identity", state_dir=tmp_path / "site")], [{"num-examples": 3, "x": 1.0}]
    with caplog.at_level(logging.WARNING, "flwr"):
        found = shifted(ours(tmp_path, fraction_evaluate=1.0), mods, ("arrays", "config"), alone)
    assert found.evaluate_metrics_clientapp == {}
    said = [each.getMessage() for each in caplog.records if "evaluate" in each.getMessage()]
    lacks = "no client evaluates the model: 1 connected, min_available_nodes=2"
    assert said == [f"round {round}: {lacks}" for round in (1, 2)]
    few = ours(tmp_path / "few", fraction_evaluate=1.0, min_available_nodes=1, min_evaluate_nodes=1)
    assert shifted(few, mods, ("arrays", "config"), alone).evaluate_metrics_clientapp[2] == {"x": 1.0}


# -- hooks -----------------------------------------------------------------------------------------------------------


class Decaying(FedCAMS):
    """Lowers the rate, as the strategy of Flower's advanced-pytorch does."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        assert list(arrays) == list(net().state_dict())
        if server_round > 1:
            config["lr"] = float(str(config["lr"])) / 2
        return super().configure_train(server_round, arrays, config, grid)


@pytest.mark.parametrize("mod", [True, False])
def test_a_strategy_may_change_the_config_of_each_round(tmp_path: Path, mod: bool) -> None:
    seen: list[dict[str, Any]] = []
    mods = [uplink("sign", state_dir=tmp_path / "site")] if mod else []
    run(ours(tmp_path, Decaying), mods, 3, lr=0.08, seen=seen, nodes=1)
    assert [config["lr"] for config in seen] == [0.08, 0.04, 0.02]
    assert [config["server-round"] for config in seen] == [1, 2, 3]


class Halving(FedAvg):
    """Halves the rate in every fifth round, as Flower's advanced-pytorch does; ours inherits from it."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if server_round % 5 == 0:
            config["lr"] = float(str(config["lr"])) / 2
        return super().configure_train(server_round, arrays, config, grid)


class OurHalving(Halving, FedCAMS):
    """The same with our strategy in place of Flower's."""


@pytest.mark.slow
def test_two_lines_train_as_well_as_a_strategy_that_lowers_the_rate(tmp_path: Path) -> None:
    theirs = run(Halving(fraction_evaluate=0.0), [], 12, lr=0.1)
    assert theirs > 90
    mods = [uplink("ternary(ratio=1/16)", state_dir=tmp_path / "site")]
    assert run(ours(tmp_path, OurHalving), mods, 12, lr=0.1) > theirs - 2


class OwnMessages(FedCAMS):
    """Makes its own messages."""

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        return list(super().configure_train(*args, **kwargs))


class OwnAggregate(FedCAMS):
    """Overrides a hook that is never called."""

    def aggregate_train(self, *args: Any) -> Any:
        return super().aggregate_train(*args)


class OwnLoop(FedCAMS):
    """Replaces the loop by Flower's."""

    def start(self, *args: Any, **kwargs: Any) -> Any:
        return FedAvg.start(self, *args, **kwargs)


def test_hooks_that_cannot_work_are_refused_by_name(tmp_path: Path) -> None:
    mods = [uplink("sign", state_dir=tmp_path / "site")]
    with pytest.raises(SpecError, match="OwnAggregate overrides aggregate_train, which FedCAMS never calls"):
        ours(tmp_path, OwnAggregate)
    with pytest.raises(SpecError, match=r"OwnMessages.configure_train builds its own messages.*super\(\)"):
        run(ours(tmp_path, OwnMessages), mods, 1)
    with pytest.raises(SpecError, match=r"OwnLoop.start runs its own loop.*do not override start"):
        run(ours(tmp_path / "other", OwnLoop), mods, 1)


class Counting(FedCAMS):
    """Evaluates on one node of its choice, whatever the fraction."""

    rounds: list[int]

    def configure_evaluate(self, server_round: int, *args: Any) -> Iterable[Message]:
        self.rounds.append(server_round)
        return []


def test_hooks_of_evaluation_are_called(tmp_path: Path) -> None:
    strategy = ours(tmp_path, Counting)
    assert isinstance(strategy, Counting)
    strategy.rounds = []
    run(strategy, [uplink("sign", state_dir=tmp_path / "site")], 2)
    assert strategy.rounds == [1, 2]


def measuring(sizes: list[int]) -> Any:
    """A mod that notes the bytes of all arrays of a reply."""

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        arrays = reply.content.array_records.values() if reply.has_content() else []
        sizes.append(sum(len(each.data) for record in arrays for each in record.values()))
        return reply

    return mod


def test_mods_of_ones_own_run_beside_ours(tmp_path: Path) -> None:
    """As in Flower's custom-mods: one outside ours sees compressed replies, one inside sees whole models."""
    outside, inside = list[int](), list[int]()
    ours_between = [measuring(outside), uplink("topk(ratio=1/64)", state_dir=tmp_path / "site"), measuring(inside)]
    run(ours(tmp_path), ours_between, 2, nodes=1)
    assert min(inside) > 9000
    assert max(outside) < 1000


@pytest.mark.slow
def test_two_lines_train_as_well_beside_mods_of_ones_own(tmp_path: Path) -> None:
    sizes = list[int]()
    theirs = run(FedAvg(fraction_evaluate=0.0), [measuring(sizes)], 10)
    assert theirs > 90
    mods = [uplink("ternary(ratio=1/16)", state_dir=tmp_path / "site"), measuring(sizes)]
    assert run(ours(tmp_path), mods, 10) > theirs - 2
