"""`fedcams bench`: how fast this machine simulates."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from fedcams.cli.benching_gpu import gpu

bench = typer.Typer(invoke_without_command=True)
bench.command()(gpu)


@bench.callback()
def rounds(
    context: typer.Context,
    turns: Annotated[int, typer.Option(min=1, help="Timings of each contender; the best counts.")] = 5,
) -> None:
    """Time rounds on the digits against the same rounds written by hand in PyTorch, side by side on the CPU.

    100 clients, 10 a round, 3 epochs, batches of 20; takes about a minute.
    """
    if context.invoked_subcommand is not None:
        return
    from fedcams.bench.rounds import MODELS, PARTITIONS, UPLINKS, measure, share
    from fedcams.bench.tables import shares, speed

    console = Console()
    cases = []
    for model in MODELS:
        for partition in PARTITIONS:
            with console.status(f"timing {model} on {partition}"):
                cases.append(measure(model, partition, turns))
    console.print(speed(cases).to_rich())
    with console.status("timing a million parameters"):
        found = [share(uplink, turns) for uplink in UPLINKS]
    console.print(shares(found).to_rich())
