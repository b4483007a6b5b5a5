"""The Flower adapter in real processes on loopback: SuperLink, SuperNodes, an app for every message."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fedcams.experiment import build
from fedcams.flower.checkpoint import read_ledger
from fedcams_app.settings import experiment
from federation import BIN, QUIET, Federation, descendants, federation
from forked_commands import forked_commands
from forks import Forks

CONFIG: dict[str, Any] = {
    "task": "quadratic",
    "model": "point",
    "partition": "iid",
    "sampler": "full",
    "local": "sgd(lr=0.05, epochs=2, batch=8)",
    "server": "fedams(lr=cosine(0.2, 0.05), eps=1e-3)",
    "uplink": "topk(ratio=1/8)",
    "downlink": "replica(blockq(bits=2), warm=true)",
    "control": "scaffold",
    "transforms": "clip(norm=0.5)",
    "average": "ema(0.5)",
    "rounds": 2,
    "seed": 3,
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
"""One thread for each of many processes, and no second between two looks for a task."""
PROGRAMS = ("flower-superlink", "flower-supernode", "flower-superexec", "flwr", "flwr-clientapp", "flwr-serverapp")
FLOWERS = ("flwr.cli.app", "flwr.superlink.cli", "flwr.supernode.cli", "flwr.supercore.cli", "fedcams.flower")
"""What Flower's programs import, all but the app itself, which they get from the server."""
LOADED = (*FLOWERS, "quick_flower")


def simulated(config: dict[str, Any]) -> dict[str, Tensor]:
    """The models and control variate after the last round in our simulator, with as many threads as the app has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        built = build(experiment({**config, "data": ""}))
        state = built.state
        for _ in range(config["rounds"]):
            state, _record = built.simulation.advance_(state)
        assert state.average is not None
        assert state.control is not None
        models = {"model": state.x, "averaged": state.average.x}
        layout = built.simulation.server.layout
        parts = {f"{name}.{key}": part for name, x in models.items() for key, part in layout.split(x).items()}
        return {**parts, "control": state.control}
    finally:
        torch.set_num_threads(threads)


def deployed(checkpoint: Path, rounds: int) -> dict[str, Tensor]:
    """The same from the server's checkpoint."""
    tensors = safetensors.torch.load_file(checkpoint / f"{rounds}.safetensors")
    return {name: value for name, value in tensors.items() if name.startswith(("model.", "averaged.", "control"))}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_tls_authentication_and_the_simulators_model(
    tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One site, and Flower's processes forked: it has ten of them even so, one for every message to the site.

    Several sites are added up in `test_flower`, through the same strategy and mod.
    """
    scripts = {name: BIN / name for name in PROGRAMS}
    with forked_commands(forks, scripts, LOADED, env={**os.environ, **QUIET, **ENVIRONMENT}) as commands:
        if not torch.cuda.is_available():  # where torch has CUDA, a forked process cannot train
            monkeypatch.setattr("federation.BIN", commands)
        check_federation(tmp_path, 1)


@pytest.mark.slow
def test_a_killed_server_and_the_simulators_model(tmp_path: Path) -> None:
    """A server that is killed with -9 after a round goes on with moments, schedule, average and control."""
    check_federation(tmp_path, 2, kill=True)


def check_federation(tmp_path: Path, sites: int, kill: bool = False) -> None:
    config = {**CONFIG, "clients": sites}
    with federation(tmp_path, secure=True, env=ENVIRONMENT) as fed:
        for site in range(sites):
            fed.start_node(site)
        fed.start_node(7, register=False, name="stranger")
        settings = {**config, "min_available": sites, "min_replies": sites, "deadline": 240.0}
        run = fed.submit(**settings)
        if kill:
            fed.wait(run, rounds=1, seconds=480)
            kill_server_app(fed)
            run = fed.submit(**settings)
        fed.wait(run, rounds=2, seconds=480)
        assert refused(fed, "stranger")
    ledger = read_ledger(tmp_path / "server")
    assert [sorted(line["accepted"]) for line in ledger] == [[str(site) for site in range(sites)]] * 2
    assert not any("out of step" in str(line["notes"]) for line in ledger), "sites made the initial model themselves"
    assert_equal(deployed(tmp_path / "server", 2), simulated(config))


def kill_server_app(fed: Federation) -> None:
    """Ends the process in which the strategy runs, by its id."""
    family = descendants(fed.processes["superlink"].pid)
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family if Path(f"/proc/{pid}").exists()}
    apps = [pid for pid, line in lines.items() if b"serverapp" in line and b"superexec" not in line]
    assert apps, lines
    for pid in apps:
        os.kill(pid, signal.SIGKILL)


def refused(fed: Federation, name: str) -> bool:
    """Whether a SuperNode ended by itself because the SuperLink did not know its key."""
    end = time.monotonic() + 30
    while fed.processes[name].poll() is None and time.monotonic() < end:
        time.sleep(0.2)
    assert fed.processes[name].poll(), fed.log(name)
    return "2004" in fed.log(name)  # the code for a key that is not registered
