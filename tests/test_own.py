"""`simulate(out=...)`: your own model and data, in a folder that the same call continues."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import command_line
import fedcams
from fedcams import SpecError
from fedcams.errors import UpdateError
from fedcams.experiment import Experiment
from fedcams.own import History
from fedcams.runs import Run, RunError, read_run, resume, run
from fedcams.runs.files import locked
from fedcams.simulation import RoundRecord
from fedcams.tasks import cross_entropy
from fedcams.tasks.base import CropFlip
from forks import Forks
from test_runs import _quick_sync, everything  # noqa: F401  (a fixture)

FULL: dict[str, Any] = {
    "uplink": "topk(ratio=linear(1/4, 1, rounds=4))",
    "local": "sgd(lr=warmup(2, constant(0.2)), steps=2, batch=4)",
    "control": "scaffold",
    "average": "ema(0.8)",
    "downlink": "replica(blockq)",
}
"""Residuals, control variates, replicas, an average and schedules that do not depend on the length of the run."""


def net(seed: int = 0, inputs: int = 3) -> nn.Sequential:
    """A layer that trains, one that does not, and batch norm: statistics that travel and a count that does not."""
    return copy.deepcopy(_net(seed, inputs))


@functools.cache
def _net(seed: int, inputs: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        trained = nn.Linear(inputs, 6)
        torch.manual_seed(99)
        model = nn.Sequential(trained, nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    model[3].requires_grad_(False)
    return model


@functools.cache
def data(clients: int = 5, size: int = 8, inputs: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(clients, size, inputs, generator=generator)
    return [(part, (part.sum(1) > 0).long()) for part in x]


def start(out: Path | None, model: nn.Module | None = None, clients: Any = None, **changes: Any) -> History:
    *given, test = data(6)
    values = {"rounds": 7, "cohort": 2, "uplink": "sign", "local": "sgd(lr=0.2, steps=2, batch=4)"}
    values |= {"engine": "stacked", **changes}  # `auto` takes it after a trial, which is tested with the engines
    test = values.pop("test", test)
    return fedcams.simulate(model or net(), clients or given, test, out=out, checkpoint_every=3, **values)


def upto(history: History, round: int) -> History:
    """Goes on until that round, and closes."""
    for record in history:
        if record.round == round:
            break
    history.close()
    return history


def weights(history: History) -> dict[str, Tensor]:
    return history.model.state_dict()


def same(one: History, two: History) -> bool:
    """Whether two histories tell of the same rounds and came to the same model, and to the same average."""
    pairs = [(weights(one), weights(two))]
    if one.state.average is not None:
        pairs.append((one.averaged_model.state_dict(), two.averaged_model.state_dict()))
    equal = all(torch.equal(a[name], b[name]) for a, b in pairs for name in a if "num_batches" not in name)
    return equal and one.records == two.records


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "engine"),
    [({"uplink": "identity"}, "loop"), ({}, "auto"), (FULL, "auto"), (FULL, "loop")],
    ids=["no rows, loop", "FedCAMS, auto", "everything, auto", "everything, loop"],
)
def test_the_same_call_continues_and_a_finished_run_is_returned(out: Path, method: dict[str, Any], engine: str) -> None:
    whole = start(None, engine=engine, **method).run()
    for round in (2, 3, 5, 6):
        again = start(out, engine=engine, **method)
        assert len(again.records) == (0 if round == 2 else {3: 2, 5: 3, 6: 5}[round])
        upto(again, round)
    made = start(out, engine=engine, **method).run()
    assert same(made, whole)
    lines = (out / "rounds.jsonl").read_text()
    assert lines == "".join(f"{record.to_json()}\n" for record in whole.records)
    before = everything(out)
    returned = start(out, engine=engine, **method)
    assert returned.finished
    assert same(returned, whole)
    assert same(returned.run(), whole)
    assert everything(out) == before
    assert read_run(out).finished


def test_it_is_a_run_like_any_other(out: Path) -> None:
    made = start(out, label="mine").run()
    found = read_run(out)
    assert found.records == made.records
    assert [timing["round"] for timing in found.timings] == list(range(1, 8))
    assert found.experiment.label == "mine"
    assert (str(found.experiment.task), str(found.experiment.model)) == ("python", "python")
    assert (found.experiment.clients, str(found.experiment.sampler)) == (5, "uniform(n=2)")
    assert Experiment.read(out / "experiment.toml") == found.experiment
    assert made.report().name == "index.html"
    assert "mine" in (out / "report" / "summary.md").read_text()


def test_weights_to_start_from_are_those_of_the_checkpoint(out: Path) -> None:
    whole = start(None).run()
    upto(start(out), 4)
    assert same(start(out, model=net(seed=5)).run(), whole)


def test_a_run_without_a_checkpoint_starts_over(out: Path) -> None:
    whole = start(None).run()
    start(out)  # makes the folder
    with (out / "rounds.jsonl").open("w") as lines:
        lines.write('{"round": 1, "coh')
    assert same(start(out).run(), whole)


def test_what_follows_the_checkpoint_may_be_anything(out: Path) -> None:
    whole = start(None).run()
    upto(start(out), 4)
    with (out / "rounds.jsonl").open("ab") as lines:
        lines.write(b"\0" * 20 + b"\n")
    assert same(start(out).run(), whole)


# -- refusals ----------------------------------------------------------------------------------------------------------


def frozen_differently() -> nn.Module:
    model = net()
    with torch.no_grad():
        next(model[3].parameters())[0, 0] += 1
    return model


def counted_differently() -> nn.Module:
    model = net()
    dict(model.named_buffers())["1.num_batches_tracked"] += 1
    return model


def other_test() -> tuple[Tensor, Tensor]:
    x, y = data(6)[5]
    return x, 1 - y


REFUSED: list[tuple[str, Callable[[], dict[str, Any]]]] = [
    (r"server is 'fedams.lr=0.03, beta1=0.' there and 'fedams\(lr=0.5\)' here", lambda: {"server": "fedams(lr=1/2)"}),
    (r"uplink is 'sign' there and 'topk\(k=3\)' here", lambda: {"uplink": "topk(k=3)"}),
    ("feedback is True there and False here", lambda: {"feedback": False}),
    (r"local is .*lr=0.2, .* there and .*lr=0.1, .* here", lambda: {"local": "sgd(lr=0.1, steps=2, batch=4)"}),
    ("control is 'none' there and 'scaffold' here", lambda: {"control": "scaffold"}),
    (r"average is 'none' there and 'ema\(decay=0.5\)' here", lambda: {"average": "ema(0.5)"}),
    (r"transforms is '' there and 'clip\(norm=1\)' here", lambda: {"transforms": "clip(norm=1)"}),
    ("weighting is 'uniform' there and 'examples' here", lambda: {"weighting": "examples"}),
    (r"cohort is 'uniform\(n=2\)' there and 'uniform\(n=3\)' here", lambda: {"cohort": 3}),
    ("seed is 0 there and 1 here", lambda: {"seed": 1}),
    ("model is .* there", lambda: {"model": net(inputs=4), "clients": data(5, inputs=4), "test": data(6, inputs=4)[5]}),
    ("frozen parameters is .* there", lambda: {"model": frozen_differently()}),
    ("buffers that do not travel is .* there", lambda: {"model": counted_differently()}),
    ("clients is '5, .*' there and '4, .*' here", lambda: {"clients": data(6)[:4]}),
    (
        "clients is '5, .*' there and '5, .*' here",
        lambda: {"clients": dict(zip([0, 1, 2, 3, 7], data(6), strict=False))},
    ),
    ("clients is '5, .*' there", lambda: {"clients": [*data(6)[:4], tuple(part[:5] for part in data(6)[4])]}),
    ("test set is .* there", lambda: {"test": other_test()}),
    ("test set is .* there and None here", lambda: {"test": None}),
    ("rounds=6, but the run there has rounds=7; give at least as many", lambda: {"rounds": 6}),
]


@pytest.mark.parametrize(("message", "changes"), REFUSED, ids=[message for message, _ in REFUSED])
def test_another_run_is_refused_by_the_name_of_what_differs(
    out: Path, message: str, changes: Callable[[], dict[str, Any]]
) -> None:
    upto(start(out), 1)
    before = everything(out)
    with pytest.raises(RunError, match=message):
        start(out, **changes())
    assert everything(out) == before


def test_a_folder_of_the_command_line_is_refused(out: Path) -> None:
    run(Experiment.from_dict({"model": "linear", "clients": 3, "sampler": "full", "rounds": 1}), out)
    with pytest.raises(RunError, match="holds a run of `fedcams run`; use `fedcams resume`, or give another folder"):
        start(out)


def test_a_finished_run_whose_model_is_gone_is_not_run_again(out: Path) -> None:
    start(out).run()
    shutil.rmtree(out / "checkpoint")
    with pytest.raises(
        RunError, match="the run is finished, but its checkpoint with the model was deleted; restore it"
    ):
        start(out)


def test_a_finished_run_with_a_damaged_checkpoint_starts_again_as_the_message_says(out: Path) -> None:
    whole = start(out).run()
    (out / "checkpoint" / "state.json").write_text("")
    with pytest.raises(RunError, match=r"damaged.*if the run is finished, delete its whole folder instead"):
        start(out)
    shutil.rmtree(out)
    assert same(start(out).run(), whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trackers": [object()]}, "trackers and label need the run's folder; give out="),
        ({"label": "mine"}, "trackers and label need the run's folder"),
    ],
)
def test_what_needs_a_folder_says_so(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        start(None, **changes)
    with pytest.raises(SpecError, match=r"a report needs the run's folder; give out="):
        start(None).report()


def test_rows_of_ones_own_beside_a_folder_are_refused(out: Path) -> None:
    rows = fedcams.RowStore.in_memory({"residual": fedcams.Layout.of(net())})
    with pytest.raises(SpecError, match="rows and out"):
        start(out, rows=rows)
    with pytest.raises(SpecError, match="trackers='tensorboard'; give a list of trackers"):
        start(out, trackers="tensorboard")
    with pytest.raises(SpecError, match="checkpoint_every=0; allowed: 1 or more"):
        fedcams.simulate(net(), data(), out=out, cohort=2, checkpoint_every=0)
    assert not out.exists()


def test_clients_that_are_loaded_when_they_take_part_are_compared_by_their_ids(out: Path) -> None:
    class Loaded(Mapping[int, Any]):
        """Like a dataset on disk, whose examples must not be counted."""

        def __init__(self, ids: list[int]) -> None:
            self.ids = ids

        def __getitem__(self, client: int) -> tuple[Tensor, Tensor]:
            return data(6)[client]

        def __iter__(self) -> Any:
            return iter(self.ids)

        def __len__(self) -> int:
            return len(self.ids)

    whole = start(None).run()
    upto(start(out, clients=Loaded([0, 1, 2, 3, 4])), 4)
    assert same(start(out, clients=Loaded([0, 1, 2, 3, 4])).run(), whole)
    with pytest.raises(RunError, match=r"clients is .* there"):
        start(out, clients=Loaded([0, 1, 2, 3, 5]))


def test_other_examples_of_the_first_client_are_warned_of(out: Path) -> None:
    """As many as before: by their ids and sizes, the clients are the same."""
    upto(start(out), 1)
    with pytest.warns(UserWarning, match="the first client has different examples from before; give another") as caught:
        start(out, clients=[(x + 1, y) for x, y in data()])
    assert caught[0].filename == __file__, "the warning points at the caller's line"


# -- functions, which only have names ----------------------------------------------------------------------------------


def other_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets)


@pytest.mark.parametrize("name", ["loss", "metric", "prepare", "augment"])
def test_another_function_is_warned_of(out: Path, name: str) -> None:
    functions: dict[str, Any] = {
        "loss": other_loss, "metric": lambda outputs, targets: (outputs.argmax(1) == targets).float(), "prepare": abs,
        "augment": CropFlip(),
    }  # fmt: skip
    upto(start(out), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(out)
    with pytest.warns(
        UserWarning, match=f"continuing with different functions from before: {name} is .* there"
    ) as caught:
        start(out, **dict[str, Any]({name: functions[name]}))
    assert caught[0].filename == __file__, "the warning points at the caller's line"


# -- more rounds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [{}, FULL], ids=["FedCAMS", "everything"])
@pytest.mark.parametrize("ran", [5, 7], ids=["on the way", "when finished"])
def test_a_run_may_grow_and_is_then_the_longer_one(out: Path, method: dict[str, Any], ran: int) -> None:
    whole = start(None, rounds=10, **method).run()
    upto(start(out, **method), ran)
    grown = start(out, rounds=10, **method)
    assert not grown.finished
    assert "rounds=10" in json.loads((out / "python.json").read_text())["call"]
    assert same(grown.run(), whole)
    assert read_run(out).finished
    assert read_run(out).experiment.rounds == 10


@pytest.mark.parametrize("rounds", [6, 8])
def test_a_run_whose_schedules_depend_on_its_length_keeps_it(out: Path, rounds: int) -> None:
    method: dict[str, Any] = {"server": "fedams(lr=cosine(1, 0))"}
    upto(start(out, **method), 4)
    with pytest.raises(RunError, match=f"another run: rounds is 7 there and {rounds} here"):
        start(out, rounds=rounds, **method)
    assert same(start(out, **method).run(), start(None, **method).run())


# -- callbacks and trackers --------------------------------------------------------------------------------------------


def test_a_callback_that_stops_the_run_finishes_it(out: Path) -> None:
    seen: list[int] = []

    def stop(record: RoundRecord) -> bool:
        seen.append(record.round)
        return record.round == 4

    made = start(out, callbacks=[stop, lambda record: None]).run()
    assert seen == [1, 2, 3, 4]
    assert made.finished
    assert made.stopped
    assert read_run(out).finished
    again = start(out, callbacks=[stop])
    assert again.finished
    assert same(again.run(), made)
    assert same(again, upto(start(None), 4))
    assert seen == [1, 2, 3, 4]
    assert resume(out).records == made.records  # the command line agrees
    result = command_line.fedcams("resume", str(out))
    assert result.exit_code == 0, result.output
    assert "already finished" in result.output
    assert "4 of 7" not in (made.report().parent / "summary.md").read_text()


def test_a_stopped_run_goes_on_if_it_is_given_more_rounds(out: Path) -> None:
    start(out, callbacks=[lambda record: record.round == 4]).run()
    grown = start(out, rounds=9)
    assert (len(grown), grown.finished) == (4, False)
    assert same(grown.run(), start(None, rounds=9).run())


@pytest.mark.parametrize("answer", [0.5, "no", 1, torch.tensor(1.0)])
def test_only_true_stops_a_run(answer: Any) -> None:
    assert len(start(None, callbacks=[lambda record: answer]).run()) == 7


@pytest.mark.parametrize("kind", [bool, np.bool_, torch.tensor])
def test_a_run_stops_at_what_python_numpy_and_torch_call_true(kind: Callable[[bool], Any]) -> None:
    assert len(start(None, callbacks=[lambda record: kind(record.round == 3)]).run()) == 3


@pytest.mark.parametrize("values", [np.array, torch.tensor])
def test_a_run_goes_on_after_many_truth_values(values: Callable[[list[bool]], Any]) -> None:
    assert len(start(None, callbacks=[lambda record: values([True, True])]).run()) == start(None).rounds


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"local": "sgd(lr=1e30, epochs=3)"}, "round 1: every client was refused; client [0-9]+: .*"),
        (
            {"guard": "adaptive(factor=1)", "uplink": "identity", "cohort": 5},
            "round 1: 2 of 5 clients refused; client 0: .* accepts at most .* in this round; records name later ones",
        ),
        ({"server": "fedavg(lr=1000)", "uplink": "identity"}, "round 5: training loss 8.*; the steps are too long"),
    ],
)
def test_training_that_fails_is_told_once(method: Any, message: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedcams"):
        start(None, net()[0], **method).run()
    assert [bool(re.match(message, record.message)) for record in caplog.records] == [True]


class Attentive(nn.Module):
    """A model that keeps what it has computed, directly and through a hook that computes its weight."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.layer = nn.utils.weight_norm(nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.map = self.layer(x)
        return self.map


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_model_that_keeps_its_activations_can_be_copied(engine: str) -> None:
    model = Attentive()
    model(torch.ones(1, 3))
    history = start(None, model, engine=engine, test=None, rounds=2).run()
    x = torch.randn(4, 3)
    torch.testing.assert_close(history.model(x), history.model(x))
    assert not torch.equal(history.model(x), model(x))
    assert dict(history.model.named_parameters())["layer.weight_g"].requires_grad


def test_callbacks_without_a_folder(out: Path) -> None:
    made = start(None, callbacks=[lambda record: record.round == 2]).run()
    assert (len(made.records), made.finished, made.stopped) == (2, True, True)


def test_a_stop_at_the_last_round_is_a_run_of_full_length(out: Path) -> None:
    start(out, callbacks=[lambda record: record.round == 7]).run()
    assert not (out / "stopped.json").exists()
    assert start(out).finished


class Follower:
    """A tracker that notes everything."""

    def __init__(self) -> None:
        self.notes: list[Any] = []

    def start(self, run: Run) -> None:
        self.notes.append(("start", len(run.records), run.experiment.label))

    def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
        assert timing["round"] == record.round
        self.notes.append(record.round)

    def finish(self) -> None:
        self.notes.append("finish")


def test_trackers_follow(out: Path) -> None:
    follower = Follower()
    upto(start(out, trackers=[follower], label="mine"), 4)
    start(out, trackers=[follower], label="mine").run()
    start(out, trackers=[follower], label="mine").run()  # nothing happens, nothing is told
    expected = [("start", 0, "mine"), 1, 2, 3, 4, "finish", ("start", 4, "mine"), 5, 6, 7, "finish"]
    assert follower.notes == expected


# -- leaving off -------------------------------------------------------------------------------------------------------


def saved(out: Path) -> int:
    return int(json.loads((out / "checkpoint" / "state.json").read_text())["round"])


def test_closing_keeps_the_last_round_and_the_history_can_go_on(out: Path) -> None:
    history = upto(start(out), 4)
    assert saved(out) == 4
    assert same(history.run(), start(None).run())


def test_a_history_that_is_let_go_keeps_its_last_round(out: Path) -> None:
    for record in start(out):
        if record.round == 5:
            break
    assert saved(out) == 5


PROCESS = """
import sys, torch
from pathlib import Path
torch.set_num_threads(int(sys.argv[2]))  # on which sums depend
from test_own import start
history = start(Path(sys.argv[1]))
for record in history:
    if record.round == 5:
        break
"""


def test_the_end_of_the_process_keeps_the_last_round(out: Path, forks: Forks) -> None:
    assert forks.run(PROCESS, out, torch.get_num_threads()).code == 0
    assert saved(out) == 5
    assert same(start(out).run(), start(None).run())


def test_a_round_that_fails_ends_the_history_and_the_run_continues_from_the_checkpoint(out: Path) -> None:
    calls = iter(range(100))

    def failing(outputs: Tensor, targets: Tensor) -> Tensor:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return (outputs.argmax(1) == targets).float()

    for folder in (out, None):
        history = start(folder, metric=failing)
        with pytest.raises(KeyboardInterrupt):
            history.run()
        assert len(history.records) == 4
        with pytest.raises(SpecError, match="round 5 was interrupted halfway; call simulate again"):
            history.run()
        calls = iter(range(100))
    calls = iter(range(50, 100))
    assert saved(out) == 3
    assert same(start(out, metric=failing).run(), start(None).run())


def test_the_same_call_again_takes_over_from_the_history_that_is_still_there(out: Path) -> None:
    first = start(out)
    for record in first:
        if record.round == 2:
            break
    second = start(out)  # as in a notebook, whose cell is executed again
    assert len(second) == 2
    assert same(second.run(), start(None).run())
    with pytest.raises(RunError, match="another history has continued this run"):
        first.run()


def test_two_at_one_folder_are_refused(out: Path) -> None:
    start(out).close()
    with locked(out), pytest.raises(RunError, match="another process is using this run"):
        start(out)


def test_a_callback_that_fails_leaves_the_run_free_to_continue(out: Path) -> None:
    def fails(record: fedcams.RoundRecord) -> None:
        if record.round == 2:
            raise KeyError("mine")

    first = start(out, callbacks=[fails])
    with pytest.raises(KeyError, match="mine"):
        first.run()
    assert same(start(out).run(), start(None).run()), "in the same process, with the first history still there"


@pytest.mark.parametrize("content", [None, "{", "{}", '{"call": "simulate()"}'])
def test_a_damaged_identity_is_refused_by_its_file(out: Path, content: str | None) -> None:
    upto(start(out), 1)
    (out / "python.json").unlink()
    if content is not None:
        (out / "python.json").write_text(content)
    with pytest.raises(RunError, match=r"python\.json: .*damaged.*; restore it, or give another folder"):
        start(out)


def test_a_history_that_was_left_behind_is_refused(out: Path) -> None:
    left, right = start(out), start(out)
    upto(right, 2)
    with pytest.raises(RunError, match="another history has continued this run; call simulate again to load it"):
        left.run()
    assert same(start(out).run(), start(None).run())


# -- the command line and help -----------------------------------------------------------------------------------------


def test_resume_says_that_the_run_was_started_from_python_and_shows_the_call(out: Path) -> None:
    upto(start(out, average="ema(0.5)"), 2)
    before = everything(out)
    result = command_line.fedcams("resume", str(out))
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "this run was started from Python, which has its model and data; call" in said
    assert "fedcams.simulate(model, clients, test, " in said
    assert "average='ema(decay=0.5)'" in said
    assert f"rounds=7, cohort='uniform(n=2)', seed=0, out='{out}')" in said
    assert everything(out) == before
    call = json.loads((out / "python.json").read_text())["call"]
    *clients, test = data(6)
    found = eval(call, {"fedcams": fedcams, "model": net(), "clients": clients, "test": test})
    assert same(found.run(), start(None, average="ema(0.5)").run())


def test_a_history_has_a_length_places_and_pictures() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    history = start(None, rounds=4)
    assert (len(history), bool(history)) == (0, True)
    assert history.to_frame().empty
    assert history._repr_html_() == "<p>0 of 4 rounds</p>"
    with pytest.raises(SpecError, match=r"nothing to draw yet; call history.run"):
        history.plot()
    history.run()
    assert len(history) == 4
    assert history[-1] is history.records[3]
    assert [record.round for record in history] == [1, 2, 3, 4]
    table = history._repr_html_()
    assert table.count("<tr>") == 5
    assert f"<td>{history[-1].train_loss:.4g}</td>" in table
    curve = history.plot("q").axes[0].lines[0]
    assert list(curve.get_xdata()) == [1, 2, 3, 4]
    assert list(curve.get_ydata()) == [record.get("q") for record in history]
    assert len(history.plot().axes) == 2
    with pytest.raises(SpecError, match=r"no record has a number 'tets_loss' \(did you mean 'test_loss'\?\)"):
        history.plot("tets_loss")
    matplotlib.pyplot.close("all")


def test_help_tells_what_a_history_is() -> None:
    members = {name: getattr(History, name) for name in dir(History) if not name.startswith("_")}
    assert all(inspect.getdoc(member) for member in members.values())
    assert "run()" in (inspect.getdoc(History) or "")
    assert all(f"{name}:" in (inspect.getdoc(fedcams.simulate) or "")
               for name in inspect.signature(fedcams.simulate).parameters if name != "settings")  # fmt: skip


def test_the_users_model_is_left_alone(out: Path) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    made = start(out, model=model).run()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(made.model.state_dict()["0.weight"], before["0.weight"])


@pytest.mark.parametrize("kept", [True, False])
def test_a_test_loss_that_is_not_finite_stops_the_run(kept: bool, out: Path) -> None:
    client = (torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))
    test = (torch.full((4, 3), torch.nan), client[1])
    history = fedcams.simulate(nn.Linear(3, 2), [client] * 2, test, rounds=3, cohort=1, out=out if kept else None)
    with pytest.raises(UpdateError, match=r"round 1: test_loss is nan; lower the learning rates or clip"):
        history.run()
    assert len(history) == 0


def test_what_can_never_work_is_refused_before_the_first_round() -> None:
    client = (torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(SpecError, match=r"min_replies=2, but a cohort has at most 1 clients"):
        fedcams.simulate(nn.Linear(3, 2), [client] * 2, cohort=1, min_replies=2)
    with pytest.raises(SpecError, match=r"out='' names no folder"):  # it would fill the current one
        fedcams.simulate(nn.Linear(3, 2), [client] * 2, cohort=1, out="")


class InPlace(nn.Linear):
    """Scales its inputs in place, which does no harm to the batches of a loader."""

    def forward(self, x: Tensor) -> Tensor:
        x /= 2
        return super().forward(x)


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_model_that_changes_its_inputs_leaves_the_users_data_alone(engine: str) -> None:
    given = copy.deepcopy(data(3))
    history = start(None, InPlace(3, 2), given[:2], test=given[2], rounds=2, engine=engine).run()
    history.evaluate_clients()
    assert all(torch.equal(ours, theirs) for pair, kept in zip(given, data(3), strict=True)
               for ours, theirs in zip(pair, kept, strict=True))  # fmt: skip
