"""The README and the documentation run: Python, files and commands, in the order of each page."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import command_line
from fedcams import trackers  # noqa: F401  (registered before a page does it, since what a page registers is forgotten)
from fedcams.registry import table
from fedcams.report import collect, summarize
from test_presets import write_cifar
from test_runs import _quick_sync  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SETTINGS = ["rounds=1", "clients=2", "seeds=[1]", "sampler=full", "model=linear", "partition=iid"]
SMALL = [word for setting in [*SETTINGS, "local=sgd(steps=1, batch=2)"] for word in ("-s", setting)]
"""Settings that make any preset fast."""


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block of a page."""
    return BLOCK.findall((ROOT / page).read_text("utf-8"))


def commands(block: str) -> list[list[str]]:
    """The words of every line of a shell block, comments left out."""
    lines = (shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines())
    return [words for words in lines if words]


def fedcams(words: list[str]) -> None:
    assert words[0] == "fedcams", f"{words}: teach this test how to run it"
    result = command_line.fedcams(*words[1:])
    assert result.exit_code == 0, f"{shlex.join(words)}: {result.output}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a page is followed; what its blocks register is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "_REGISTRY", {kind: dict(pieces) for kind, pieces in table._REGISTRY.items()})
    return tmp_path


def follow(page: str, folder: Path, more: tuple[str, ...] = ()) -> None:
    """Do what a page shows, from top to bottom; `more` is added to each `fedcams run`."""
    for language, text in blocks(page):
        if language == "toml":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif language == "sh":
            for words in commands(text):
                if words not in LONG:
                    fedcams([*words, *(more if words[1] == "run" else ())])
        elif language == "python":
            printed = io.StringIO()
            with torch.random.fork_rng(), redirect_stdout(printed):
                exec(compile(text, page, "exec"), {})
        elif language == "output":
            check_output(text, printed.getvalue())
        else:
            assert language in SHOWN, f"{page}: a block in {language}"


def check_output(shown: str, printed: str) -> None:
    """Compare an `output` block with what the Python above it printed; numbers roughly, because machines differ."""
    assert NUMBER.sub("0", shown).split() == NUMBER.sub("0", printed).split(), printed
    found = [float(number) for number in NUMBER.findall(printed)]
    assert [float(number) for number in NUMBER.findall(shown)] == pytest.approx(found, rel=0.05), printed


NUMBER = re.compile(r"\d+(?:\.\d+)?")
SHOWN = ("text", "ini")
"""Blocks that are not run: formulas, output of commands, and commands of other programs."""
LONG = [["fedcams", "theory", "rates", "--quick"]]
"""Commands that `make test-slow` runs."""
FIRST = [
    "tutorials/first-comparison.md",
    "how-to/resume.md",
    "records.md",
    "how-to/sweeps.md",
    "tutorials/own-model.md",
]
"""Pages that are read one after the other, in one folder."""
ELSEWHERE = {
    "adapters.md",
    "adding-a-compressor.md",
    "deploying.md",
    "leaderboard.md",
    "privacy.md",
    "tutorials/flower.md",
}
"""Pages whose blocks other tests run, or whose commands are those of other programs."""
PAGES = [path.relative_to(ROOT / "docs").as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = [page for page in PAGES if page not in {*FIRST, *ELSEWHERE} and "\n```" in (ROOT / "docs" / page).read_text()]


def test_the_first_pages_work_one_after_the_other(folder: Path) -> None:
    for page in FIRST:
        follow(f"docs/{page}", folder)
    assert sorted(path.name for path in folder.iterdir()) == ["both", "grid.toml", "mine.toml", "model.pt", "runs"]
    made = {path.name for path in (folder / "runs" / "mine").iterdir()}
    assert made == {"dense-s1", "dense-s2", "top-k-1-64-s1", "top-k-1-64-s2", "report"}
    assert (folder / "runs" / "grid" / "leaderboard.md").exists()
    check_first_table(folder / "runs" / "mine")


def check_first_table(runs: Path) -> None:
    """The first comparison shows the table that its command printed; numbers roughly, because machines differ."""
    page = (ROOT / "docs" / "tutorials" / "first-comparison.md").read_text("utf-8")
    for row in summarize(collect([runs])).rows:
        shown = re.search(rf"^  {row.label} +2 +30 +(\S+) +(\S+) (.)B +5.8 MB$", page, re.MULTILINE)
        assert shown
        assert row.final
        assert float(shown[1]) == pytest.approx(row.final.mean, abs=0.02)
        assert float(shown[2]) * {"k": 1e3, "M": 1e6}[shown[3]] == pytest.approx(row.bytes_up, rel=0.01)


@pytest.mark.parametrize("page", OTHERS)
def test_what_a_page_shows_runs(folder: Path, page: str) -> None:
    follow(f"docs/{page}", folder, more=(*SMALL, "--no-report"))


@pytest.mark.slow
@pytest.mark.parametrize("words", LONG, ids=" ".join)
def test_long_commands_run(folder: Path, words: list[str]) -> None:
    fedcams(words)


def test_the_page_on_records_names_every_file_and_every_key(folder: Path) -> None:
    page = (ROOT / "docs" / "records.md").read_text("utf-8")
    fedcams(["fedcams", "run", "demo", "--only", "FedAvg", "--no-report", *SMALL, "-s", "theory_every=1"])
    run = folder / "runs" / "demo" / "fedavg-s1"
    for path in run.iterdir():
        assert f"| `{path.name}{'/' if path.is_dir() else ''}` |" in page
    for name in ("rounds.jsonl", "theory.jsonl"):
        for key in json.loads((run / name).read_text()):
            assert f"`{key}`" in page


def test_the_readmes_python_runs(folder: Path) -> None:
    snippets = [text for language, text in blocks("README.md") if language == "python"]
    assert len(snippets) == 2
    first, *others = snippets
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(compile(first, "README.md", "exec"), names)
    records, parameters = names["history"].records, sum(p.numel() for p in names["trained"].parameters())
    sent, dense = sum(each.wire_up + each.wire_down for each in records), 20 * 10 * 2 * 4 * parameters
    assert records[-1].averaged_accuracy > 0.92
    assert 55 * sent < dense, "the page says 61"
    for snippet in others:
        exec(compile(snippet, "README.md", "exec"), {})


def test_the_readmes_commands_run(folder: Path) -> None:
    """As they stand, but with little to do, on the CPU, and with images made here where DIR would hold them."""
    sizes = {f"cifar-10-batches-py/data_batch_{i}": 2 for i in range(1, 6)} | {"cifar-10-batches-py/test_batch": 2}
    (folder / "images").mkdir()
    write_cifar(folder / "images", sizes, b"labels", 10)
    shown = [words for language, text in blocks("README.md") if language == "sh" for words in commands(text)]
    assert [words for words in shown if words[0] == "make"] == [["make", "demo"], ["make", "test"]]
    for words in shown:
        if words[0] == "make":
            done = subprocess.run(
                [*words, "-n", "-o", ".venv/.demo-ready", "-o", ".venv/.test-ready", "-o", ".venv/.ready"],
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            words = ["fedcams", "run", "demo"] if words[1] == "demo" else []
            assert " ".join(words[1:]) in done.stdout
        if words:
            there = {"DIR": str(folder / "images"), "cuda": "cpu"}
            more = [*SMALL, "--no-report"] if words[1] == "run" else []
            fedcams([there.get(word, word) for word in words] + more)
    assert (folder / "comparison" / "index.html").exists()
