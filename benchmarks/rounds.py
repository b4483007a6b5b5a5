"""Rounds of a federation against a plain PyTorch loop over clients. Run by `make bench`.

Both train the same clients from the same model in the same process in turn; `--save` writes
`benchmarks/records/rounds.json` and `rounds.md`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timing import REPEATS, Setup, best_of, environment, save
from torch import Tensor, nn
from torch.nn import functional as F

from fedcams.experiment import Built, Experiment, build
from fedcams.simulation import Phases

RECORD = Path(__file__).parent / "records" / "rounds.json"
LOCAL = "sgd(lr=0.05, epochs=3, batch=20)"
UPLINK = "sign"
ENGINES = ("stacked", "stacked(compile=true)")
PARTITIONS = ("iid", "dirichlet(alpha=0.3)")
MODELS = ("mlp", "cnn")
ROUND = 7
"""The round that is timed again and again."""
GOALS = {"train": 8.0, "round": 5.0}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=10, help=f"turns of {REPEATS} timings each; the best counts")
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name} and {RECORD.stem}.md")
    chosen = options.parse_args()
    cases = {(m, p): case(m, p, chosen.turns) for m in MODELS for p in PARTITIONS}
    ...


def experiment(model: str, partition: str, engine: str) -> Experiment:
    values = {
        "task": "digits",
        "model": model,
        "partition": partition,
        "clients": 100,
        "sampler": "uniform(n=10)",
        "local": LOCAL,
        "server": "fedams(lr=0.03, eps=1e-3)",
        "uplink": UPLINK,
        "engine": engine,
        "rounds": 1000,
    }
    return Experiment.of(values)
