"""`fedcams bench gpu`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from fedcams.bench.gpu import Measured

MODELS, UPLINKS = ["resnet18", "convmixer"], ["sign", "topk(ratio=1/64)"]


def gpu(
    model: Annotated[list[str] | None, typer.Option(help="A model; by default those of the paper.")] = None,
    uplink: Annotated[list[str] | None, typer.Option(help="A compressor; by default sign and top-k 1/64.")] = None,
    engine: Annotated[str, typer.Option(help="The engine to time.")] = "graphs",
    rounds: Annotated[int, typer.Option(help="Rounds to time, after one that compiles.", min=1)] = 10,
    loop: Annotated[bool, typer.Option(help="Time the eager loop over clients as well.")] = True,
    save: Annotated[Path | None, typer.Option(help="Write the numbers as JSON.", show_default=False)] = None,
) -> None:
    """Time rounds of the paper's experiments on a CUDA device, by phase, next to the eager loop over clients."""
    from fedcams.bench.gpu import measure, where

    console = Console(highlight=False)
    done = []
    for name in model or MODELS:
        for codec in uplink or UPLINKS:
            done.append(measure(name, codec, engine, rounds, loop))
            console.print(_table(done[-1]))
    place = where()
    console.print(", ".join(f"{key}: {value}" for key, value in place.items()))
    if save is not None:
        save.write_text(json.dumps({"where": place, "rounds": [each.to_dict() for each in done]}, indent=1) + "\n")


def _table(each: Measured) -> Table:
    table = Table("", "seconds", title=f"{each.model}, {each.uplink}, {each.engine}: median of {each.rounds} rounds")
    for name, seconds in each.phases.items():
        table.add_row(name, f"{seconds:.4f}")
    table.add_row("a round", f"{each.seconds:.4f}", style="bold")
    table.add_row("the first round", f"{each.first_round:.1f}")
    if each.loop_seconds is not None:
        table.add_row("a round by the eager loop (sampled)", f"{each.loop_seconds:.2f}")
        table.add_row("ratio", f"{each.ratio:.1f}x")
    table.add_row("images a second", f"{each.images_per_second:,.0f}")
    table.add_row("TFLOP/s while training", f"{each.tflops:.0f}")
    table.add_row("device memory", f"{each.memory / 2**30:.2f} GiB")
    table.add_row("encode and aggregate", f"{each.compression:.1%}")
    return table
