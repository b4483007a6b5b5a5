"""Tests that take minutes: chaos, bytes on sockets, Flower's own simulation, a model of 100 million parameters."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_flower_deployment import CONFIG, ENVIRONMENT, assert_equal, deployed, simulated

import demo
from federation import QUIET

TESTS = Path(__file__).resolve().parent
pytestmark = pytest.mark.slow


def python(*command: str, timeout: float, **env: str) -> str:
    """What a script prints last."""
    paths = [str(TESTS.parent / "examples" / "flower_app"), os.environ.get("PYTHONPATH", "")]
    full = {**os.environ, **QUIET, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), **env}
    done = subprocess.run(
        [sys.executable, *command], env=full, capture_output=True, text=True, timeout=timeout, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("setting", ["downlink=none", "downlink=replica(blockq(bits=2))", "recipe=lighter"])
def test_the_same_chaos_twice_gives_the_same_ledger(tmp_path: Path, setting: str) -> None:
    """The script itself checks every line and every residual, and that no client is out of step."""
    for name in ("first", "second"):
        options = ("--seed", "1", "--set", setting, "--out", str(tmp_path / name))
        python(str(TESTS / "chaos" / "chaos.py"), *options, timeout=5400)
    assert (tmp_path / "first").read_text() == (tmp_path / "second").read_text()


def test_hostile_nodes_change_neither_identities_nor_accuracy() -> None:
    """Over TLS with authentication; the script checks every line, every residual, and both accuracies by itself."""
    told = python(str(TESTS / "chaos" / "hostile.py"), timeout=3600)
    assert "% with attacks" in told


def test_the_bytes_on_the_socket(tmp_path: Path) -> None:
    record = demo.measure(tmp_path, nodes=2, rounds=3)
    assert record["d"] >= 1_500_000
    up = {method: demo.mean_bytes(measured)[0] for method, measured in record["methods"].items()}
    assert up[demo.DENSE] / up["uplink=sign"] >= 26
    assert up[demo.DENSE] / up["uplink=topk(ratio=1/64, values=bf16)"] >= 40
    total = {method: sum(demo.mean_bytes(measured)) for method, measured in record["methods"].items()}
    assert total[demo.DENSE] / total["recipe=lighter"] >= 40


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_flowers_simulation_gives_the_simulators_model(tmp_path: Path) -> None:
    config: dict[str, Any] = {**CONFIG, "data": "", "name": "ray", "deadline": 300.0}
    config |= {"clients": 2, "min-available": 2, "min-replies": 2}
    script, state = str(TESTS / "flower_simulation.py"), str(tmp_path / "sites")
    python(
        script, str(tmp_path / "server"), json.dumps(config), timeout=900, FEDCAMS_STATE=state, FLWR_HOME=str(tmp_path)
    )
    assert_equal(deployed(tmp_path / "server", CONFIG["rounds"]), simulated(config))


@pytest.mark.parametrize("spec", ["sign", "topk(ratio=1/64, values=bf16)"])
@pytest.mark.parametrize(("side", "limit"), [("client", 3), ("server", 1 + 3 + 2)])
def test_memory_with_a_hundred_million_parameters(side: str, limit: int, spec: str) -> None:
    """The server's limit holds the model and the three vectors of fedams."""
    check_memory(side, 100_000_000, spec, limit)


def check_memory(side: str, d: int, spec: str, limit: int) -> None:
    # freed arrays go back to the system at once, so that what is counted is what is used
    told = python(str(TESTS / "flower_memory.py"), side, str(d), spec, timeout=1800, MALLOC_MMAP_THRESHOLD_="65536")
    found = json.loads(told.splitlines()[-1])
    assert found["peak"] < limit * found["model"], found["peak"] / found["model"]
