"""Delivering the averaged model when a run is over: what clients receive, and what compression costs it.

    python benchmarks/delivery.py bytes-resnet18 "FedCAMS lighter" --data DIR --device cuda --save

Runs one experiment of a preset, whose downlink keeps a model for each client, and sends each client the difference
between the averaged model and the one that it holds, once, by several compressors. Buffers travel dense. `--save`
writes `records/delivery.json` and the table, `delivery.md`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from recording import environment, save

from fedcams.bench.timing import Grid
from fedcams.compress.base import compressor
from fedcams.downlink.base import ROWS
from fedcams.downlink.message import dense_size, message_size
from fedcams.experiment import build
from fedcams.experiment.preset import load_preset, overridden
from fedcams.feedback import encode_with_feedback_
from fedcams.rounds import ServerState
from fedcams.simulation import Simulation
from fedcams.simulation.evaluate import SCORE, evaluate
from fedcams.wire import sizes

CODECS = ("identity", "blockq(bits=8)", "blockq(bits=4)", "blockq(bits=2)", "ternary(ratio=1/2)", "ternary(ratio=1/13)")
TESTED = 5
"""Clients whose model is tested."""
RECORD = Path(__file__).parent / "records" / "delivery.json"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("preset")
    options.add_argument("label")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options.add_argument("--data", type=Path)
    options.add_argument("--device", default="cpu")
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name} and {RECORD.stem}.md")
    chosen = options.parse_args()
    preset = overridden(load_preset(chosen.preset), dict(setting.split("=", 1) for setting in chosen.set))
    experiment = next(found for found in preset.experiments if found.label == chosen.label)
    simulation, state = trained(build(experiment, chosen.data, chosen.device), experiment.rounds)
    record = {
        "experiment": experiment.to_dict(),
        "environment": {**environment(), "device": chosen.device},
        "dense_bytes": dense_size(simulation.server.layout),
        "tested": TESTED,
        "accuracy": accuracy(simulation, state, averaged(state).x),
        "delivered": {spec: delivered(simulation, state, spec) for spec in CODECS},
    }
    print(table(record))
    if chosen.save:
        save(RECORD, record)
        RECORD.with_suffix(".md").write_text(table(record))


def trained(built: Any, rounds: int) -> tuple[Simulation, ServerState]:
    """Return the simulation and its state after all rounds."""
    state = built.state
    while state.round < rounds:
        state, _ = built.simulation.advance_(state)
    return built.simulation, state


def averaged(state: ServerState) -> Any:
    """Return the averaged model and its buffers."""
    assert state.average is not None, "the method keeps no average"
    return state.average


def delivered(simulation: Simulation, state: ServerState, spec: str) -> dict[str, float]:
    """Return the mean bytes of one client's message, and the mean accuracy of what clients hold afterwards."""
    codec, layout, store = compressor(spec), simulation.server.layout, simulation.server.replicas
    assert store is not None, "the downlink keeps no model for each client"
    clients = [client for client in range(len(simulation.problem.clients)) if store.round_of(client) is not None]
    lengths: list[int] = []
    scores: list[float] = []
    for client in clients:
        missing = averaged(state).x[None] - store.gather(ROWS["model"], [client]).to(averaged(state).x.device)
        code, residual, _ = encode_with_feedback_(codec, layout, missing, client, keep=True)
        lengths += [message_size([size]) for size in sizes(codec, code, layout)]
        if len(scores) < TESTED:
            assert residual is not None
            scores.append(accuracy(simulation, state, averaged(state).x - residual[0]))
    return {"bytes": fmean(lengths), "accuracy": fmean(scores)}


def accuracy(simulation: Simulation, state: ServerState, x: torch.Tensor) -> float:
    """Return the test accuracy of a model with the averaged buffers, in percent."""
    assert simulation.test is not None
    buffers = averaged(state).buffers
    found = evaluate(simulation.problem, x, buffers, simulation.test, simulation.metrics, simulation.engine)[SCORE]
    assert found is not None
    return 100 * found


def table(record: dict[str, Any]) -> str:
    rows = []
    for spec, found in record["delivered"].items():
        lost = record["accuracy"] - found["accuracy"]
        fewer = record["dense_bytes"] / found["bytes"]
        rows.append(
            (f"`{spec}`", f"{found['bytes']:,.0f}", f"{fewer:.1f}x", f"{found['accuracy']:.2f}", f"{lost:+.2f}")
        )
    return Grid("Delivery", ("compressor", "bytes per client", "fewer", "accuracy", "lost"), rows).to_markdown() + "\n"


if __name__ == "__main__":
    main()
