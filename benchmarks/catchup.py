"""Bringing a client that missed rounds of a shared model up to date. Run by `make bench`.

This times everything from "this client holds version v" to the bytes of its message: finding the cheapest way, and
packing it. A copy is one `numpy.copyto` of the vector, timed alternately in the same process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recording import environment, save
from rich.console import Console
from rich.table import Table

from fedcams import Layout
from fedcams.bench.timing import REPEATS, best_of
from fedcams.downlink import Broadcast, downlink
from fedcams.downlink.message import ADD, SET, Held, Message
from fedcams.downlink.shared import Shared, SharedState

D = 11_173_962  # ResNet-18 with ten classes
SPEC = "shared(topk(ratio=1/64))"
MISSED = (1, 10, 50)
MOST_COPIES = 30
RECORD = Path(__file__).parent / "records" / "catchup.json"
NAME = bytes(16)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=5, help=f"turns of {REPEATS} timings each; the best counts")
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name}")
    chosen = options.parse_args()
    layout, shared = Layout.flat(D), downlink(SPEC)
    assert isinstance(shared, Shared)
    state = after_rounds(shared, layout, max(MISSED) + 1)
    source, target = state.model.w.numpy(), np.zeros(D, np.float32)
    times = best_of(
        chosen.turns,
        {
            "numpy.copyto": lambda: lambda: np.copyto(target, source),
            **{f"missed {n}": prepare(shared, state, layout, n) for n in MISSED},
        },
    )
    ways = {n: shared.way(state, layout, state.version - n) for n in MISSED}
    Console().print(table(times, ways))
    if chosen.save:
        found = {str(n): {"kind": way.kind, "bytes": way.size} for n, way in ways.items()}
        runs = REPEATS * chosen.turns
        save(
            RECORD,
            {"d": D, "spec": SPEC, "runs": runs, "environment": environment(), "milliseconds": times, "ways": found},
        )


def after_rounds(shared: Shared, layout: Layout, rounds: int) -> SharedState:
    """A model that random steps move, all of its coordinates in every round."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(D, generator=draw)
    state = shared.init(x)
    for round in range(1, rounds + 1):
        x = x + 0.01 * torch.randn(D, generator=draw)
        state = shared.deliver(state, Broadcast(x, layout, round, 0), [0]).state
    return state


def prepare(shared: Shared, state: SharedState, layout: Layout, missed: int) -> Callable[[], Callable[[], Any]]:
    held = state.version - missed

    def run() -> bytes:
        way = shared.way(state, layout, held)
        kind = SET if way.replaces else ADD
        return Message(kind, Held(held, NAME), Held(state.version, NAME), way.payloads()).to_bytes()

    return lambda: run


def table(times: dict[str, float], ways: dict[int, Any]) -> Table:
    copy = times["numpy.copyto"]
    result = Table(title=f"{SPEC}, d = {D:,}, best of several, {torch.get_num_threads()} threads")
    for column in ("what", "ms", "copies", "limit", "way", "bytes"):
        result.add_column(column, justify="left" if column in ("what", "way") else "right")
    result.add_row("numpy.copyto", f"{copy:.2f}", "1.00")
    for missed, way in ways.items():
        elapsed, kind = times[f"missed {missed}"], "values" if way.replaces else way.kind
        limit = f"<= {MOST_COPIES}" if missed == max(ways) else ""
        result.add_row(f"missed {missed}", f"{elapsed:.2f}", f"{elapsed / copy:.2f}", limit, kind, f"{way.size:,}")
    return result


if __name__ == "__main__":
    main()
