"""Sweeps: grids fill the placeholders of runs, and the leaderboard ranks the results."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedcams.errors import FedcamsError, SpecError, UpdateError
from fedcams.experiment import Experiment
from fedcams.experiment.preset import load_preset
from fedcams.experiment.sweep import has_diverged, load_sweep, score, sweep, write_leaderboard
from fedcams.simulation import RoundRecord
from together import together

FILE = """
seeds = [1, 2]
rounds = 10
grid = { lr = [0.1, 1] }

[[run]]
label = "avg"
server = "fedavg(lr={lr})"

[[run]]
label = "ams"
server = "fedams(lr={lr}, eps={eps})"
grid = { eps = [1e-3], lr = ["1/3", 10], uplink = ["identity", "sign"] }

[[run]]
label = "plain"
grid = {}
"""


def written(folder: Path, text: str = FILE) -> Path:
    path = folder / "grid.toml"
    path.write_text(text)
    return path


def rounds(*accuracies: float | None) -> list[RoundRecord]:
    rest: dict[str, Any] = dict.fromkeys(RoundRecord.__dataclass_fields__, 0)
    rest["averaged_accuracy"] = None
    return [RoundRecord(**rest | {"round": t, "test_accuracy": a}) for t, a in enumerate(accuracies, start=1)]


def test_a_run_has_diverged_if_its_last_cohort_was_refused_as_a_whole() -> None:
    record = RoundRecord(round=1, cohort=[3, 5], refused={3: "not finite"})
    assert not has_diverged([record])
    assert has_diverged([record, refused := dataclasses.replace(record, refused=dict.fromkeys((3, 5), "not finite"))])
    assert has_diverged([refused, RoundRecord(round=2, cohort=[])]), "nobody was asked in the last round"
    assert not has_diverged([refused, record])
    assert not has_diverged([])


def test_averaged_models_are_ranked_where_there_are_some() -> None:
    tested = [dataclasses.replace(record, averaged_accuracy=0.9) for record in rounds(0.25, 0.5)]
    assert score(tested) == 0.9
    assert score(rounds(0.25, 0.5)) == 0.5


def test_every_combination_is_tried_with_every_seed(tmp_path: Path) -> None:
    trials = load_sweep(written(tmp_path))
    assert [(trial.label, trial.setting) for trial in trials] == [
        ("avg", "lr=0.1"),
        ("avg", "lr=1"),
        ("ams", "eps=1e-3, lr=1/3, uplink=identity"),
        ("ams", "eps=1e-3, lr=1/3, uplink=sign"),
        ("ams", "eps=1e-3, lr=10, uplink=identity"),
        ("ams", "eps=1e-3, lr=10, uplink=sign"),
        ("plain", ""),
    ]
    assert all([experiment.seed for experiment in trial.experiments] == [1, 2] for trial in trials)
    last = trials[5].experiments[0]
    assert (str(last.server), str(last.uplink)) == ("fedams(lr=10)", "sign")
    assert last.label == "ams, eps=1e-3, lr=10, uplink=sign"


def test_settings_change_every_run_and_take_the_place_of_their_values_in_a_grid(tmp_path: Path) -> None:
    path = written(tmp_path)
    trials = load_sweep(path, {"uplink": "topk(ratio=1/8)", "rounds": "3", "seeds": "[7]"}, ["ams", "plain"])
    assert [(trial.label, trial.setting) for trial in trials] == [
        ("ams", "eps=1e-3, lr=1/3"),
        ("ams", "eps=1e-3, lr=10"),
        ("plain", ""),
    ]
    experiments = [experiment for trial in trials for experiment in trial.experiments]
    assert {(str(each.uplink), each.rounds, each.seed) for each in experiments} == {("topk(ratio=1/8)", 3, 7)}
    assert all(len(trial.experiments) == 1 for trial in load_sweep(path, {"seed": "5"})), "instead of the file's seeds"
    for settings, only, message in (
        ({"server": "fedavg"}, (), r"no value contains \{lr\}"),
        ({"lr": "1"}, (), "-s: no key 'lr'"),
        ({"label": "x"}, (), "label=x: cannot give 3 runs the same label"),
        ({}, ("asm",), r"--only asm: no run has this label \(did you mean 'ams'\?\); known: 'avg', 'ams', 'plain'"),
    ):
        with pytest.raises(SpecError, match=message):
            load_sweep(path, settings, only)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid = { lr = [1] }\nserver = 'fedavg(lr={rl})'", r"no value contains \{lr\}.*did you mean 'rl'"),
        ("server = 'fedavg(lr={lr})'", r"the grid has no values for \{lr\}; give lr = \[...\]"),
        ("server = 'fedavg(lr={lr})'\ngrid = { lr = 1 }", "give a list of values for each key"),
        ("server = 'fedavg(lr={lr})'\ngrid = { lr = [] }", "give a list of values for each key"),
        ("server = 'fedavg(lr={lr})'\ngrid = { lr = [0] }", r"grid.toml, \[\[run\]\] 1: .*fedavg: lr=0: out of range"),
        ("server = 'fedavg(lr={lr})'\ngrid = { lr = [nan] }", r"grid.toml, \[\[run\]\] 1: .*lr=nan: not a number"),
        ("grid = { seed = [1, 2] }", r"seed cannot vary in a grid; for several seeds, give seeds = \[1, 2\]"),
        ("grid = { lr = [1] }\ngird = 3", r"no key 'gird' \(did you mean 'grid'\?\)"),
        ("grid = { rounds = [1, 1] }", "would share the folder 'run-rounds-1-s1'"),
    ],
)
def test_bad_grids_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_sweep(written(tmp_path, text))


@together(
    ("accuracies", "expected"),
    [
        ([0.0] * 8 + [0.5, 1.0], 0.75),
        ([0.25, 0.5], 0.5),
        ([0.0] * 8 + [None, 1.0], 1.0),
        ([0.0, 0.75, None, None, None], 0.75),
        ([None], None),
        ([], None),
    ],
)
def test_the_score_is_the_mean_of_the_last_fifth(accuracies: Sequence[float | None], expected: float | None) -> None:
    assert score(rounds(*accuracies)) == expected


def test_the_best_setting_of_a_label_comes_first(tmp_path: Path) -> None:
    asked: list[str] = []

    def runner(experiment: Experiment, folder: Path) -> list[RoundRecord]:
        asked.append(folder.name)
        if "lr=10" in experiment.label and experiment.seed == 2:
            raise UpdateError("not finite")
        return rounds(0.5 + 0.125 * experiment.seed + (0.125 if experiment.uplink.name == "sign" else 0))

    results = sweep(load_sweep(written(tmp_path)), tmp_path / "out", runner)
    assert len(results) == 7
    assert asked[:2] == ["avg-lr-0.1-s1", "avg-lr-0.1-s2"]
    with (tmp_path / "out" / "leaderboard.csv").open() as file:
        rows = list(csv.DictReader(file))
    ams = [row for row in rows if row["label"] == "ams"]
    assert [(row["setting"], row["accuracy"], row["diverged"]) for row in ams] == [
        ("eps=1e-3, lr=1/3, uplink=sign", "0.8125", "0"),
        ("eps=1e-3, lr=1/3, uplink=identity", "0.6875", "0"),
        ("eps=1e-3, lr=10, uplink=identity", "", "1"),
        ("eps=1e-3, lr=10, uplink=sign", "", "1"),
    ]
    text = (tmp_path / "out" / "leaderboard.md").read_text("utf-8")
    best = [line for line in text.partition("## avg")[0].splitlines() if "±" in line]
    assert best[0] == "| ams | eps=1e-3, lr=1/3, uplink=sign | 0.8125 ± 0.0884 |"
    assert best[1] == "| avg | lr=0.1 | 0.6875 ± 0.0884 |"
    assert "| eps=1e-3, lr=10, uplink=sign | diverged (seeds: 1) |" in text


def test_a_sweep_that_stops_keeps_what_is_finished_on_its_leaderboard(tmp_path: Path) -> None:
    """Wherever in the file that is; and the leaderboard says that it is not complete."""
    trials = load_sweep(written(tmp_path))
    finished = {trial for trial in trials if trial.label == "ams"}
    asked: list[str] = []

    def runner(experiment: Experiment, folder: Path) -> list[RoundRecord]:
        asked.append(experiment.label)
        if len(asked) > 2 * len(finished) + 3:
            raise KeyboardInterrupt
        return rounds(0.5)

    with pytest.raises(KeyboardInterrupt):
        sweep(trials, tmp_path, runner, finished)
    assert {label.partition(",")[0] for label in asked[: 2 * len(finished)]} == {"ams"}
    with (tmp_path / "leaderboard.csv").open() as file:
        assert [row["label"] for row in csv.DictReader(file)] == ["avg", *["ams"] * len(finished)]
    text = (tmp_path / "leaderboard.md").read_text("utf-8")
    assert f"Only {len(finished) + 1} of {len(trials)} settings are finished so far." in text
    assert sweep(trials, tmp_path, lambda experiment, folder: rounds(0.5))
    assert "Only" not in (tmp_path / "leaderboard.md").read_text("utf-8")


def test_a_leaderboard_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FedcamsError, match=r"cannot write to .*/file: File exists; free space"):
        write_leaderboard([], tmp_path / "file")


def test_other_errors_end_the_sweep_and_keep_the_leaderboard(tmp_path: Path) -> None:
    def runner(experiment: Experiment, folder: Path) -> list[RoundRecord]:
        if "lr=1" in experiment.label.split(", "):
            raise SpecError("no data")
        return rounds(0.5)

    with pytest.raises(SpecError, match="no data"):
        sweep(load_sweep(written(tmp_path)), tmp_path, runner)
    assert "| avg | lr=0.1 | 0.5000 ± 0.0000 |" in (tmp_path / "leaderboard.md").read_text("utf-8")


def test_the_papers_search_has_its_grids() -> None:
    """The settings that the paper chose are among them, and no seed is one that a figure shows."""
    trials = load_sweep(Path(__file__).resolve().parents[1] / "sweeps" / "cifar10" / "sweep.toml")
    assert len(trials) == 5 * 4 + 4 * 5 * 4 * 6
    assert {(e.rounds, str(e.model), e.seed) for trial in trials for e in trial.experiments} == {(60, "resnet18", 11)}
    tried = {(str(e.server), str(e.local.lr)) for trial in trials for e in trial.experiments}
    for experiment in load_preset("fig1-resnet18").experiments:
        if experiment.label in {trial.label for trial in trials}:
            assert (str(experiment.server), str(experiment.local.lr)) in tried
