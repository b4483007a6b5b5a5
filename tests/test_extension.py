"""A newcomer's pieces, one file each: simulated, and run by the command line with kills, without other changes."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcams
from fedcams.own import History
from fedcams.registry import registered
from fedcams.runs import read_run
from fedcams.simulation import RoundRecord
from forks import Forks
from own_pieces import FILES, METHODS, PROBES, loaded
from test_runs import lasting

LABELS = {name: name.removeprefix("own_") for name in FILES}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the files are."""
    with loaded(tmp_path):
        yield tmp_path
    assert "half" not in registered("compressor")


# -- simulations -------------------------------------------------------------------------------------------------------


@functools.cache
def data() -> list[tuple[Tensor, Tensor]]:
    """Six clients of two classes in 20 dimensions; each lacks some of the directions."""
    x = torch.randn(6, 64, 20, generator=torch.Generator().manual_seed(1))
    return [(part, (part[:, :3].sum(1) > 0).long()) for part in x]


def simulated(name: str, **changes: Any) -> History:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2))
    *clients, test = data()
    method = {"server": "fedavg", "uplink": "sign", "local": "sgd(lr=0.1, steps=5, batch=16)", **METHODS[name]}
    values = {"rounds": 6, "cohort": 3, "probes": PROBES.get(name, "q"), **method, **changes}
    return fedcams.simulate(model, clients, test, **values).run()


def loss(records: list[RoundRecord], place: int) -> float:
    found = records[place].test_loss
    assert found is not None
    return found


@pytest.mark.parametrize("name", FILES)
def test_it_learns_alike_in_every_engine(name: str) -> None:
    one, other = simulated(name, engine="loop"), simulated(name, engine="stacked")
    assert loss(one.records, -1) < loss(one.records, 0)
    torch.testing.assert_close(one.state.x, other.state.x, rtol=1e-3, atol=1e-4)


def test_the_local_rule_steps_by_signs() -> None:
    """Three steps of 0.01 in either direction, and nothing in between."""
    history = simulated("own_local", uplink="identity", rounds=1, cohort=1)
    before = simulated("own_local", uplink="identity", rounds=1, cohort=1, server="fedavg(lr=1e-30)")
    steps = (history.state.x - before.state.x) / 0.01
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
    assert steps.abs().max() == pytest.approx(3, abs=1e-3)


def test_the_controls_mean_stays_that_of_its_clients() -> None:
    history = simulated("own_control")
    rows = history.simulation.client.rows
    assert rows is not None
    everybody = rows.gather("control", range(5))
    assert everybody.abs().max() > 0.01
    torch.testing.assert_close(history.state.control, everybody.mean(0), atol=1e-6, rtol=1e-4)


def test_the_transforms_noise_is_its_own() -> None:
    plain = simulated("own_transform", transforms="clip(norm=1)", uplink="identity", rounds=1, cohort="full")
    noisy = simulated("own_transform", uplink="identity", rounds=1, cohort="full")
    apart = noisy.state.x - plain.state.x
    assert float(apart.std()) == pytest.approx(1e-3 / 5**0.5, rel=0.2)
    assert simulated("own_transform").records == simulated("own_transform").records


def test_the_probes_numbers_are_recorded() -> None:
    history = simulated("own_probe")
    for record in history.records:
        assert record.probes.keys() == {"q", "q_max", "smallest", "largest"}
        assert 0 < (record.probes["smallest"] or 0) < (record.probes["largest"] or 0)
    assert "largest" in history.to_frame()


def test_bytes_are_halved() -> None:
    dense, up = simulated("own_compressor", uplink="identity"), simulated("own_compressor")
    both = simulated("own_downlink")
    values = 3 * 2 * sum(parameter.numel() for parameter in dense.model.parameters())
    assert dense.records[0].wire_up - up.records[0].wire_up == pytest.approx(values, abs=3 * 8)
    assert dense.records[0].wire_down - both.records[0].wire_down == pytest.approx(values, abs=3 * 16)
    assert up.records[0].wire_down == dense.records[0].wire_down


# -- the command line, with kills --------------------------------------------------------------------------------------

BASE = """
description = "your own pieces"
task = "digits"
model = "linear"
clients = 6
sampler = "uniform(n=3)"
server = "fedavg"
uplink = "sign"
local = "sgd(lr=0.1, steps=2)"
rounds = 20
engine = "stacked"
"""
IMPORTS = [word for name in FILES for word in ("--import", name)]
RUN = [*IMPORTS, "run", "pieces.toml", "--no-report", "--quiet", "--checkpoint-every", "3"]

# One process that runs everything undisturbed, and then each label that it reads in another one, which can be killed.
COMMANDS = """
import sys
from fedcams.cli import app
from forks import fork_for_each_line

app([*sys.argv[1:], "--out", "whole"], standalone_mode=False)
fork_for_each_line(lambda label: app([*sys.argv[1:], "--out", "killed", "--only", label], standalone_mode=False))
"""


def preset() -> str:
    runs = []
    for name, label in LABELS.items():
        values = {"label": label, **METHODS[name], **({"probes": PROBES[name]} if name in PROBES else {})}
        runs.append("".join(f'{key} = "{value}"\n' for key, value in values.items()))
    return BASE + "".join(f"\n[[run]]\n{text}" for text in runs)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="where torch has CUDA, a forked process cannot train")
def test_each_runs_by_the_command_line_and_after_kill_9_is_never_killed(folder: Path, forks: Forks) -> None:
    (folder / "pieces.toml").write_text(preset())
    with forks.start(COMMANDS, *RUN, cwd=folder) as process:
        for at, label in enumerate(LABELS.values()):
            child, records = process.fork(label), folder / "killed" / f"{label}-s1" / "rounds.jsonl"
            deadline = time.monotonic() + 120
            while lines(records) < 4 + 2 * at:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            os.kill(child, 9)
            assert process.forked_code() == -9
            assert lines(records) < 20, "killed too late to tell anything"
            process.fork(label)
            assert process.forked_code() == 0
    for name, label in LABELS.items():
        made, expected = folder / "killed" / f"{label}-s1", folder / "whole" / f"{label}-s1"
        assert lasting(made) == lasting(expected)
        found = read_run(made)
        assert found.finished
        assert loss(found.records, -1) < loss(found.records, 0)
        assert str(found.experiment.method) != str(fedcams.Method()), name
