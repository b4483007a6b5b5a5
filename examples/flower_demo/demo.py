"""FedCAMS against dense messages on real sockets: TLS, node authentication, four SuperNodes, five rounds each.

Every SuperNode reaches the SuperLink through its own proxy, which counts bytes. Run by `make flower-demo`; with
`--save`, it writes what it measured to `benchmarks/records/flower-wire.json`, and to `flower-wire.md`, which the
documentation shows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedcams.bench.timing import Grid
from fedcams.experiment import build
from fedcams.flower.checkpoint import read_ledger
from fedcams.recipes import merged
from fedcams.runs.environment import environment
from fedcams_app.settings import experiment
from federation import Federation, federation
from proxy import CountingProxy

NODES, ROUNDS = 4, 5
DENSE = "uplink=identity"
METHODS = (DENSE, "uplink=sign", "uplink=topk(ratio=1/64, values=bf16)", "recipe=lighter")
"""What is compared, each as one setting."""
CONFIG: dict[str, Any] = {
    "task": "digits",
    "model": "mlp(hidden=1200, layers=2)",
    "partition": "iid",
    "clients": NODES,
    "sampler": "full",
    "local": "sgd(lr=0.05, steps=10, batch=20)",
    "server": "fedams(lr=0.001, eps=1e-3)",
    "downlink": "none",
    "rounds": ROUNDS,
    "seed": 1,
}
PATIENCE = 600.0
RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "records" / "flower-wire.json"
Counts = list[tuple[int, int]]
"""(up, down) of each node."""
console = Console()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--nodes", type=int, default=NODES)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name} and {RECORD.stem}.md")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedcams-flower-") as folder:
        record = measure(Path(folder), chosen.nodes, chosen.rounds)
    show(record)
    if chosen.save:
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        RECORD.with_suffix(".md").write_text(summary(record).to_markdown() + "\n" + caption(record))


def measure(folder: Path, nodes: int = NODES, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the bytes of every node and round for each method."""
    config = {**CONFIG, "clients": nodes, "rounds": rounds}
    d = build(experiment({**config, "uplink": "sign", "data": ""})).simulation.problem.layout.d
    with federation(folder, secure=True, env={"OMP_NUM_THREADS": "1"}) as fed:
        proxies = [CountingProxy(fed.port) for _ in range(nodes)]
        try:
            for site, proxy in enumerate(proxies):
                fed.start_node(site, via=proxy.port)
            console.print(f"SuperLink with TLS and node authentication, {nodes} SuperNodes, {d:,} parameters")
            runs = {method: run(fed, proxies, method, config) for method in METHODS}
        finally:
            for proxy in proxies:
                proxy.close()
    return {"d": d, "nodes": nodes, "rounds": rounds, "environment": environment("cpu"), "methods": runs}


def run(fed: Federation, proxies: list[CountingProxy], method: str, config: dict[str, Any]) -> dict[str, Any]:
    """Run once; the bytes of a round are counted from the end of the previous round to its own end."""
    config, name = merged(config, dict([method.split("=", 1)])), "".join(c for c in method if c.isalnum())
    checkpoint, rounds = fed.folder / f"server-{name}", config["rounds"]
    started = fed.submit(
        **config, name=name, checkpoint=str(checkpoint), min_available=config["clients"], deadline=300.0
    )
    counts: list[Counts] = []
    before = None
    for round in range(rounds + 1):
        wait_for_greetings_or_round(fed, started, checkpoint, round)
        now = [proxy.counted for proxy in proxies]
        if before is not None:
            counts.append([(up - u, down - d) for (up, down), (u, d) in zip(now, before, strict=True)])
            console.print(f"  {method}: round {round} done")
        before = now
    ledger = read_ledger(checkpoint)
    return {
        "bytes": counts,
        "wire_up": [line["wire_up"] for line in ledger],
        "wire_down": [line["wire_down"] for line in ledger],
        "accepted": [len(line["accepted"]) for line in ledger],
    }


def wait_for_greetings_or_round(fed: Federation, run: str, checkpoint: Path, round: int) -> None:
    """Wait for the end of a round, or, for round 0, until the server has opened its folder for replies.

    By then, all nodes are known. Only looks at files: asking Flower takes seconds, in which the next round would begin.
    """
    end = time.monotonic() + PATIENCE
    while fed.rounds_done(checkpoint) < round if round else not (checkpoint / "replies").exists():
        if time.monotonic() > end:
            raise TimeoutError(f"round {round} did not end:\n{fed.flwr('log', run, 'here', '--show')}")
        time.sleep(0.05)


def mean_bytes(measured: dict[str, Any]) -> tuple[float, float]:
    """Return the mean bytes up and down of one node in one round."""
    flat = [pair for counts in measured["bytes"] for pair in counts]
    return sum(up for up, _ in flat) / len(flat), sum(down for _, down in flat) / len(flat)


def show(record: dict[str, Any]) -> None:
    for method, measured in record["methods"].items():
        detail = Table(title=f"{method}: kB up / down on the socket")
        detail.add_column("round", justify="right")
        for site in range(record["nodes"]):
            detail.add_column(f"node {site}", justify="right")
        for round, counts in enumerate(measured["bytes"], start=1):
            detail.add_row(str(round), *(f"{up / 1000:,.1f} / {down / 1000:,.1f}" for up, down in counts))
        console.print(detail)
    console.print(summary(record).to_rich())


def summary(record: dict[str, Any]) -> Grid:
    """Return a table of mean bytes per node and round."""
    dense = mean_bytes(record["methods"][DENSE])
    rows = []
    for method, measured in record["methods"].items():
        (up, down), ours = mean_bytes(measured), sum(measured["wire_up"]) / sum(measured["accepted"])
        fewer = f"{dense[0] / up:.1f}x", f"{sum(dense) / (up + down):.1f}x"
        rows.append((f"`{method}`", f"{up:,.0f}", f"{ours:,.0f}", f"{down:,.0f}", *fewer))
    heading = ("method", "bytes up", "reply alone", "bytes down", "fewer up", "fewer up + down")
    return Grid(f"Per node and round, {record['d']:,} parameters, including Flower's own traffic", heading, rows)


def caption(record: dict[str, Any]) -> str:
    """Return a caption that says how the numbers were measured."""
    text = f"""Bytes per node and round on the socket, including TLS and Flower's own traffic: mean over
        {record["nodes"]} nodes and {record["rounds"]} rounds, for a model of {record["d"]:,} parameters.
        *Reply alone* counts what fedcams sends. `make flower-demo`,
        [flower-wire.json](../benchmarks/records/flower-wire.json)."""
    return f"\n{textwrap.fill(' '.join(text.split()), 118, break_long_words=False, break_on_hyphens=False)}\n"


if __name__ == "__main__":
    main()
