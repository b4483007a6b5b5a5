"""The command line, as users type it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from command_line import fedcams
from fedcams import runs
from fedcams.cli import runs as commands
from fedcams.experiment import Experiment
from fedcams.experiment.preset import presets
from fedcams.registry import kinds, params, registered
from fedcams.runs import read_run
from fedcams.simulation import RoundRecord
from forks import Forks
from own_pieces import forgotten
from test_runs import _quick_sync  # noqa: F401  (a fixture)

FILE = """
task = "logistic(size=40)"
model = "linear"
clients = 4
sampler = "uniform(n=2)"
rounds = 12
engine = "stacked"

[[run]]
label = "FedAvg"
server = "fedavg"

[[run]]
label = "FedCAMS sign"
uplink = "sign"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the file of a preset."""
    (tmp_path / "mini.toml").write_text(FILE)
    (tmp_path / "grid.toml").write_text("grid = { rounds = [1, 2] }")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def say(*arguments: str) -> str:
    result = fedcams(*arguments)
    assert result.exit_code == 0, result.output
    return re.sub(r"\x1b\[[0-9;]*m", "", str(result.stdout))


def refused(*arguments: str) -> str:
    result = fedcams(*arguments)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    assert result.stderr.count("\n") == 1, "one line"
    return str(result.stderr)


OWN = """
from dataclasses import dataclass

from fedcams.compress.identity import Identity
from fedcams.registry import register


@register("mirror")
@dataclass(frozen=True)
class Mirror(Identity):
    pass
"""


def test_pieces_of_ones_own_are_loaded_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_extension` does so in separate processes; here the piece is forgotten after every command."""
    (folder / "mine.py").write_text(OWN)
    preset = ("run", "mini.toml", "-s", "uplink=mirror", "-s", "rounds=1", "--only", "FedAvg", "--no-report")
    assert "no compressor is named 'mirror'" in refused(*preset)
    with forgotten("mine"):
        say("--import", "mine", *preset)
    report = ("report", "runs/mini", "--out", "both")
    said = refused(*report)
    assert "no compressor is named 'mirror'" in said
    assert "load it with fedcams --import MODULE" in said
    assert "delete" not in said, "the run is sound"
    with forgotten("mine"), monkeypatch.context() as patch:
        patch.setenv("FEDCAMS_IMPORT", "mine")
        say(*report)
    assert "mirror" in (folder / "both" / "summary.md").read_text()
    assert "error: --import mime: No module named 'mime'" in refused("--import", "mime", "list")


def test_a_module_that_cannot_be_imported_is_named(folder: Path) -> None:
    (folder / "garbled.py").write_text("x = = 3")
    (folder / "falls.py").write_text("\nraise RuntimeError('boom')")
    message = "--import garbled: SyntaxError: invalid syntax (garbled.py, line 1); fix the module"
    assert message in refused("--import", "garbled", "list")
    message = "--import falls: RuntimeError: boom (falls.py, line 2); fix the module"
    assert message in refused("--import", "falls", "list")
    for name in ("./falls.py", "falls.py", ".falls"):
        assert f"--import {name}: give the name of a module" in refused("--import", name, "list")


# -- run -------------------------------------------------------------------------------------------------------------


def test_a_preset_runs_and_tells_how_it_goes(folder: Path) -> None:
    output = say("run", "mini.toml", "--no-report")
    lines = [line for line in output.splitlines() if line.startswith("FedCAMS sign, seed 1: round")]
    assert [line.partition("round ")[2].partition(",")[0] for line in lines] == ["10/12", "12/12"]
    assert re.search(
        r"loss \d\.\d{4}, accuracy \d\.\d{4}, \d+ bytes up, \d+ bytes down, \d+\.\d\d s per round, 0:00", lines[0]
    )
    found = sorted((folder / "runs" / "mini").iterdir())
    assert [path.name for path in found] == ["fedavg-s1", "fedcams-sign-s1"]
    assert all(read_run(path).finished for path in found)
    said = [line for line in output.splitlines() if "stayed on its floor" in line]
    assert len(said) == 1, "FedAvg has no floor"
    assert said[0].startswith("FedCAMS sign, seed 1: v̂ stayed on its floor in 100% of coordinates: this run is fedavg")


def test_a_run_says_at_its_end_which_updates_were_refused(folder: Path) -> None:
    output = say("run", "mini.toml", "--only", "FedAvg", "-s", "rounds=1", "-s", "local=sgd(lr=1e30)", "--no-report")
    said = r"FedAvg, seed 1: 2 of 2 updates were refused, from 2 clients; the last from client \d in round 1: Upd"
    assert re.search(said, output), output


def test_the_accuracies_of_last_and_averaged_models_stand_side_by_side(folder: Path) -> None:
    settings = (
        "-s",
        "rounds=3",
        "-s",
        "average=ema(0.9)",
        "-s",
        "task=logistic(size=4000)",
        "-s",
        "server=fedavg(lr=9)",
    )
    output = say("run", "mini.toml", *settings, "--only", "FedAvg", "--no-report")
    last = read_run(folder / "runs/mini/fedavg-s1").records[-1]
    (row,) = [line.split() for line in output.splitlines() if re.match(r"\s*FedAvg\s+1\s+3\s", line)]
    assert row[3:5] == [f"{last.test_accuracy:.4f}", f"{last.averaged_accuracy:.4f}"]
    assert row[3] != row[4]


def test_settings_labels_and_folder_can_be_chosen(folder: Path) -> None:
    settings = ("-s", "rounds=2", "-s", "seeds=[3, 4]", "-s", "label=mine")
    say("run", "mini.toml", *settings, "--only", "FedAvg", "--out", "x/y", "--no-report")
    found = sorted((folder / "x" / "y").iterdir())
    assert [path.name for path in found] == ["mine-s3", "mine-s4"]
    assert len(read_run(found[0]).records) == 2


def test_several_presets_run_as_one_queue_each_in_its_own_folder(folder: Path) -> None:
    (folder / "other.toml").write_text(FILE.replace("rounds = 12", "rounds = 10").replace("FedCAMS sign", "light"))
    output = say(
        "run", "mini.toml", "other.toml", "-s", "seeds=[1, 2]", "--only", "FedAvg", "--only", "light", "-j", "2"
    )
    for name, labels, rounds in (("mini", ["fedavg"], 12), ("other", ["fedavg", "light"], 10)):
        found = folder / "runs" / name
        expected = [f"{label}-s{seed}" for label in labels for seed in (1, 2)]
        assert sorted(path.name for path in found.iterdir()) == [*expected, "report"]
        assert {len(read_run(found / each).records) for each in expected} == {rounds}
        assert re.search(rf"^\s*{name}\s+seeds", output, re.MULTILINE), "a table of its own"
        assert f"{name}, FedAvg, seed 2: round 10/{rounds}" in output
        assert f"report: {Path('runs', name, 'report', 'index.html')}" in output
    again = say("run", "mini.toml", "other.toml", "--only", "FedAvg", "--no-report")
    assert again.count("FedAvg, seed 1: already finished") == 2
    assert "\n  run  " not in again
    say("run", "mini.toml", "other.toml", "--only", "light", "--out", "x", "--no-report")
    assert [path.name for path in (folder / "x").iterdir()] == ["other"], "no run of mini has this label"


def test_quiet_says_nothing(folder: Path) -> None:
    assert say("run", "mini.toml", "--quiet", "--no-report") == ""


def test_what_is_finished_is_left_alone_and_what_broke_off_goes_on(folder: Path) -> None:
    say("run", "mini.toml", "--no-report")
    whole = (folder / "runs/mini/fedavg-s1/rounds.jsonl").read_bytes()
    (folder / "runs/mini/fedavg-s1/rounds.jsonl").write_bytes(whole[: len(whole) // 2])
    (folder / "runs/mini/fedavg-s1/checkpoint/state.json").unlink()
    output = say("run", "mini.toml", "--no-report")
    assert f"FedAvg, seed 1: continuing in {Path('runs/mini/fedavg-s1')}" in output
    assert "FedCAMS sign, seed 1: already finished" in output
    assert (folder / "runs/mini/fedavg-s1/rounds.jsonl").read_bytes() == whole


def test_another_run_in_the_folder_is_not_touched(folder: Path) -> None:
    say("run", "mini.toml", "--no-report")
    message = refused("run", "mini.toml", "-s", "rounds=11")
    assert "fedavg-s1 holds a different run (rounds=12 there, 11 here); choose another folder with --out" in message
    (folder / "runs/mini/fedavg-s1").rename(folder / "elsewhere")
    assert "fedcams-sign-s1 holds a different run" in refused("run", "mini.toml", "-s", "rounds=11")
    assert not (folder / "runs/mini/fedavg-s1").exists(), "what cannot be finished is not begun"


def test_a_report_follows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[Path], Path]] = []

    def write_report(runs: list[Path], out: Path) -> Path:
        asked.append((runs, out))
        return out / "index.html"

    monkeypatch.setattr("fedcams.cli.runs.write_report", write_report)
    assert f"report: {Path('runs/mini/report/index.html')}" in say("run", "mini.toml")
    assert asked == [([Path("runs/mini/fedavg-s1"), Path("runs/mini/fedcams-sign-s1")], Path("runs/mini/report"))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "dmeo"], "error: no preset is named 'dmeo' (did you mean 'demo'?)"),
        (["run", "mini.toml", "-s", "ronds=5"], "-s: no key 'ronds' (did you mean 'rounds'?)"),
        (["run", "mini.toml", "-s", "rounds"], "-s rounds: give a key and a value, as in -s rounds=5"),
        (
            ["run", "mini.toml", "--only", "FedAgv"],
            "no run has this label (did you mean 'FedAvg'?); known: 'FedAvg', 'F",
        ),
        (["run", "mini.toml", "./mini.toml"], "two presets are named 'mini', and would share a folder"),
        (
            ["run", "mini.toml", "demo", "--only", "FedAgv"],
            "(did you mean 'FedAvg'?); known: 'FedAvg', 'FedCAMS sign', ",
        ),
        (["run", "mini.toml", "--track", "board"], "no tracker is named 'board'"),
        (["run", "mini.toml", "--device", "abacus"], "--device abacus: "),
        (["run", "mini.toml", "--device", "meta"], "--device meta: "),
        (["run", "fig1-resnet18", "--data", "here"], "unpack the Python version from https://www.cs.toronto.edu"),
        (
            ["run", "mini.toml", "-s", "uplink=randk(k=1, scaled=true)"],
            "uplink=randk(k=1, scaled=true) has no bound on its error",
        ),
        (["run", "mini.toml", "-s", "sampler=uniform(n=5)"], "uniform: n=5 of only 4 clients; give n=4 or less"),
        (["run", "DEMO"], "(did you mean 'demo'?)"),
        (
            ["run", "mini.toml", "--rounds", "5"],
            "--rounds is not an option; rounds is a key of the experiment: use -s rou",
        ),
        (["run", "mini.toml", "-s", "engine=graphs"], "engine=graphs: the model is on cpu"),
        (["resume", "nothing"], "nothing holds no run"),
        (["report", "nothing"], "nothing is not a folder"),
        (["sweep", "none.toml"], "none.toml: cannot be read"),
        (["run", "grid.toml"], "no key 'grid' (a file with grids is for `fedcams sweep`)"),
        (
            ["list", "servers"],
            "no kind is named 'servers' (did you mean 'server'?); known: presets, recipes, experiment, aggr",
        ),
    ],
)
def test_errors_are_one_line_and_leave_nothing_behind(folder: Path, arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(("arguments", "meant"), [(["lst"], "list"), (["run", "--onyl", "x", "demo"], "--only")])
def test_a_suggestion_comes_once(arguments: list[str], meant: str) -> None:
    """In the words of click, or for options of the copy that newer versions of typer bring."""
    said = " ".join(fedcams(*arguments).stderr.split())
    assert re.findall(r"Did you mean '([\w-]+)'\?|\(Possible options: ([\w-]+)\)", said) in (
        [(meant, "")],
        [("", meant)],
    )
    assert len(re.findall("Did you mean|Possible", said)) == 1


FEDCAMS = "import runpy; runpy.run_module('fedcams', run_name='__main__')"


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "the end of a batch job"])
def test_stopping_by_hand_leaves_a_run_that_goes_on(folder: Path, forks: Forks, stop: signal.Signals) -> None:
    """A signal as terminals and batch systems send it, in mid-run; the same command completes it byte for byte."""
    settings = ["-s", "rounds=100", "-s", "local=sgd(steps=1)"]
    arguments = ["run", "mini.toml", "--only", "FedCAMS sign", *settings, "--checkpoint-every", "7"]
    records = folder / "runs/mini/fedcams-sign-s1/rounds.jsonl"
    with forks.start(FEDCAMS, *arguments, "--no-report", cwd=folder) as process:
        while not (records.exists() and records.read_bytes().count(b"\n") > 20):
            assert process.running()
            time.sleep(0.005)
        os.kill(process.pid, stop)
        done = process.done()
    assert done.code == 130
    assert done.errors == "stopped; run the same command again to continue from the last checkpoint\n"
    assert 20 < len(read_run(records.parent).records) < 100
    assert "FedCAMS sign, seed 1: continuing in" in say(*arguments, "--no-report")
    say(*arguments, "--no-report", "--out", "whole")
    assert records.read_bytes() == (folder / "whole/fedcams-sign-s1/rounds.jsonl").read_bytes()


def test_a_command_leaves_the_handler_of_sigterm_as_it_was(folder: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    say("run", "mini.toml", "--only", "FedAvg", "-s", "rounds=1", "--no-report")
    assert signal.getsignal(signal.SIGTERM) == before


# -- resume, report, sweep, list -------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [b"", b"\0\n"], ids=["stopped", "power failure"])
def test_resume_completes_a_run(folder: Path, behind: bytes) -> None:
    class Stop(Exception):
        pass

    def stop(record: RoundRecord, timing: dict[str, Any]) -> None:
        if record.round == 7:
            raise Stop

    with pytest.raises(Stop):
        runs.run(Experiment(rounds=9, clients=20, engine="stacked"), folder / "r", checkpoint_every=5, watch=stop)
    with (folder / "r" / "rounds.jsonl").open("ab") as records:
        records.write(behind)  # what follows the checkpoint need not be whole
    output = say("resume", "r")
    assert "run, seed 1: continuing in r" in output
    assert "round 9/9" in output
    assert read_run(folder / "r").finished
    assert "already finished, in r" in say("resume", "r")


def test_resume_of_a_folder_continues_every_run_in_it(folder: Path) -> None:
    for name, rounds in {"first": 2, "second": 3}.items():
        runs.run(Experiment(label=name, rounds=rounds, clients=20, engine="stacked"), folder / "all" / name)
    (folder / "all" / "second" / "rounds.jsonl").unlink()
    shutil.rmtree(folder / "all" / "second" / "checkpoint")
    output = say("resume", "all")
    assert "first, seed 1: already finished, in all/first" in output
    assert "second, seed 1: continuing in all/second" in output
    assert read_run(folder / "all" / "second").finished
    (folder / "none").mkdir()
    assert "none holds no run" in refused("resume", "none")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a"], (["a"], Path("a/report"), None, False)),
        (["a", "b"], (["a", "b"], Path("report"), None, False)),
        (["a", "b", "--out", "o", "--target", "0.9"], (["a", "b"], Path("o"), 0.9, False)),
        (["a", "--figures"], (["a"], Path("a/report"), None, True)),
    ],
)
def test_where_a_report_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: tuple[Any, ...]
) -> None:
    def write_report(runs: list[Path], out: Path, target: float | None, figures: bool) -> Path:
        assert ([str(run) for run in runs], out, target, figures) == expected
        return out / "index.html"

    monkeypatch.setattr(commands, "write_report", write_report)
    assert say("report", *arguments) == f"report: {expected[1] / 'index.html'}\n"


def test_a_sweep_ranks_and_can_be_given_again(folder: Path) -> None:
    grid = 'task = "logistic(size=40)"\nmodel = "mlp"\nclients = 4\nsampler = "full"\nrounds = 3\n'
    (folder / "grid.toml").write_text(grid + 'server = "fedavg(lr={lr})"\ngrid = { lr = [1, 9e37] }')
    first, second = say("sweep", "grid.toml"), say("sweep", "grid.toml")
    assert "run, lr=9e37, seed 1: diverged, " in first
    assert "run: the best of 2 is lr=1: 0." in first
    assert f"leaderboard: {Path('runs/grid/leaderboard.md')}" in first
    assert "run, lr=1, seed 1: already finished" in second
    assert first.splitlines()[-2:] == second.splitlines()[-2:]


def test_a_sweep_of_one_label_keeps_the_others_and_extends_all_or_none(folder: Path) -> None:
    grid = 'task = "logistic(size=40)"\nmodel = "linear"\nclients = 4\nsampler = "full"\nrounds = 2\n'
    runs = '[[run]]\nlabel = "dense"\n[[run]]\nlabel = "kept"\nuplink = "sign"\ngrid = { min_replies = [1, 2] }\n'
    (folder / "grid.toml").write_text(grid + runs)
    board = folder / "runs/grid/leaderboard.csv"
    assert "dense: 0." in say("sweep", "grid.toml"), "without a grid, there is no best setting"
    whole = board.read_bytes()
    assert "dense, seed 1: already" not in say("sweep", "grid.toml", "--only", "kept")
    assert board.read_bytes() == whole
    shutil.rmtree(folder / "runs/grid/dense-s1")
    again = say("sweep", "grid.toml").splitlines()
    assert [line for line in again if ", seed 1:" in line][-1].startswith("dense"), "what is finished comes first"
    assert board.read_bytes() == whole
    refused = fedcams("sweep", "grid.toml", "-s", "rounds=3")  # clients keep residuals, which are gone
    assert "its last checkpoint leaves out what more rounds need (rows)" in refused.stderr
    say("sweep", "grid.toml")
    assert board.read_bytes() == whole


def test_everything_there_is_can_be_listed(folder: Path) -> None:
    overview = say("list")
    assert all(name in overview for name in [*presets(), *kinds(), *registered("server")])
    assert all(name in say("list", "presets") for name in presets())
    for kind in kinds():
        shown = say("list", kind)
        for name, cls in registered(kind).items():
            assert name in shown
            assert all(f"{key}=" in shown for key in params(cls))
    assert "eps=1e-3" in say("list", "server")
    keys = say("list", "experiment")
    assert all(param.doc in keys for param, _ in params(Experiment).values())
    assert re.search(r"local +sgd\(epochs=3\) +what a client does", keys)


@pytest.mark.parametrize("command", ["run", "resume", "report", "sweep", "list"])
def test_every_command_explains_itself(folder: Path, command: str) -> None:
    assert re.search(rf"Usage: .*{command} \[OPTIONS\]", say(command, "--help"))
    assert re.search(rf"{command} +[A-Z]", say("--help"))


def test_the_version() -> None:
    assert re.fullmatch(r"fedcams \d+\.\d+\.\d+\n", say("--version"))


# -- in a separate process --------------------------------------------------------------------------------------------


def test_explaining_itself_takes_no_torch() -> None:
    """Which takes seconds to load; and it is said in whatever letters the terminal has."""
    probe = "import sys; from fedcams.cli import app; app(['theory', 'rates', '--help'], standalone_mode=False)"
    probe += "; sys.exit('torch._C' in sys.modules or 'numpy' in sys.modules)"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False, env=environment)
    assert found.returncode == 0, found.stderr
    assert b"?" in found.stdout


def test_importing_the_package_does_not_load_the_command_line() -> None:
    probe = "import sys, fedcams; sys.exit('typer' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


# -- plan ------------------------------------------------------------------------------------------------------------


def test_a_plan_compares_downlinks_and_recommends_one(folder: Path) -> None:
    output = say("plan", "1000000", "--clients", "100", "--cohort", "10")
    assert "1,000,000 parameters, 0 buffers; uniform(n=10) of 100 clients, 500 rounds; uplink sign" in output
    assert re.search(r"replica\(blockq\) +\S+ MB", output)
    assert "Recommended: replica(blockq(bits=2)), 8." in output
    assert re.search(r"none +.*min", output), "times on networks"
    assert re.search(r"lighter +\S+ MB +\S+ MB +\S+ MB +\S+x", output), "recipes side by side"
    assert "Recipe: light, " in output
    assert "--network 5G: no network has this name (did you mean '" in refused("plan", "1000", "--network", "5G")
    only = say("plan", "mlp(hidden=8)", "--downlink", "shared(blockq)", "--cohort", "full")
    assert "24,674 parameters" in only
    assert "; uniform(n=3) of 3 clients" in say("plan", "1000", "--downlink", "none", "--clients", "3")
    assert "Recommended: shared(blockq), with" in only
    assert "25,000,000 parameters" in say("plan", "25M", "--downlink", "none")
    assert "1,500,000,000,000 parameters" in say("plan", "1.5T", "--downlink", "none")
    assert "1,500 parameters" in say("plan", "1.5k", "--downlink", "none")
    assert "None of these downlinks fits" in say("plan", "1000", "--downlink", "replica(blockq)", "--memory", "0")


def test_the_papers_tables_are_printed(folder: Path) -> None:
    output = say("plan", "--paper")
    assert re.search(r"sign +identity +1\.84e11 +1\.84e11", output)
    assert re.search(r"topk\(ratio=1/256\) +topk\(ratio=1/256\) +2\.79e9 +2\.79e9", output)


def test_numbers_of_a_plan_are_whole_where_it_is_narrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert "…" not in say("plan", "1000000")


@pytest.mark.parametrize("option", ["--memory", "--bound"])
@pytest.mark.parametrize("value", ["-1", "nan"])
def test_what_is_no_limit_is_refused(folder: Path, option: str, value: str) -> None:
    result = fedcams("plan", "1000", option, value)
    assert result.exit_code == 2
    assert "give 0 or more" in result.stderr


def test_a_plan_for_no_model_is_refused(folder: Path) -> None:
    assert "MODEL=25Q: give a whole number of parameters, 1 to 1e+15, as in 25M, or a model's" in refused("plan", "25Q")
    assert "MODEL=0.5: give a whole number of parameters" in refused("plan", "0.5")
    assert "MODEL=1e400: give a whole number of parameters, 1 to 1e+15" in refused("plan", "1e400")
    assert "uniform: n=-3: out of range" in refused("plan", "1000", "--cohort", "-3")
    assert "no model is named 'resnet'" in refused("plan", "resnet")
