"""The core against memory bandwidth and against the same thing composed of library calls. Run by `make bench`.

Everything is timed in one process in turn and printed as ratios; `--save` writes `benchmarks/records/core.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from timing import best_of, environment, save
from torch import Tensor

from fedcams import Aggregator, ErrorFeedback, Layout, ResidualStore, encode, server
from fedcams.registry import registered
from fedcams.wire import pack

D = 11_173_962  # ResNet-18 with ten classes
RATIO = 64
RECORD = Path(__file__).parent / "records" / "core.json"
Setup = Callable[[], Callable[[], Any]]


class Goal(NamedTuple):
    """At most so many copies' time, and at least so many times faster than the library calls."""

    copies: float
    baseline: str = ""
    speedup: float = 0.0


GOALS = {
    "encode sign": Goal(6, "torch + packbits", 7),
    "encode topk(ratio=1/64)": Goal(6, "torch.topk", 20),
    "encode topk(ratio=1/64, values=bf16)": Goal(6, "torch.topk", 20),
    "aggregate sign": Goal(4),
    "aggregate topk(ratio=1/64)": Goal(2),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=15, help="timings of each; the best counts")
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name}")
    chosen = options.parse_args()
    torch.manual_seed(0)
    times = best_of(chosen.runs, contenders())
    Console().print(table(times))
    if chosen.save:
        save(RECORD, {"d": D, "runs": chosen.runs, "environment": environment(), "milliseconds": times})


def contenders() -> dict[str, Setup]:
    delta, residual = torch.randn(D), torch.randn(D)
    specs = [name.removeprefix("encode ") for name in GOALS if name.startswith("encode")]
    steps = {f"step {name}": step_setup(name, delta) for name in registered("server")}
    return {
        "numpy.copyto": copy_setup(delta),
        "torch + packbits": lambda: lambda: composed_sign(delta, residual),
        "torch.topk": lambda: lambda: composed_topk(delta, residual),
        **{f"encode {spec}": encode_setup(spec, delta, residual) for spec in specs},
        **{f"aggregate {spec}": aggregate_setup(spec, delta) for spec in specs[:2]},
        **steps,
    }


def copy_setup(delta: Tensor) -> Setup:
    source, target = delta.numpy(), np.empty(D, np.float32)
    target[:] = 0
    return lambda: lambda: np.copyto(target, source)


def composed_sign(delta: Tensor, residual: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Scaled sign with error feedback as one would write it with torch and NumPy."""
    h = delta + residual
    scale = h.abs().mean()
    positive = h >= 0
    bits = np.packbits(positive.numpy(), bitorder="little")
    return bits, scale, h - torch.where(positive, scale, -scale)


def composed_topk(delta: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k with error feedback as one would write it with torch; positions not yet packed."""
    h = delta + residual
    positions = torch.topk(h.abs(), D // RATIO).indices
    return positions, h.gather(0, positions), h.scatter(0, positions, 0.0)


def encode_setup(spec: str, delta: Tensor, residual: Tensor) -> Setup:
    """From delta and the stored residual to the payload's bytes and the new residual."""
    layout = Layout.flat(D)
    store = ResidualStore.in_memory(layout)
    store.commit([0], residual[None], 1)
    uplink = ErrorFeedback(spec, store)
    update = torch.empty(1, D)

    def run() -> bytes:
        pending = uplink.prepare([0], update, 2)
        return pack(uplink.compressor, {name: tensor[0] for name, tensor in pending.code.items()}, layout)

    def prepare() -> Callable[[], bytes]:
        update[0] = delta
        return run

    return prepare


def aggregate_setup(spec: str, delta: Tensor) -> Setup:
    """What one more payload costs: checked, decoded and added to the sum. Ten clients, divided by ten."""
    layout, payload = Layout.flat(D), encode(spec, delta)

    def run() -> None:
        aggregator = Aggregator(layout)
        for client in range(10):
            aggregator.add(client, payload)
        aggregator.mean()

    return lambda: run


def step_setup(name: str, delta: Tensor) -> Setup:
    optimizer, x = server(name), torch.randn(D)
    state = optimizer.init(x)
    return lambda: lambda: optimizer.step(state, x, delta)


def table(times: dict[str, float]) -> Table:
    copy = times["numpy.copyto"]
    result = Table(title=f"d = {D:,}, best of several, {torch.get_num_threads()} threads")
    for column in ("what", "ms", "copies", "goal", "faster than library calls", "goal"):
        result.add_column(column, justify="left" if column == "what" else "right")
    for name, elapsed in times.items():
        elapsed = elapsed / 10 if name.startswith("aggregate") else elapsed
        goal = GOALS.get(name, Goal(0))
        speedup = f"{times[goal.baseline] / elapsed:.1f}x" if goal.baseline else ""
        wanted = f">= {goal.speedup:g}x" if goal.baseline else ""
        limit = f"<= {goal.copies:g}" if goal.copies else ""
        result.add_row(name, f"{elapsed:.2f}", f"{elapsed / copy:.2f}", limit, speedup, wanted)
    return result


if __name__ == "__main__":
    main()
