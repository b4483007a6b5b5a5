"""`fedcams plan`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def not_negative(value: float) -> float:
    """Refuses what is below zero or not a number."""
    if not value >= 0:
        raise typer.BadParameter(f"{value} is not 0 or more.")
    return value


def plan(
    size: Annotated[
        str, typer.Argument(metavar="MODEL", help="How many parameters, such as 11173962, or a model's spec.")
    ] = "resnet18",
    clients: Annotated[int, typer.Option(min=1, help="How many clients there are.")] = 100,
    cohort: Annotated[str, typer.Option(help="Clients in a round, or a sampler's spec.")] = "10",
    rounds: Annotated[int, typer.Option(min=1, help="How many rounds.")] = 500,
    uplink: Annotated[str, typer.Option(help="How updates travel.")] = "sign",
    downlink: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="A downlink to look at; several times for several, by default seven."),
    ] = None,
    memory: Annotated[
        float, typer.Option(callback=not_negative, help="Memory that the server has for it, in GiB.")
    ] = 64.0,
    bound: Annotated[
        float,
        typer.Option(
            callback=not_negative, help="Recommend only deltas proven to leave at most this part of ‖x - held‖² behind."
        ),
    ] = 0.9,
    seed: Annotated[int, typer.Option(min=0, help="Of the simulated participation.")] = 1,
    paper: Annotated[
        bool, typer.Option("--paper", help="Print the paper's two tables of communication instead.")
    ] = False,
) -> None:
    """Work out what a federation will send, before anything is trained, and which downlink to take.

    A model's spec is built for CIFAR-10; a sparse delta's positions are taken as uniform.

    Bytes are expected under uniform sampling, and beside them counted along the cohorts of one seed.
    """
    from fedcams.cli import plans

    console = Console(highlight=False)
    if paper:
        console.print(*plans.paper())
        return
    chosen, setting = plans.sampled(cohort), plans.setting(size, uplink, rounds)
    found, counted = plans.compare(setting, chosen, clients, seed, downlink)
    console.print(plans.question(setting, chosen, clients), soft_wrap=True)
    console.print(*plans.tables(found, counted, rounds))
    console.print(plans.EXPLAINED.format(seed=seed))
    console.print(plans.advice(found, memory, bound), soft_wrap=True)
