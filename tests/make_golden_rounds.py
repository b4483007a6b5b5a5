"""Writes the golden rounds: ten rounds of small runs with every compressor, downlink and server. Run by `make golden`.

They pin what a round computes: after a change of the code every number recorded here must come out again.
"""

from __future__ import annotations

import gzip
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from fedcams.experiment import Experiment
from fedcams.experiment.assembly import build
from fedcams.layout import Layout
from fedcams.registry import registered, resolve
from fedcams.runs.environment import environment

FILE = Path(__file__).parent / "golden" / "rounds.json.gz"
ROUNDS = 10
TASKS = {
    "quadratic": {
        "task": "quadratic",
        "model": "point",
        "partition": "natural",
        "clients": 8,
        "sampler": "uniform(n=3)",
        "local": "sgd(lr=0.05, steps=4)",
    },
    "digits": {
        "task": "digits",
        "model": "mlp",
        "partition": "dirichlet(alpha=0.5)",
        "clients": 40,
        "sampler": "uniform(n=4)",
        "local": "sgd(lr=0.1, epochs=1, batch=16)",
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "weighted": {"weighting": "examples", "measure_gamma": True, "uplink": "topk(ratio=0.1)"},
    "momentum": {"local": "sgd(lr=0.05, momentum=0.9, weight_decay=1e-3, steps=3, batch=8)", "uplink": "sign"},
    "clipped": {"local": "sgd(lr=0.1, clip=0.5, prox=0.1, epochs=2, batch=8)", "uplink": "sign"},
    "varying": {"sampler": "bernoulli(p=0.1)", "uplink": "sign"},
    "no feedback": {"feedback": False, "uplink": "sign"},
    "buffers": {"model": "convmixer(dim=8, depth=1)", "local": "sgd(lr=0.05, epochs=1, batch=16, drop_last=true)"},
}
"""Beside the compressors and downlinks: what else changes the course of a round, on digits."""


def experiments() -> Iterator[tuple[str, Experiment]]:
    """Every run that is recorded, with its name."""
    for task, base in TASKS.items():
        for engine in ("loop", "stacked"):
            for what, keys in _variants(base):
                values = {"rounds": ROUNDS, "seed": 3, "engine": engine, **base, **keys}
                yield f"{task}, {engine}, {what}", Experiment.from_dict(values)


def _variants(base: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for uplink in _examples("compressor"):
        bounded = bound_of(uplink) is not None
        yield f"uplink {uplink}", {"uplink": uplink, "feedback": bounded, "measure_gamma": True}
    for downlink in _examples("downlink"):
        yield f"downlink {downlink}", {"uplink": "sign", "downlink": downlink}
    for server in _examples("server"):
        yield f"server {server}", {"server": server, "uplink": "topk(ratio=0.2)"}
    if base["task"] == "digits":
        yield from OPTIONS.items()


def bound_of(spec: str) -> float | None:
    """The proven bound of a compressor's error, if it has one."""
    codec: Any = resolve("compressor", spec)
    bound: float | None = codec.squared_error_bound(Layout.flat(1))
    return bound


def _examples(kind: str) -> list[str]:
    return [spec for cls in registered(kind).values() for spec in cls.examples]


def rounds_of(experiment: Experiment, nudge: int = 0) -> list[dict[str, Any]]:
    """The records of a run, as they are written to its folder; on one thread, since sums depend on their number.

    A nudge other than 0 moves about half of the first weights by their last bit, chosen by its number.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _rounds(experiment, nudge)
    finally:
        torch.set_num_threads(threads)


def _rounds(experiment: Experiment, nudge: int) -> list[dict[str, Any]]:
    built = build(experiment)
    state, lines = built.state, []
    if nudge:
        moved = torch.rand(state.x.shape, generator=torch.Generator().manual_seed(nudge)) < 0.5
        state.x.copy_(torch.where(moved, torch.nextafter(state.x, torch.tensor(torch.inf)), state.x))
    for _ in range(experiment.rounds):
        state, record = built.simulation.advance_(state)
        lines.append(json.loads(record.to_json()))
    return lines


def where() -> dict[str, Any]:
    """What the last bits of these numbers may depend on."""
    here = environment("cpu")
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "numba": numba.__version__,
        "python": platform.python_version(),
        "cpu": here["cpu"],
    }


def main() -> None:
    runs = {name: rounds_of(experiment) for name, experiment in experiments()}
    data = json.dumps({"environment": where(), "runs": runs}, separators=(",", ":")).encode()
    FILE.write_bytes(gzip.compress(data, mtime=0))
    print(f"{len(runs)} runs of {ROUNDS} rounds in {FILE.name}, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
