"""A run that gets more rounds equals one that had them from the start, or is refused with a reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from command_line import fedcams
from fedcams import runs
from fedcams.durable import sealed
from fedcams.experiment import Experiment
from fedcams.runs import RunError, check_extension, extend, read_run
from fedcams.runs.folder import runs_below
from fedcams.simulation import RoundRecord

BASE: dict[str, Any] = {"task": "logistic(size=40)", "model": "linear", "clients": 4, "sampler": "uniform(n=2)"}
FEEDBACK = {"uplink": "topk(ratio=1/8)", "downlink": "replica(sign)", "control": "scaffold", "average": "ema(0.9)"}
FILE = "\n".join(f"{key} = {json.dumps(value)}" for key, value in BASE.items())


def experiment(rounds: int, **more: Any) -> Experiment:
    return Experiment.from_dict({**BASE, "rounds": rounds, "server": "fedams", "evaluate_every": 2, **more})


def records(folder: Path) -> bytes:
    return (folder / "rounds.jsonl").read_bytes()


def _without_scores(folder: Path, round: int) -> list[dict[str, Any]]:
    """Return the lines of a run, without the scores of a round."""
    lines = [json.loads(line) for line in records(folder).splitlines()]
    return [
        {key: value for key, value in line.items() if line["round"] != round or not key.endswith(("loss", "accuracy"))}
        for line in lines
    ]


@pytest.mark.parametrize(("more", "keep_rows"), [({}, False), ({**FEEDBACK}, True)], ids=["nothing kept", "rows kept"])
def test_an_extended_run_is_the_longer_run(tmp_path: Path, more: dict[str, Any], keep_rows: bool) -> None:
    short, whole = tmp_path / "short", tmp_path / "whole"
    runs.run(experiment(9, **more), whole)
    runs.run(experiment(5, **more), short, checkpoint_every=3, keep_rows=keep_rows)
    assert runs.resume(short).finished, "which leaves the rows of a run that may grow"
    extend(short, 9)
    assert not read_run(short).finished
    assert len(runs.resume(short).records) == 9
    assert _without_scores(short, 5) == _without_scores(whole, 5), "the last round is evaluated, round 5 at first"
    assert (short / "experiment.toml").read_bytes() == (whole / "experiment.toml").read_bytes()


def test_a_run_that_was_stopped_can_be_extended_with_all_that_clients_keep(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(record: RoundRecord, timing: dict[str, Any]) -> None:
        if record.round == 4:
            raise Stop

    with pytest.raises(Stop):
        runs.run(experiment(5, **FEEDBACK), tmp_path / "short", checkpoint_every=3, watch=stop)
    extend(tmp_path / "short", 9)
    runs.resume(tmp_path / "short")
    runs.run(experiment(9, **FEEDBACK), tmp_path / "whole")
    assert records(tmp_path / "short") == records(tmp_path / "whole")


def test_what_would_not_be_the_longer_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    secret = {"privacy": "server(clip=1, noise=1)", "sampler": "bernoulli(p=1/2)", "guard": "none"}
    others = {"secret": secret, "follows": {"server": "fedams(lr=cosine(1, 0))"}}
    for name, more in {"plain": {}, "rows": FEEDBACK, **others}.items():
        runs.run(experiment(3, **more), tmp_path / name)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name, rounds, message in (
        ("plain", 2, "rounds=2, but the run there has rounds=3"),
        (
            "rows",
            5,
            r"its last checkpoint leaves out what more rounds need \(rows, replicas\); run 5 rounds in another folder",
        ),
        (
            "follows",
            5,
            r"cosine\(start=1, end=0\) depends on the length of the run, so in a run of . rounds, the first 3 would",
        ),
        ("secret", 5, r"its last checkpoint leaves out what more rounds need \(secret\)"),
        ("nowhere", 5, "holds no run"),
    ):
        with pytest.raises((RunError, FileNotFoundError), match=message):
            check_extension(tmp_path / name, rounds)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    shutil.rmtree(tmp_path / "plain" / "checkpoint")
    with pytest.raises(RunError, match="its checkpoint was deleted; restore it, or run 5 rounds in another folder"):
        extend(tmp_path / "plain", 5)


def test_a_checkpoint_that_names_its_length_still_continues(tmp_path: Path) -> None:
    """As those that were written before runs could be extended."""
    runs.run(experiment(3), tmp_path / "run")
    state = tmp_path / "run" / "checkpoint" / "state.json"
    values = json.loads(state.read_text())
    del values["digest"], values["left_out"]
    values["identity"]["rounds"] = 3
    state.write_bytes(sealed(values))
    assert runs.resume(tmp_path / "run").finished
    extend(tmp_path / "run", 4)
    assert len(runs.resume(tmp_path / "run").records) == 4


def test_the_command_line_extends_all_runs_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    two = '\n[[run]]\nlabel = "plain"\n[[run]]\nlabel = "rows"\nuplink = "sign"\n'
    (tmp_path / "mini.toml").write_text(FILE + "\nrounds = 3" + two)

    def run(*arguments: str) -> Any:
        return fedcams("run", "mini.toml", "--no-report", *arguments)

    assert run().exit_code == 0
    refused = run("-s", "rounds=5")
    assert refused.exit_code == 2
    assert "rows-s1: the run is finished, and its last checkpoint leaves out" in refused.stderr
    assert len(read_run(tmp_path / "runs/mini/plain-s1").records) == 3
    assert "plain, seed 1: continuing in" in run("-s", "rounds=5", "--only", "plain").stdout
    assert len(read_run(tmp_path / "runs/mini/plain-s1").records) == 5
    assert run("--keep-rows", "--out", "kept").exit_code == 0
    assert run("-s", "rounds=5", "--out", "kept").exit_code == 0
    assert len(read_run(tmp_path / "kept/rows-s1").records) == 5


def test_runs_of_a_sweep_can_be_extended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    grid = '\n[[run]]\nlabel = "rows"\nuplink = "sign"\nserver = "fedams(lr={lr})"\ngrid = { lr = [0.1, 1] }\n'
    (tmp_path / "mini.toml").write_text(FILE + "\nrounds = 2" + grid)
    assert fedcams("sweep", "mini.toml", "--keep-rows").exit_code == 0
    assert fedcams("sweep", "mini.toml", "-s", "rounds=3").exit_code == 0
    assert [len(read_run(path).records) for path in runs_below(tmp_path / "runs")] == [3, 3]
