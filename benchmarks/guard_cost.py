"""What the default guard costs in a round at d = 11,173,962. Run by `make bench`.

The server reads ten replies, takes their mean and makes a FedAMS step; the guard measures the ten rows, and remembers
what was usual. A round also has the training of ten clients: here the least there is, one step of a ResNet-18 on a
batch of 20. Transport and checkpoints would come on top. All are timed in turn in one process, in CPU seconds of all
threads, so that other work on the machine hardly counts, and the best of several counts.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from recording import environment, save
from rich.console import Console
from rich.table import Table

from fedcams import Layout, Method, encode
from fedcams.models import Model
from fedcams.rounds import Reply, Server
from fedcams.rounds import server as server_side
from fedcams.rounds.cohort import arrival_of, streams_up
from fedcams.rounds.measuring import norms_of, refusals
from fedcams.transforms import Facts

D, CLIENTS = 11_173_962, 10
UPLINKS = ("identity", "sign", "topk(ratio=1/64)", "topk(ratio=1/64, values=bf16)", "ternary(ratio=1/16)", "blockq")
Round = Callable[[], None]
LIMIT = 5.0
"""Percent of a round."""
RECORD = Path(__file__).parent / "records" / "guard-cost.json"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=8, help="timings of each; the best counts")
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name}")
    chosen = options.parse_args()
    training = CLIENTS * best(chosen.turns, {"step": local_step()})["step"]
    found = {uplink: best(chosen.turns, contenders(uplink)) for uplink in UPLINKS}
    Console().print(table(found, training))
    if chosen.save:
        about = {"d": D, "clients": CLIENTS, "runs": chosen.turns, "environment": environment()}
        shares = {
            "of a round": {uplink: share(times, training) for uplink, times in found.items()},
            "of the server": {uplink: share(times) for uplink, times in found.items()},
        }
        save(RECORD, {**about, "training": training, "cpu_milliseconds": found, "percent": shares, "limit": LIMIT})


def best(turns: int, rounds: dict[str, Round]) -> dict[str, float]:
    """Return the least CPU milliseconds of each; the first turn warms up."""
    found = dict.fromkeys(rounds, math.inf)
    for turn in range(turns + 1):
        for name, run in rounds.items():
            started = time.process_time()
            run()
            found[name] = min(found[name], 1000 * (time.process_time() - started) if turn else math.inf)
    return found


def contenders(uplink: str) -> dict[str, Round]:
    """The server's part of a round without the guard, and what the guard does in addition."""
    replies = replies_of(uplink)
    return {"server": server_of(uplink, replies), "guard": guard_of(uplink, replies)}


def replies_of(uplink: str) -> list[Reply]:
    """What ten clients send, the updates of nearly equal length."""
    draw, layout, codec = torch.Generator().manual_seed(0), Layout.flat(D), Method(uplink=uplink).uplink
    payloads = (encode(codec, 0.01 * torch.randn(D, generator=draw), layout, key) for key in range(CLIENTS))
    return [Reply(1, client, {"update": payload}, 1, 1, 0.5) for client, payload in enumerate(payloads)]


def server_of(uplink: str, replies: list[Reply]) -> Round:
    server = Server(Method(uplink=uplink, guard="none", server="fedams"), Layout.flat(D))
    state = server_side.start(server, torch.zeros(D))

    def run() -> None:
        intake = server_side.take_answers(server, state, range(CLIENTS), replies, in_order=True)
        _, concluded = server_side.conclude_(server, state, intake)
        assert len(concluded.accepted) == CLIENTS

    return run


def guard_of(uplink: str, replies: list[Reply]) -> Round:
    method, layout = Method(uplink=uplink), Layout.flat(D)
    streams = streams_up(method, layout, None)
    ones = (1,), (1,), (1.0,)
    arrivals = [arrival_of(reply, streams, Facts(1, 0, (reply.client,), *ones, 0.1)) for reply in replies]

    def run() -> None:
        norms: dict[int, dict[str, float]] = {}
        for arrival in arrivals:
            norms |= norms_of(arrival, streams, None)
            refused = refusals(method, arrival, norms, method.guard.bounds({}, {}), None)
            assert not refused
        assert method.guard.bounds({}, norms)
        method.guard.observe({}, 1, norms)

    return run


def local_step() -> Round:
    """One step of one client on a batch of 20."""
    torch.manual_seed(0)
    model = Model.parse("resnet18").build((3, 32, 32), 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(20, 3, 32, 32), torch.arange(20) % 10

    def run() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return run


def share(times: dict[str, float], training: float = 0.0) -> float:
    """What the guard adds to the server's work and this much training, in percent."""
    return round(100 * times["guard"] / (times["server"] + training), 2)


def table(found: dict[str, dict[str, float]], training: float) -> Table:
    shown = Table(title=f"the guard in a round of {CLIENTS} replies, d = {D:,}; limit: {LIMIT:g}%")
    for column in ("uplink", "server, ms", "guard, ms", "of the server, %", "of a round, %"):
        shown.add_column(column, justify="left" if column == "uplink" else "right")
    for uplink, times in found.items():
        shown.add_row(
            uplink,
            f"{times['server']:.1f}",
            f"{times['guard']:.1f}",
            f"{share(times):.1f}",
            f"{share(times, training):.2f}",
        )
    return shown


if __name__ == "__main__":
    main()
