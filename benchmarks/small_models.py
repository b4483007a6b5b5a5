"""Measure how many points of accuracy each compressor costs models of different sizes, on digits.

A federation like that of a first Flower app: few clients, all of them in every round, few rounds. Every run is compared
with FedAvg from the same model on the same data after the same number of rounds. Nothing here depends on time, so any
machine will do.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from recording import environment, save
from rich.console import Console

from fedcams.experiment import Experiment, build
from fedcams.method import SAFE_SERVER

RECORD = Path(__file__).parent / "records" / "small-models.json"
TABLE = RECORD.with_suffix(".md")
ROUNDS, SEEDS = 10, (1, 2, 3, 4, 5)
HIDDEN = (11, 66, 256, 1333, 13333)
"""Units of the hidden layer: about 800 to a million weights."""
UPLINKS = (
    "identity",
    "blockq(bits=4)",
    "blockq(bits=2)",
    "ternary(ratio=1/4)",
    "sign(scope=tensor)",
    "ternary(ratio=1/16)",
)
FAST, SLOW = "sgd(lr=0.1, momentum=0.9, batch=32)", "sgd(lr=0.1, batch=32)"
"""Training as in Flower's quickstart-pytorch, which learns digits in a few rounds, and without momentum."""
FEDERATIONS = {"2 clients": (2, FAST), "10 clients": (10, FAST), "2 clients, slower": (2, SLOW)}


class Ended(NamedTuple):
    """How a run ended."""

    accuracy: float
    """In percent."""
    bytes_up: float
    """Of one client in one round."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name} and {TABLE.name}")
    chosen, console = options.parse_args(), Console()
    found: dict[str, Any] = {}
    for name, (clients, local) in FEDERATIONS.items():
        for hidden in HIDDEN:
            row = compared({"clients": clients, "local": local, "model": f"mlp(hidden={hidden})"})
            console.print(name, row)
            found.setdefault(name, []).append(row)
    lines = table(found)
    console.print(lines)
    if chosen.save:
        save(RECORD, {"rounds": ROUNDS, "seeds": SEEDS, "environment": environment(), **found})
        TABLE.write_text(lines, "utf-8")


def compared(keys: dict[str, Any]) -> dict[str, Any]:
    """Return FedAvg's accuracy, and for each compressor what it costs compared with FedAvg of the same seed."""
    weights = build(experiment(keys, 1)).simulation.problem.layout.d
    base = [ended({**keys, "server": "fedavg"}, seed) for seed in SEEDS]
    row: dict[str, Any] = {"weights": weights, "fedavg": rounded([run.accuracy for run in base])}
    for uplink in UPLINKS:
        runs = [ended({**keys, "server": SAFE_SERVER, "uplink": uplink}, seed) for seed in SEEDS]
        points = rounded([run.accuracy - dense.accuracy for run, dense in zip(runs, base, strict=True)])
        row[uplink] = {"points": points, "bytes_up": round(statistics.mean(run.bytes_up for run in runs))}
    return row


def experiment(keys: dict[str, Any], seed: int) -> Experiment:
    base = {"task": "digits", "sampler": "full", "rounds": ROUNDS, "evaluate_every": ROUNDS, "seed": seed}
    return Experiment.from_dict({**base, **keys})


def ended(keys: dict[str, Any], seed: int) -> Ended:
    what = experiment(keys, seed)
    simulation = build(what).simulation
    state = simulation.start()
    for _ in range(ROUNDS):
        state, record = simulation.advance_(state)
    assert record.test_accuracy is not None, "the last round is evaluated"
    return Ended(100 * record.test_accuracy, record.wire_up / what.clients)


def rounded(numbers: list[float]) -> list[float]:
    return [round(number, 2) for number in numbers]


def table(found: dict[str, Any]) -> str:
    """Return, for each compressor and size, the largest mean loss over the federations, and the bytes of an update."""
    sizes = [row["weights"] for row in next(iter(found.values()))]
    lines = ["| compressor | " + " | ".join(f"{size:,}" for size in sizes) + " | fewer bytes up |"]
    lines.append("|---" + "|--:" * (len(sizes) + 1) + "|")
    for uplink in UPLINKS:
        columns = zip(*found.values(), strict=True)
        cells = [f"{min(statistics.mean(row[uplink]['points']) for row in column):.1f}" for column in columns]
        last = next(iter(found.values()))[-1]
        times = last["identity"]["bytes_up"] / last[uplink]["bytes_up"]
        lines.append(f"| `{uplink}` | {' | '.join(cells)} | {times:.1f}x |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
