"""Lists, help and errors are text: torch, which takes seconds to load, stays out of the process that prints them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedcams.bits.levels import BF16_MAX
from fedcams.cli.deferred import defer
from fedcams.cli.tables import EXPERIMENT, PRESETS, RECIPE_LIST
from fedcams.compress.randk import F32_MAX

LISTS = (PRESETS, RECIPE_LIST, EXPERIMENT)
TEXTS = [["--help"], ["run", "--help"], ["list"], *(["list", name] for name in LISTS)]
ERRORS = [
    ["nonsense"],
    ["list", "nonsense"],
    ["run", "--nonsense"],
    ["run", "demo", "--rounds", "5"],
    ["run", "nonsense"],
    ["run", "missing.toml"],
    ["run", "demo", "-s", "nonsense=5"],
    ["run", "demo", "-s", "uplink=topk(ratio=2)"],
    ["run", "demo", "-s", "clients=3"],
    ["run", "demo", "--only", "nonsense"],
    ["run", "demo", "--track", "nonsense"],
    ["new", "torch"],
    ["new", "../project"],
    ["resume", "missing"],
    ["report", "missing"],
    ["sweep", "missing.toml"],
    ["plan", "nonsense"],
    ["plan", "25M", "--network", "nonsense"],
    ["theory", "check", "nonsense"],
    ["theory", "steps", "--task", "nonsense"],
]
PROBE = """
import json, sys, traceback

loaded = []

def watch(event, arguments):
    if event == "import" and arguments[0] == "torch._C" and not loaded:
        ours = [frame for frame in traceback.extract_stack() if "/fedcams/" in frame.filename]
        frames = [frame for frame in ours if not frame.filename.endswith("deferred.py")]
        loaded.append(f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}")

sys.addaudithook(watch)
from fedcams.cli import app
from fedcams.registry import kinds

for command, expected in [*json.loads(sys.argv[1]), *((["list", kind], 0) for kind in kinds())]:
    try:
        code = app(command)
    except SystemExit as end:
        code = end.code
    if loaded:
        sys.exit(f"fedcams {' '.join(command)} loads torch: {loaded[0]}")
    if (code or 0) != expected:
        sys.exit(f"fedcams {' '.join(command)} ends with {code}")
"""


def test_text_is_printed_without_torch(tmp_path: Path) -> None:
    """All in one process: whoever loads torch first is named, with the line that does so."""
    commands = [(words, 0) for words in TEXTS] + [(words, 2) for words in ERRORS]
    probe = [sys.executable, "-c", PROBE, json.dumps(commands)]
    found = subprocess.run(probe, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert found.returncode == 0, found.stderr.splitlines()[-1]


# -- modules that load when they are used ----------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that counts how often it is loaded."""
    folder = tmp_path / "slow_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "import builtins\nbuiltins.loads += 1\nvalue = 5\nfrom slow_package import part\n"
    )
    (folder / "part.py").write_text("import slow_package\nhalf = slow_package.value / 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.loads", 0, raising=False)
    for name in ("slow_package", "slow_package.part"):
        monkeypatch.setitem(sys.modules, name, None)  # so that both are forgotten after the test
        del sys.modules[name]
    return "slow_package"


def loads() -> int:
    import builtins

    return int(vars(builtins)["loads"])


def test_a_deferred_module_loads_once_when_something_in_it_is_used(package: str) -> None:
    defer(package)
    first, second = importlib.import_module(package), importlib.import_module(package)
    assert first is second
    assert loads() == 0
    assert first.value == 5
    assert first.part.half == 2.5
    assert loads() == 1
    assert importlib.import_module(package) is first, "the module itself, not a stand-in for it"
    assert type(first) is type(sys)
    with pytest.raises(AttributeError, match="slow_package"):
        _ = first.nonsense


def test_a_part_of_a_deferred_package_comes_after_the_whole(package: str) -> None:
    defer(package)
    part = importlib.import_module(f"{package}.part")
    assert part.half == 2.5
    assert loads() == 1
    assert part is sys.modules[package].part, "not loaded a second time"
    assert part is sys.modules[f"{package}.part"]


def test_what_is_loaded_or_not_installed_is_left_alone(package: str) -> None:
    importlib.import_module(package)
    defer(package)
    assert loads() == 1
    assert type(sys.modules[package]) is type(sys)
    defer("nonsense_that_nobody_has")
    assert "nonsense_that_nobody_has" not in sys.modules


def test_numbers_that_are_written_out_are_those_of_torch() -> None:
    import torch

    assert torch.finfo(torch.bfloat16).max == BF16_MAX
    assert torch.finfo(torch.float32).max == F32_MAX
