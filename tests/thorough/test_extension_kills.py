"""A newcomer's pieces, one file each, as in `test_extension`: run by the command line, with kills."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

import fedcams
from fedcams.runs import read_run
from forks import Forks
from own_pieces import FILES, METHODS, PROBES
from test_extension import LABELS, loss
from test_extension import folder as folder
from test_runs import lasting

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
