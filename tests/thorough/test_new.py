"""`fedcams new`: the project that it writes runs as it is, and a refused folder stays unchanged."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import fedcams
from fedcams.cli.new import PACKAGE, PROJECT, TEMPLATE, write_project
from fedcams.errors import FedcamsError
from fedcams.runs import read_run
from forks import Forks

NAME, OWN = "my-waves", "my_waves"
ROOT = Path(__file__).resolve().parents[2]
MODULE = "import runpy, sys; runpy.run_module(sys.argv[1], run_name='__main__', alter_sys=True)"


def new(name: str) -> Any:
    return fedcams("new", name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def project(folder: Path) -> Path:
    result = new(NAME)
    assert result.exit_code == 0, result.output
    return folder / NAME


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# -- what is written ---------------------------------------------------------------------------------------------------


def test_names_are_those_of_the_project_everywhere(project: Path) -> None:
    template = [name.replace(PACKAGE, OWN).removesuffix(".txt") for name in files(TEMPLATE)]
    assert files(project) == sorted(template)
    for name in files(project):
        text = (project / name).read_text("utf-8")
        assert PACKAGE not in text
        assert PROJECT not in text
    assert set(re.findall(r"`(my_waves/\S+\.\w+)`", (project / "README.md").read_text())) <= set(template)


def test_the_commands_that_it_prints_are_those_of_its_readme(folder: Path) -> None:
    output = str(new(NAME).output)
    typed = [line.strip() for line in output.splitlines() if line.startswith("  ")]
    assert typed[0] == f"cd {NAME}"
    shown = re.search(r"```sh\n(.*?)```", (folder / NAME / "README.md").read_text(), re.DOTALL)
    assert shown
    assert shown[1].splitlines() == [*typed[1:], "flwr run . --stream"]


def test_an_empty_folder_is_taken(folder: Path) -> None:
    (folder / NAME).mkdir()
    assert new(NAME).exit_code == 0
    assert len(files(folder / NAME)) == len(files(TEMPLATE))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "../x", "My Project", "1st", "a--b", "-x-", "straße", "x" * 33])
def test_bad_names_are_refused(folder: Path, name: str) -> None:
    result = fedcams("new", "--", name)
    assert result.exit_code == 2
    assert "such as my-project" in result.output.replace("\n", " ")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["class", "torch", "fedcams", "json"])
def test_names_that_python_needs_are_refused(folder: Path, name: str) -> None:
    result = new(name)
    assert result.exit_code == 2
    assert f"such as my-{name}" in result.output.replace("\n", " ")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_exists_is_left_alone(folder: Path, kind: str) -> None:
    there = folder / NAME
    if kind == "folder":
        there.mkdir()
        (there / "mine").write_text("precious")
    elif kind == "file":
        there.write_text("precious")
    else:
        there.symlink_to(folder / "nowhere")
    before = files(folder)
    result = new(NAME)
    assert result.exit_code == 2
    assert f"{NAME} exists and is not an empty folder; give another name" in result.output
    assert files(folder) == before
    assert len(list(folder.iterdir())) == 1


def test_a_failure_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, left = Path.write_text, iter(range(4))

    def full(path: Path, *arguments: Any) -> int:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        return write(path, *arguments)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(FedcamsError, match=r"cannot write .*my-waves: No space left on device; .* free space"):
        write_project(NAME, folder)
    assert list(folder.iterdir()) == []


# -- what it does ------------------------------------------------------------------------------------------------------


def test_its_simulation_compares_the_methods_and_continues(project: Path, forks: Forks) -> None:
    """As a user runs it, with a tenth of the rounds; a second time, nothing is left to do."""
    settings = project / OWN / "methods.toml"
    settings.write_text(settings.read_text().replace("rounds = 30", "rounds = 3"))
    labels = list(tomllib.loads(settings.read_text())["methods"])
    for _ in range(2):
        done = forks.run(MODULE, f"{OWN}.simulate", cwd=project)
        assert done.code == 0, done.errors
        assert [line.partition(":")[0] for line in done.output.splitlines()] == labels
    runs = {label: read_run(project / "runs" / label) for label in labels}
    assert {len(run.records) for run in runs.values()} == {3}
    sent = [sum(record.wire_up + record.wire_down for record in run.records) for run in runs.values()]
    assert sent[0] > sent[1] > sent[2], "dense, then compressed one way, then both"
    assert all(run.records[-1].averaged_accuracy is not None for run in runs.values())
    assert fedcams("report", str(project)).exit_code == 0, "nothing else in the project looks like a run"


@pytest.fixture
def modules(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The project on the path of this process, which forgets it afterwards."""
    monkeypatch.syspath_prepend(project)
    monkeypatch.setenv("HOME", str(project.parent))
    yield project
    for name in [name for name in sys.modules if name.partition(".")[0] == OWN]:
        del sys.modules[name]


def test_its_flower_app_learns_and_continues(modules: Path) -> None:
    pytest.importorskip("flwr")
    from flwr.app import Context, RecordDict

    from fedcams.flower.checkpoint import read_ledger
    from flower_grid import LocalGrid

    settings = tomllib.loads((modules / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    parts = {side: settings["components"][f"{side}app"].split(":") for side in ("client", "server")}
    client, server = (getattr(importlib.import_module(module), name) for module, name in parts.values())
    sites = range(settings["config"]["sites"])
    grid = LocalGrid(dict.fromkeys(sites, client), {site: {"site-id": site} for site in sites})
    for rounds in (2, 3):
        server(grid, Context(1, 0, {}, RecordDict(), {**settings["config"], "rounds": rounds}))
        ledger = read_ledger(modules.parent / f"{OWN}-state" / "server" / settings["config"]["name"])
        assert [sorted(line["accepted"]) for line in ledger] == [[str(site) for site in sites]] * rounds
    assert ledger[-1]["train_loss"] < ledger[0]["train_loss"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how Flower calls what matches its patterns
def test_flower_packs_the_app_without_the_runs(project: Path) -> None:
    build = pytest.importorskip("flwr.cli.build")
    (project / "runs").mkdir()
    (project / "runs" / "rounds.jsonl").write_text("{}\n")
    config = tomllib.loads((project / "pyproject.toml").read_text())
    packed = build.get_filtered_fab_paths(dict.fromkeys(files(project), b""), config)
    assert sorted(packed) == sorted(
        name for name in files(project) if name not in ("pyproject.toml", "runs/rounds.jsonl")
    )


def test_its_sites_train_as_its_methods_says(modules: Path) -> None:
    pytest.importorskip("flwr")
    client, methods = (importlib.import_module(f"{OWN}.{name}") for name in ("client", "methods"))
    for method in methods.METHODS.values():
        assert (method.local.epochs, method.local.batch) == (client.EPOCHS, client.BATCH)


# -- how it is written -------------------------------------------------------------------------------------------------


TOOLS = Path(sys.executable).parent
RULES = "B,C4,D1,E,F,I,N,PTH,RET,RUF,SIM,UP,W"


def accepted(command: list[str], project: Path) -> None:
    done = subprocess.run([TOOLS / command[0], *command[1:]], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["a", "x" * 32])
def test_the_linter_and_the_formatter_accept_it(folder: Path, name: str) -> None:
    project = write_project(name, folder)
    accepted(["ruff", "check", "--no-cache", "--select", RULES], project)
    accepted(["ruff", "format", "--no-cache", "--check"], project)


@pytest.mark.slow
def test_the_type_checker_accepts_it(project: Path) -> None:
    accepted(["mypy", "-p", OWN], project)
