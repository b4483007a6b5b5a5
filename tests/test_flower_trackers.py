"""Trackers over Flower: they receive every round and the app's metrics, and never stop a federation."""

from __future__ import annotations

import csv
import logging
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, Message, MetricRecord

from fedcams import SpecError
from fedcams.flower.checkpoint import read_ledger
from fedcams.runs import Run
from fedcams.simulation import RoundRecord
from flower_apps import CLIENTS, ROUNDS, experiment, federation, quick, run

__all__ = ["quick"]  # a fixture for these tests
UNCOUNTED = {"paper_bits_up", "wire_up_buffers", "test_loss"}
"""What only a simulation measures."""


def follow(folder: Path, *trackers: Any, rounds: int = ROUNDS, every: int = 1) -> list[dict[str, Any]]:
    """Run a federation with trackers, evaluated on the server in some rounds; return its ledger."""

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        return None if round % every else MetricRecord({"accuracy": 0.1 * round, "per-class": [0.5, 0.6]})

    grid, strategy, arrays = federation(folder, experiment(), trackers=list(trackers))
    strategy.start(grid, arrays, rounds, timeout=5.0, evaluate_fn=evaluate)
    return read_ledger(folder / "checkpoint")


def table(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "checkpoint" / "rounds.csv").read_text("utf-8").splitlines()))


def test_a_csv_file_has_the_ledgers_numbers_and_the_apps_metrics(tmp_path: Path) -> None:
    ledger = follow(tmp_path, "csv")
    rows = table(tmp_path)
    assert [row["round"] for row in rows] == [str(line["round"]) for line in ledger]
    for row, line in zip(rows, ledger, strict=True):
        for name in ("train_loss", "delta_norm", "wire_up", "wire_down"):
            assert float(row[name]) == line[name]
        assert (int(row["accepted"]), int(row["absent"])) == (len(line["accepted"]), len(line["absent"])) == (3, 0)
        assert float(row["server/accuracy"]) == 0.1 * line["round"]
        assert float(row["train/train_loss"]) == pytest.approx(line["train_loss"])
        assert float(row["seconds"]) > 0
        assert not UNCOUNTED & row.keys()
        assert "server/per-class" not in row, "a list is no curve"


def test_a_run_that_goes_on_keeps_the_metrics_of_its_first_rounds(tmp_path: Path) -> None:
    follow(tmp_path, "csv", rounds=2)
    follow(tmp_path, rounds=3)
    follow(tmp_path, "csv")
    rows = table(tmp_path)
    assert [row["round"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["server/accuracy"] for row in rows] == ["0.1", "0.2", "", "0.4"], "no tracker followed round 3"
    assert all(float(row["train_loss"]) > 0 for row in rows)


def test_metrics_that_begin_later_have_a_column_of_their_own(tmp_path: Path) -> None:
    follow(tmp_path, "csv", every=2)
    assert [row["server/accuracy"] for row in table(tmp_path)] == ["", "0.2", "", "0.4"]


@pytest.mark.parametrize(("sampler", "replies"), [("full", 4), ("fraction(part=0.5)", 2)])
def test_they_follow_a_run_that_needs_several_replies_of_unknown_clients(
    sampler: str, replies: int, tmp_path: Path
) -> None:
    what = experiment(sampler=sampler, min_replies=replies)
    run(*federation(tmp_path, what, trackers=["csv"], clients=None))
    assert [row["accepted"] for row in table(tmp_path)] == [str(replies)] * ROUNDS


def test_tensorboard_shows_the_rounds(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    ledger = follow(tmp_path, "tensorboard", rounds=2)
    ledger = follow(tmp_path, "tensorboard")
    found = reader.EventAccumulator(str(tmp_path / "checkpoint" / "tensorboard")).Reload()
    for name in ("train_loss", "wire_up"):
        shown = [(event.step, event.value) for event in found.Scalars(name)]
        assert shown == [(line["round"], struct.unpack("f", struct.pack("f", line[name]))[0]) for line in ledger]
    assert [event.step for event in found.Scalars("server/accuracy")] == [1, 2, 3, 4]
    assert "topk(ratio=1/8)" in str(found.Tensors("experiment/text_summary")), "what ran"


class Own:
    """A custom tracker, which may fail."""

    def __init__(self, fails: str = "") -> None:
        self.notes: list[Any] = []
        self.fails = fails

    def _note(self, what: Any, where: str) -> None:
        self.notes.append(what)
        if where == self.fails:
            raise RuntimeError("connection\nlost")

    def start(self, run: Run) -> None:
        self.name = run.name
        self._note((run.path.name, run.experiment.clients, len(run.records)), "start")

    def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
        self._note(record.round, "log")

    def finish(self) -> None:
        self._note("finish", "finish")


def test_a_tracker_of_ones_own_follows_until_the_run_is_finished(tmp_path: Path) -> None:
    trackers = [Own(), Own(), Own()]
    for each, rounds in zip(trackers, (2, ROUNDS, ROUNDS), strict=True):
        follow(tmp_path, each, rounds=rounds)
    first, second, third = (each.notes for each in trackers)
    assert first == [("checkpoint", CLIENTS, 0), 1, 2, "finish"]
    assert second == [("checkpoint", CLIENTS, 2), 3, 4, "finish"]
    assert third == [], "a finished run is not tracked again"
    assert trackers[0].name == trackers[1].name
    assert re.fullmatch(r"run-[0-9a-f]{8}", trackers[0].name), "the one that clients know, and new for every folder"


def test_one_that_can_tell_hears_that_a_run_broke_off(tmp_path: Path) -> None:
    class Careful(Own):
        def abort(self, error: BaseException) -> None:
            self.notes.append(str(error))

    def interrupt(node: int, message: Message, reply: Message | None) -> None:
        raise KeyboardInterrupt("now")

    careful = Careful()
    with pytest.raises(KeyboardInterrupt):
        run(*federation(tmp_path, experiment(), interrupt, trackers=[careful]))
    assert careful.notes[1:] == ["now"]


@pytest.mark.parametrize("fails", ["log", "finish"])
def test_one_that_fails_stops_neither_the_run_nor_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    calm = Own()
    with caplog.at_level(logging.WARNING, "flwr"):
        assert len(follow(tmp_path, Own(fails), calm, rounds=2)) == 2
    assert calm.notes[1:] == [1, 2, "finish"]
    said = [each.getMessage() for each in caplog.records if "tracker" in each.getMessage()]
    assert said[0] == f"tracker {__name__} failed: RuntimeError('connection\\nlost')"
    assert len(said) == (2 if fails == "log" else 1)


def test_one_that_cannot_start_ends_the_run_before_a_round(tmp_path: Path) -> None:
    calm = Own()
    with pytest.raises(RuntimeError, match="connection"):
        follow(tmp_path, calm, Own("start"))
    assert calm.notes[1:] == ["finish"]
    assert read_ledger(tmp_path / "checkpoint") == []


def test_what_is_no_tracker_is_refused_at_the_call(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no tracker is named 'cvs'"):
        follow(tmp_path, "cvs")
    with pytest.raises(SpecError, match=r"trackers=\[3\]; give a list of trackers"):
        follow(tmp_path, 3)
    private = {"privacy": "server(clip=1, noise=1)", "guard": "none", "sampler": "bernoulli(p=0.5)"}
    with pytest.raises(SpecError, match="and a tracker: it would receive losses and norms"):
        federation(tmp_path, experiment(**private), trackers=["csv"])
