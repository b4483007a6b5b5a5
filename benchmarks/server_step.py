"""Server steps on a CUDA device: the fused kernel against the formula over pieces, and against copying a vector.

`python benchmarks/server_step.py --save` writes `benchmarks/records/server-step-cuda.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from recording import environment, save

from fedcams.optimizers import server
from fedcams.optimizers.base import PIECE
from fedcams.registry import registered

D = 11_173_962  # ResNet-18 with ten classes
RUNS = 100
RECORD = Path(__file__).parent / "records" / "server-step-cuda.json"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name}")
    chosen = options.parse_args()
    x, delta = torch.randn(D, device="cuda"), torch.randn(D, device="cuda")
    times = {"copy": milliseconds(lambda: x.copy_(delta))}
    for name in registered("server"):
        times[f"{name}, fused"] = milliseconds(fused(name, x, delta))
        times[f"{name}, pieces"] = milliseconds(pieces(name, x, delta))
    for name, elapsed in times.items():
        print(f"{name:24} {elapsed:.4f} ms {elapsed / times['copy']:6.1f} copies")
    if chosen.save:
        device = torch.cuda.get_device_name()
        where = {"device": device, **environment()}
        save(RECORD, {"d": D, "mean of runs": RUNS, "environment": where, "milliseconds": times})


def fused(name: str, x: torch.Tensor, delta: torch.Tensor) -> Callable[[], Any]:
    optimizer = server(name)
    state = optimizer.init(x)
    return lambda: optimizer.step_(state, x, delta)


def pieces(name: str, x: torch.Tensor, delta: torch.Tensor) -> Callable[[], None]:
    optimizer = server(name)
    vectors = [x, delta, *list(optimizer.init(x)._asdict().values())[1:]]

    def run() -> None:
        for parts in zip(*(vector.split(PIECE["cuda"]) for vector in vectors), strict=True):
            optimizer.update_(1, *parts)

    return run


@torch.no_grad()
def milliseconds(work: Callable[[], Any]) -> float:
    """Mean over many runs, by the device's own clock."""
    for _ in range(5):
        work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(RUNS):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / RUNS


if __name__ == "__main__":
    main()
