"""Trackers: they start, receive every round and finish, even if a run fails."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fedcams
from fedcams import runs
from fedcams.cli.progress import Progress
from fedcams.cli.session import Session, Settings
from fedcams.errors import SpecError
from fedcams.experiment import Experiment
from fedcams.extras import ExtraMissing
from fedcams.runs import Run, RunError
from fedcams.simulation import RoundRecord
from fedcams.trackers import Tracker, check_trackers, scalars, tracker

TINY = Experiment(task="logistic(size=20)", model="linear", clients=2, sampler="full", rounds=3)  # type: ignore[arg-type]


class Fake:
    """Notes what it is told; fails in a round if asked to."""

    def __init__(self, fails_in: int = 0) -> None:
        self.notes: list[Any] = []
        self.fails_in = fails_in

    def start(self, run: Run) -> None:
        self.notes.append(("start", run.path.name, len(run.records)))

    def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
        assert timing["seconds"] >= 0
        if record.round == self.fails_in:
            raise RuntimeError("connection lost")
        self.notes.append(record.round)

    def finish(self) -> None:
        self.notes.append("finish")


class Stopping(Fake):
    """Ctrl-C in round 2."""

    def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
        if record.round == 2:
            raise KeyboardInterrupt


def session(*trackers: Tracker) -> Session:
    return Session(Settings(), trackers, Progress(quiet=True))


def test_a_tracker_follows_a_run(tmp_path: Path) -> None:
    fakes = [Fake(), Fake()]
    session(*fakes).carry_out(TINY, tmp_path / "r")
    assert fakes[0].notes == fakes[1].notes == [("start", "r", 0), 1, 2, 3, "finish"]


def test_it_is_finished_when_the_run_breaks_off_and_told_what_is_there_when_it_goes_on(tmp_path: Path) -> None:
    broken, next_one = Fake(fails_in=2), Fake()
    with pytest.raises(RunError, match=r"failed in round 2: RuntimeError: connection lost; run the same command again"):
        session(broken).carry_out(TINY, tmp_path / "r")
    assert broken.notes == [("start", "r", 0), 1, "finish"]
    careful = Careful()
    with pytest.raises(KeyboardInterrupt):
        session(careful, Stopping()).carry_out(TINY, tmp_path / "stopped")
    assert careful.notes == [("start", "stopped", 0), 1, 2, "KeyboardInterrupt"]
    session(next_one).carry_out(TINY, tmp_path / "r")
    assert next_one.notes == [("start", "r", 2), 1, 2, 3, "finish"]


class Careful(Fake):
    """Tells a run that ended early from a finished one."""

    def abort(self, error: BaseException) -> None:
        self.notes.append(type(error).__name__)


@pytest.mark.parametrize(
    ("steps", "callbacks", "heard"),
    [
        (5, [], [1, 2, 3, "finish"]),
        (2, [], [1, 2, "GeneratorExit"]),
        (5, [lambda record: record.round == 2], [1, 2, "finish"]),
        (5, [lambda record: 1 // (2 - record.round)], [1, 2, "GeneratorExit"]),
    ],
    ids=["to the end", "break", "stopped on purpose", "a callback fails"],
)
def test_it_may_hear_that_a_run_ended_early(tmp_path: Path, steps: int, callbacks: list[Any], heard: list[Any]) -> None:
    client, careful = (torch.eye(4), torch.tensor([0, 1, 0, 1])), Careful()
    history = fedcams.simulate(
        nn.Linear(4, 2), [client] * 2, rounds=3, out=tmp_path / "r", trackers=[careful], callbacks=callbacks
    )
    with contextlib.suppress(ZeroDivisionError):
        for _ in zip(range(steps), history, strict=False):
            pass
    history.close()
    assert careful.notes == [("start", "r", 0), *heard]


def test_one_that_cannot_start_is_named_before_the_run_begins(tmp_path: Path) -> None:
    class Locked(Fake):
        def start(self, run: Run) -> None:
            raise PermissionError("no key;\nlog in")

    with pytest.raises(RunError, match=r"'test_trackers' cannot start: PermissionError: no key; log in; set it up, or"):
        session(Locked()).carry_out(TINY, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_finished_run_is_not_tracked_again(tmp_path: Path) -> None:
    fake = Fake()
    session().carry_out(TINY, tmp_path / "r")
    session(fake).carry_out(TINY, tmp_path / "r")
    assert fake.notes == []


def test_only_numbers_become_curves(tmp_path: Path) -> None:
    record = session().carry_out(TINY, tmp_path / "r").records[0]
    drawn = dict(scalars(record, {"seconds": 0.5, "phases": {}}))
    assert drawn["test_accuracy"] == record.test_accuracy
    assert drawn["seconds"] == 0.5
    assert not {"round", "cohort", "gamma"} & drawn.keys()


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(SpecError, match=r"no tracker is named 'tensorbord' \(did you mean 'tensorboard'\?\)"):
        tracker("tensorbord")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ExtraMissing, match=r"pip install 'fedcams\[tensorboard\]'"):
        tracker("tensorboard")


# -- TensorBoard, read back by its own reader --------------------------------------------------------------------------


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Name -> (round, value) of everything that TensorBoard would draw."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}


def recorded(run: Run) -> dict[str, list[tuple[int, float]]]:
    """The same as the records tell it; TensorBoard keeps float32."""
    drawn: dict[str, list[tuple[int, float]]] = {}
    for record, timing in zip(run.records, run.timings, strict=True):
        for name, value in scalars(record, timing):
            drawn.setdefault(name, []).append((record.round, struct.unpack("f", struct.pack("f", value))[0]))
    return drawn


def test_tensorboard_shows_what_was_recorded(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = session(tracker("tensorboard")).carry_out(TINY, tmp_path / "r")
    shown = curves(run.path)
    assert shown == recorded(run)
    assert {"train_loss", "test_accuracy", "wire_up", "paper_bits_down", "q", "seconds"} <= shown.keys()
    assert [step for step, _ in shown["test_accuracy"]] == [1, 2, 3]


def test_tensorboard_shows_a_resumed_run_as_one(tmp_path: Path) -> None:
    """Without a checkpoint rounds 1 and 2 are run twice; what the first sitting drew of them is not shown."""
    pytest.importorskip("tensorboard")
    with pytest.raises(RunError, match="connection lost"):
        session(tracker("tensorboard"), Fake(fails_in=2)).carry_out(TINY, tmp_path / "r")
    run = session(tracker("tensorboard")).carry_out(TINY, tmp_path / "r")
    assert len(list((run.path / "tensorboard").glob("events.*"))) == 2
    assert curves(run.path) == recorded(run)


# -- files and services, each read back by its own reader ------------------------------------------------------------


def test_a_csv_file_has_every_round_also_of_a_resumed_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="connection lost"):
        session(tracker("csv"), Fake(fails_in=2)).carry_out(TINY, tmp_path / "r")
    run = session(tracker("csv")).carry_out(TINY, tmp_path / "r")
    rows = list(csv.DictReader((run.path / "rounds.csv").read_text("utf-8").splitlines()))
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    for row, record, timing in zip(rows, run.records, run.timings, strict=True):
        assert {name: float(row[name]) for name, _ in scalars(record, timing)} == dict(scalars(record, timing))


def test_a_csv_file_that_could_not_be_written_is_whole_later(tmp_path: Path) -> None:
    """Over Flower, a tracker that fails is told of the next round all the same."""
    path, following = tmp_path / "r", tracker("csv")
    following.start(Run(path, TINY, [], [], {}, []))
    with pytest.raises(FileNotFoundError):
        following.log(RoundRecord(round=1, cohort=[0]), {})
    path.mkdir()
    for number in (2, 3):
        following.log(RoundRecord(round=number, cohort=[0]), {})
    rows = list(csv.DictReader((path / "rounds.csv").read_text("utf-8").splitlines()))
    assert [row["round"] for row in rows] == ["1", "2", "3"]


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_a_csv_file_is_not_written_through_a_link(tmp_path: Path, kind: str) -> None:
    precious, path, following = tmp_path / "precious", tmp_path / "rounds.csv", tracker("csv")
    precious.write_bytes(b"round\n1\n")
    if kind == "hard":
        os.link(precious, path)
    else:
        path.symlink_to(precious)
    following.start(Run(tmp_path, TINY, [], [], {}, []))
    for number in (1, 2):
        following.log(RoundRecord(round=number, cohort=[0]), {})
    assert precious.read_bytes() == b"round\n1\n"
    assert len(path.read_text("utf-8").splitlines()) == 3


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_a_link_that_takes_the_place_of_a_csv_file_is_replaced_again(tmp_path: Path, kind: str) -> None:
    precious, path, following = tmp_path / "precious", tmp_path / "rounds.csv", tracker("csv")
    precious.write_bytes(b"precious")
    following.start(Run(tmp_path, TINY, [], [], {}, []))
    for number in (1, 2, 3):
        following.log(RoundRecord(round=number, cohort=[0]), {})
        if number == 1:
            path.unlink()
            os.link(precious, path) if kind == "hard" else path.symlink_to(precious)
    assert precious.read_bytes() == b"precious"
    assert len(path.read_text("utf-8").splitlines()) == 4


def test_a_csv_file_begins_with_the_rounds_before_it(tmp_path: Path) -> None:
    def stop(record: RoundRecord, timing: dict[str, Any]) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(TINY, tmp_path / "r", checkpoint_every=1, watch=stop)
    run = session(tracker("csv")).carry_out(TINY, tmp_path / "r")
    rows = list(csv.DictReader((run.path / "rounds.csv").read_text("utf-8").splitlines()))
    assert [row["round"] for row in rows] == ["1", "2", "3"]


def kept_by_wandb(folder: Path) -> list[Any]:
    """The framed records for `wandb sync`; wandb's own process writes them, at times a moment after `finish`."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    found: list[Any] = []
    for _ in range(400):
        found, data, at = [], file.read_bytes(), 7
        while at < len(data):
            size, kind = struct.unpack_from("<HB", data, at + 4)
            assert kind == 1, "a record that is longer than a frame"
            found.append(records.Record.FromString(data[at + 7 : at + 7 + size]))
            at += 7 + size
        if found and found[-1].HasField("exit"):
            break
        time.sleep(0.05)
    return found


@pytest.mark.filterwarnings("ignore")  # of their own dependencies
def test_wandb_keeps_every_round_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = session(tracker("wandb(project=mine, mode=offline)")).carry_out(TINY, tmp_path / "r")
    kept = b"".join(record.SerializeToString() for record in kept_by_wandb(run.path))
    assert b"logistic(size=20)" in kept, "the experiment"
    for record in run.records:
        assert json.dumps(record.train_loss).encode() in kept
        assert json.dumps(record.delta_norm).encode() in kept


@pytest.mark.filterwarnings("ignore")
def test_wandb_is_told_how_a_run_ended(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for folder, other, code in (("a", Stopping(), 255), ("b", Fake(fails_in=3), 1), ("c", Fake(), 0)):
        with contextlib.suppress(KeyboardInterrupt, RunError):
            session(tracker("wandb(mode=offline)"), other).carry_out(TINY, tmp_path / folder)
        assert kept_by_wandb(tmp_path / folder)[-1].exit.exit_code == code


@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_every_round_of_a_resumed_run_as_one(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    uri = f"sqlite:///{tmp_path / 'mine.db'}"
    spec = f'mlflow(uri="{uri}", experiment=mine)'
    client = tracking.MlflowClient(tracking_uri=uri)

    def stored() -> Any:
        (found,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
        return found

    class Looking(Fake):
        def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
            self.notes.append(stored().info.status)

    for error, other, status in ((KeyboardInterrupt, Stopping(), "KILLED"), (RunError, Fake(fails_in=2), "FAILED")):
        with pytest.raises(error):
            session(tracker(spec), other).carry_out(TINY, tmp_path / "it's r")
        assert stored().info.status == status
    looking = Looking()
    run = session(tracker(spec), looking).carry_out(TINY, tmp_path / "it's r")
    assert looking.notes[1:-1] == ["RUNNING"] * 3
    found = stored()
    assert (found.info.status, found.info.run_name) == ("FINISHED", "it's r")
    values = {each.step: each.value for each in client.get_metric_history(found.info.run_id, "test_accuracy")}
    assert values == {record.round: record.test_accuracy for record in run.records}
    assert found.data.params["rounds"] == "3"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Fake, r"trackers: Fake is a class; give an instance, such as Fake\(\)"),
        (SimpleNamespace(log=print), "SimpleNamespace has no method 'start'; it needs start, log and finish"),
        (SimpleNamespace(start=print, log=print), "SimpleNamespace has no method 'finish'"),
    ],
)
def test_what_could_not_follow_a_run_is_refused(given: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_trackers([given], fedcams.Method().privacy)


def test_specs_of_trackers_follow_a_run_of_ones_own(tmp_path: Path) -> None:
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    clients = [(x[:4], (x[:4, 0] > 0).long()), (x[4:], (x[4:, 0] > 0).long())]
    made = fedcams.simulate(nn.Linear(2, 2), clients, cohort=2, rounds=2, out=tmp_path / "r", trackers=["csv"]).run()
    assert len((tmp_path / "r" / "rounds.csv").read_text().splitlines()) == 1 + len(made)
