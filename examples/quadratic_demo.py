"""FedCAMS on a small quadratic problem, with real messages, next to the float64 oracle; then the sizes of payloads.

Every client pulls the model towards its own point; five of twenty take part in a round. Needs the repository, whose
tests contain the oracle: `.venv/bin/python examples/quadratic_demo.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedcams import Layout, Method, encode
from fedcams.rounds import Client, ClientUpdate, Instruction, Received, Server, answer_from_bytes
from fedcams.rounds import client as client_side
from fedcams.rounds import server as server_side

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import oracle

CLIENTS, COHORT, ROUNDS, D = 20, 5, 300, 1000
LOCAL_STEPS, LOCAL_LR, LR = 5, 0.02, 0.05
RESNET18 = 11_173_962
METHODS: dict[str, tuple[str, oracle.Compress | None]] = {
    "FedAMS": ("identity", None),
    "FedCAMS, sign": ("sign", oracle.scaled_sign),
    "FedCAMS, top-k 1/16": ("topk(ratio=1/16)", partial(oracle.topk, ratio="1/16")),
}
GRADIENT = oracle.quadratic(CLIENTS, D)
START = np.full(D, 5.0)
BARS = "▁▂▃▄▅▆▇█"


def main() -> None:
    console = Console()
    cohorts = [np.random.default_rng(t).choice(CLIENTS, COHORT, replace=False).tolist() for t in range(ROUNDS)]
    best = optimum()
    summary = Table(title=f"{CLIENTS} clients, {COHORT} per round, {ROUNDS} rounds, d = {D:,}")
    for column in ("method", "distance", "oracle's", "largest difference", "bytes up"):
        summary.add_column(column, justify="left" if column == "method" else "right")
    console.print("Distance of the model from the optimum, round by round\n")
    for name, (uplink, compress) in METHODS.items():
        xs, sent = federate(uplink, cohorts)
        step = partial(oracle.fedams, lr=LR)
        expected = oracle.run(START, GRADIENT, cohorts, LOCAL_STEPS, LOCAL_LR, step, compress)
        ours, theirs = (np.array([np.linalg.norm(x - best) for x in curve]) for curve in (xs, expected))
        low, high = theirs.min(), theirs.max()
        console.print(f"  {name}")
        console.print(f"    fedcams {ours[0]:5.1f} {curve_of(ours, low, high)} {ours[-1]:.1f}")
        console.print(f"    oracle  {theirs[0]:5.1f} {curve_of(theirs, low, high)} {theirs[-1]:.1f}\n")
        apart = max(np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in zip(xs, expected, strict=True))
        summary.add_row(name, f"{ours[-1]:.4f}", f"{theirs[-1]:.4f}", f"{apart:.0e}‖x‖", f"{sent:,}")
    console.print(summary)
    console.print(
        "Compressors are discontinuous: once float32 and float64 disagree on a sign or a tie, the two runs diverge.\n"
    )
    console.print(payload_table())


def optimum() -> np.ndarray:
    """Return the point where the mean of the clients' gradients is zero; they are linear in every coordinate."""
    zero, one = (np.mean([GRADIENT(i, np.full(D, at)) for i in range(CLIENTS)], axis=0) for at in (0.0, 1.0))
    return np.asarray(-zero / (one - zero))


def federate(uplink: str, cohorts: list[list[int]]) -> tuple[list[np.ndarray], int]:
    """Return the model after each round and the bytes of all replies; the two sides exchange only bytes."""
    layout, method = Layout.flat(D), Method(server=f"fedams(lr={LR})", uplink=uplink)
    server, me = Server(method, layout), Client(method, layout)
    state = server_side.start(server, torch.from_numpy(START).float())
    xs, sent = [], 0
    for cohort in cohorts:
        instructions, state = server_side.instruct(server, state, cohort)
        answers = [client_side.answer(me, Instruction.from_bytes(i.to_bytes()), train) for i in instructions.values()]
        messages = [message.to_bytes() for message, _ in answers]
        intake = server_side.take_answers(server, state, cohort, map(answer_from_bytes, messages))
        state, concluded = server_side.conclude_(server, state, intake)
        for _, outgoing in answers:
            if outgoing is not None:
                client_side.commit(me, outgoing, concluded.accepted)
        sent += sum(map(len, messages))
        xs.append(state.x.double().numpy().copy())
    return xs, sent


def train(received: Received, instruction: Instruction, shift: Tensor | None, rate: float) -> ClientUpdate:
    """Take some steps of gradient descent on the client's own quadratic."""
    w = start = received.start.double().numpy()
    for _ in range(LOCAL_STEPS):
        w = w - LOCAL_LR * GRADIENT(instruction.client, w)
    return ClientUpdate(torch.from_numpy(w - start).float(), None, examples=1, steps=LOCAL_STEPS, loss=0.0)


def curve_of(values: np.ndarray, low: float, high: float, width: int = 56) -> str:
    """Return a line of bars between low and high, logarithmic."""
    picked = values[np.linspace(0, len(values) - 1, width).astype(int)]
    heights = np.clip(np.log(picked / low) / np.log(high / low), 0, 1) * (len(BARS) - 1)
    return "".join(BARS[round(height)] for height in heights)


def payload_table() -> Table:
    table = Table(title="Bytes of one update, here and of a ResNet-18 (Gaussian values)")
    for column in ("uplink", f"d = {D:,}", f"{RESNET18:,}", "smaller by"):
        table.add_column(column, justify="left" if column == "uplink" else "right")
    draw: Callable[[int], Tensor] = lambda d: torch.randn(d, generator=torch.Generator().manual_seed(0))  # noqa: E731
    small, large = draw(D), draw(RESNET18)
    dense = len(encode("identity", large))
    for spec in ("identity", "sign", "topk(ratio=1/64)", "topk(ratio=1/64, values=bf16)", "randk(ratio=1/64)"):
        size = len(encode(spec, large))
        table.add_row(spec, f"{len(encode(spec, small)):,}", f"{size:,}", f"{dense / size:.1f}x")
    return table


if __name__ == "__main__":
    main()
