"""`fedcams list`, `plan` and `bench`: what is available, what a federation will send, and how fast rounds run here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedcams.cli.completion import kind_names, piece_names

COMPRESSORS = piece_names("compressor")
GPU_MODELS, GPU_UPLINKS = ["resnet18", "convmixer"], ["sign", "topk(ratio=1/64)"]


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            autocompletion=kind_names,
            help="presets, recipes, experiment, server, ...; default: an overview.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List presets, recipes, the keys of an experiment, and the pieces that a spec can name."""
    from fedcams.cli.tables import pieces

    Console(highlight=False).print(pieces(kind))


def not_negative(value: float) -> float:
    """Return the value; refuse one that is negative or not a number."""
    if not value >= 0:
        raise typer.BadParameter(f"{value} is out of range; give 0 or more.")
    return value


def plan(
    size: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=piece_names("model"),
            help="Number of parameters, such as 11173962 or 25M, or a model's spec.",
        ),
    ] = "resnet18",
    clients: Annotated[int, typer.Option(min=1, help="Number of clients.")] = 100,
    cohort: Annotated[
        str | None, typer.Option(help="Clients per round, or a sampler's spec; default: 10, or all if there are fewer.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds.")] = 500,
    uplink: Annotated[str, typer.Option(autocompletion=COMPRESSORS, help="Compressor for the updates.")] = "sign",
    buffers: Annotated[
        str, typer.Option(autocompletion=COMPRESSORS, help="Compressor for batch-norm statistics.")
    ] = "identity",
    downlink: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            autocompletion=piece_names("downlink"),
            help="A downlink to compare; repeat for several; default: a set of seven.",
        ),
    ] = None,
    memory: Annotated[
        float, typer.Option(callback=not_negative, help="Server memory available for the downlink, in GiB.")
    ] = 64.0,
    bound: Annotated[
        float,
        typer.Option(
            callback=not_negative,
            help="Recommend only downlinks proven to leave at most this share of the squared gap between the models.",
        ),
    ] = 0.9,
    network: Annotated[str, typer.Option(help="The network to recommend a recipe for.")] = "4G",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulated participation.")] = 1,
    paper: Annotated[bool, typer.Option("--paper", help="Print the paper's two communication tables instead.")] = False,
) -> None:
    """Compute what a federation will send, without training, and recommend a downlink and a recipe.

    A model given by its spec is built for CIFAR-10. The plan assumes that positions in sparse deltas are uniform.

    Bytes are shown twice: the expected number under uniform sampling, and the count for the cohorts of one seed.
    """
    from fedcams.cli import plans
    from fedcams.plan import expected_contacts

    console = Console(highlight=False)
    if paper:
        console.print(*plans.paper())
        return
    chosen, setting = plans.sampled(cohort or str(min(10, clients))), plans.setting(size, uplink, rounds, buffers)
    link = plans.network_named(network)
    found, counted = plans.compare(setting, chosen, clients, seed, downlink)
    console.print(plans.question(setting, chosen, clients), soft_wrap=True)
    console.print(*plans.tables(found, counted, rounds))
    console.print(plans.EXPLAINED.format(seed=seed))
    console.print(plans.advice(found, memory, bound), soft_wrap=True)
    if downlink is None:
        contacts = expected_contacts(clients, chosen.expected(clients), rounds)
        for part in plans.recipes(setting, contacts, memory, link):
            console.print(part, soft_wrap=isinstance(part, str))


bench = typer.Typer(invoke_without_command=True)


@bench.callback()
def rounds(
    context: typer.Context,
    turns: Annotated[int, typer.Option(min=1, help="How often to time each engine and the loop; the best counts.")] = 5,
) -> None:
    """Time rounds on digits on the CPU, alternating with the same rounds written by hand in PyTorch.

    100 clients, 10 per round, 3 epochs, batches of 20. Takes about a minute.
    """
    if context.invoked_subcommand is not None:
        return
    from fedcams.bench.rounds import MODELS, PARTITIONS, UPLINKS, measure, share, shares, speed

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


@bench.command()
def gpu(
    model: Annotated[list[str] | None, typer.Option(help="A model; default: those of the paper.")] = None,
    uplink: Annotated[list[str] | None, typer.Option(help="A compressor; default: sign and top-k 1/64.")] = None,
    engine: Annotated[str, typer.Option(help="The engine to time.")] = "graphs",
    rounds: Annotated[int, typer.Option(help="Rounds to time, after a first one that compiles.", min=1)] = 10,
    loop: Annotated[bool, typer.Option(help="Also time the eager loop over clients.")] = True,
    save: Annotated[Path | None, typer.Option(help="Write the numbers to a JSON file.", show_default=False)] = None,
) -> None:
    """Time rounds of the paper's experiments on a CUDA device, phase by phase, next to the eager loop over clients."""
    from fedcams.bench.gpu import measure, where
    from fedcams.cli.tables import gpu_table

    console = Console(highlight=False)
    done = []
    for name in model or GPU_MODELS:
        for codec in uplink or GPU_UPLINKS:
            done.append(measure(name, codec, engine, rounds, loop))
            console.print(gpu_table(done[-1]))
    place = where()
    console.print(", ".join(f"{key}: {value}" for key, value in place.items()))
    if save is not None:
        save.write_text(json.dumps({"where": place, "rounds": [each.to_dict() for each in done]}, indent=1) + "\n")
