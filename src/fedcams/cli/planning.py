"""`fedcams plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedcams import models
from fedcams.compress import compressor
from fedcams.errors import SpecError
from fedcams.layout import Layout
from fedcams.models import model as model_named
from fedcams.plan import CANDIDATES, Plan, Setting, expected_contacts, recommend, simulated_contacts
from fedcams.plan import plan as work_out
from fedcams.plan.paper import ROUNDS, D, PaperRow, paper_tables
from fedcams.registry import exact
from fedcams.report.profiles import PROFILES
from fedcams.report.units import human_bytes, human_seconds
from fedcams.sampler import sampler

SHAPE, CLASSES = (3, 32, 32), 10
GIB = 2.0**30


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
    memory: Annotated[float, typer.Option(help="Memory that the server has for it, in GiB.")] = 64.0,
    bound: Annotated[
        float, typer.Option(help="Recommend only deltas proven to leave at most this part of ‖x - held‖² behind.")
    ] = 0.9,
    seed: Annotated[int, typer.Option(min=0, help="Of the simulated participation.")] = 1,
    paper: Annotated[
        bool, typer.Option("--paper", help="Print the paper's two tables of communication instead.")
    ] = False,
) -> None:
    """Work out what a federation will send, before anything is trained, and which downlink to take.

    A model's spec is built for CIFAR-10. Bytes are expected under uniform sampling, and beside them counted along the
    cohorts of one seed; a sparse delta's positions are taken as uniform.
    """
    console = Console(highlight=False)
    if paper:
        for title, rows in zip(("One-way compression", "Two-way compression"), paper_tables(), strict=True):
            console.print(f"{title}: one client's link, {ROUNDS} rounds, d = {D:,}", _paper(rows))
        return
    d, buffers = _size(size)
    chosen = sampler(f"uniform(n={cohort})" if cohort.isdigit() else cohort)
    setting = Setting(d, buffers, compressor(uplink), rounds)
    expected = expected_contacts(clients, chosen.expected(clients), rounds)
    counted = simulated_contacts(chosen, clients, rounds, seed)
    specs = downlink or CANDIDATES
    plans = [work_out(setting, spec, expected) for spec in specs]
    counts = [work_out(setting, spec, counted) for spec in specs]
    what = f"{d:,} parameters, {buffers:,} buffers; {chosen.spelled_out()} of {clients} clients, {rounds} rounds"
    console.print(f"{what}; uplink {setting.uplink}")
    console.print(_costs(plans, counts), _parts(plans), _times(plans, rounds))
    console.print(EXPLAINED.format(seed=seed))
    console.print(_advice(plans, memory * GIB, bound), soft_wrap=True)


EXPLAINED = (
    "Bytes of all clients and rounds: expected, and counted along the cohorts of seed {seed}. Memory is the server's "
    "for the downlink; the bound is the part of ‖x - held‖² that a delta may leave behind. Transfers: no computation."
)


def _size(size: str) -> tuple[int, int]:
    """Trainable coordinates and floating-point buffers."""
    try:
        number = exact(size)
    except SpecError:
        made = models.build(model_named(size), SHAPE, CLASSES, seed=0)
        buffers = Layout.of_buffers(made)
        return Layout.of(made).d, 0 if buffers is None else buffers.d
    if number < 1 or number.denominator != 1:
        raise SpecError(f"MODEL={size}: give a whole number of parameters, or a model's spec such as resnet18")
    return int(number), 0


def _table(*heading: str) -> Table:
    """The first column as long as it takes, the others to the right."""
    table = Table(*heading, box=SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _costs(plans: Sequence[Plan], counts: Sequence[Plan]) -> Table:
    table = _table("downlink", "up + down", "one seed", "memory", "bound")
    for one, counted in zip(plans, counts, strict=True):
        sizes = (human_bytes(size) for size in (one.total, counted.total, one.memory))
        table.add_row(str(one.downlink), *sizes, f"{one.bound:.3g}")
    return table


def _parts(plans: Sequence[Plan]) -> Table:
    table = _table("where the bytes go", "up", "down", "deltas", "catch-up", "dense")
    for one in plans:
        sizes = (one.up, one.down, one.deltas, one.catchup, one.dense)
        table.add_row(str(one.downlink), *map(human_bytes, sizes))
    return table


def _times(plans: Sequence[Plan], rounds: int) -> Table:
    table = _table("transfers alone", *(profile.name for profile in PROFILES))
    for one in plans:
        table.add_row(str(one.downlink), *(_rough(one.seconds(profile, rounds)) for profile in PROFILES))
    return table


def _rough(seconds: float) -> str:
    """Two digits are all that a plan knows."""
    for size, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"
    return human_seconds(seconds)


def _advice(plans: Sequence[Plan], memory: float, bound: float) -> str:
    best = recommend(plans, memory, bound)
    if best is None:
        return (
            f"No downlink among these fits {human_bytes(memory)} with a bound of at most {bound:g}; look at stateless."
        )
    first = plans[0]
    fewer = f", {first.total / best.total:.1f}x fewer bytes than {first.downlink}" if best is not first else ""
    return f"Recommended: [bold]{best.downlink}[/]{fewer}, with {human_bytes(best.memory)} at the server."


def _paper(rows: Sequence[PaperRow]) -> Table:
    table = Table("uplink", "downlink", "bits", "printed", box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(row.uplink, row.downlink, f"{row.bits:.2e}".replace("e+0", "e").replace("e+", "e"), row.printed)
    return table
