"""What a federation will send, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedcams import models
from fedcams.compress import compressor
from fedcams.errors import SpecError
from fedcams.layout import Layout
from fedcams.models import model as model_named
from fedcams.plan import CANDIDATES, Plan, Setting, expected_contacts, plan, recommend, simulated_contacts
from fedcams.plan.paper import ROUNDS, D, PaperRow, paper_tables
from fedcams.registry import exact
from fedcams.report.profiles import PROFILES
from fedcams.report.units import human_bytes, human_seconds
from fedcams.sampler import Sampler, sampler

SHAPE, CLASSES = (3, 32, 32), 10
GIB = 2.0**30
MOST = 10**15
"""Parameters; beyond it bytes are no numbers to compare any more."""
EXPLAINED = (
    "Bytes of all clients and rounds: expected, and counted along the cohorts of seed {seed}. Memory is the server's "
    "for the downlink; the bound is the part of ‖x - held‖² that a delta may leave behind. Transfers: no computation."
)


def sampled(cohort: str) -> Sampler:
    """Who takes part: a number of clients, or a sampler's spec."""
    try:
        exact(cohort)
    except SpecError:
        return sampler(cohort)
    return sampler(f"uniform(n={cohort.strip()})")


def setting(size: str, uplink: str, rounds: int) -> Setting:
    """What is sent, and how often."""
    d, buffers = _size(size)
    return Setting(d, buffers, compressor(uplink), rounds)


def _size(size: str) -> tuple[int, int]:
    """Trainable coordinates and floating-point buffers."""
    try:
        number = exact(size)
    except SpecError:
        made = models.build(model_named(size), SHAPE, CLASSES, seed=0)
        buffers = Layout.of_buffers(made)
        return Layout.of(made).d, 0 if buffers is None else buffers.d
    if not 1 <= number <= MOST or number.denominator != 1:
        fix = f"give a whole number of parameters, 1 to {MOST:.0e}, or a model's spec such as resnet18"
        raise SpecError(f"MODEL={size}: {fix}")
    return int(number), 0


def compare(
    setting: Setting, chosen: Sampler, clients: int, seed: int, downlinks: Sequence[str] | None
) -> tuple[list[Plan], list[Plan]]:
    """A plan for each downlink: by expected contacts, and by those of one seed."""
    expected = expected_contacts(clients, chosen.expected(clients), setting.rounds)
    counted = simulated_contacts(chosen, clients, setting.rounds, seed)
    specs = downlinks or CANDIDATES
    return [plan(setting, spec, expected) for spec in specs], [plan(setting, spec, counted) for spec in specs]


def question(setting: Setting, chosen: Sampler, clients: int) -> str:
    """What is worked out, in a line."""
    what = f"{setting.d:,} parameters, {setting.buffers:,} buffers"
    who = f"{chosen.spelled_out()} of {clients:,} clients, {setting.rounds:,} rounds"
    return f"{what}; {who}; uplink {setting.uplink}"


def tables(plans: Sequence[Plan], counts: Sequence[Plan], rounds: int) -> list[Table]:
    """Bytes and memory, where the bytes go, and how long they take."""
    return [_costs(plans, counts), _parts(plans), _times(plans, rounds)]


def _table(*heading: str) -> Table:
    """Numbers to the right and whole, however narrow it is; what they are of wraps instead."""
    table = Table(*heading, box=SIMPLE_HEAD)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
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


def advice(plans: Sequence[Plan], memory: float, bound: float) -> str:
    """Which downlink to take where the server has so many GiB."""
    best = recommend(plans, memory * GIB, bound)
    if best is None:
        limits = f"{human_bytes(memory * GIB)} with a bound of at most {bound:g}"
        return f"No downlink among these fits {limits}; look at stateless."
    first = plans[0]
    fewer = f", {first.total / best.total:.1f}x fewer bytes than {first.downlink}" if best is not first else ""
    return f"Recommended: [bold]{best.downlink}[/]{fewer}, with {human_bytes(best.memory)} at the server."


def paper() -> list[str | Table]:
    """The paper's two tables of communication, each below its title."""
    titled = zip(("One-way compression", "Two-way compression"), paper_tables(), strict=True)
    about = f"one client's link, {ROUNDS} rounds, d = {D:,}"
    return [part for title, rows in titled for part in (f"{title}: {about}", _paper(rows))]


def _paper(rows: Sequence[PaperRow]) -> Table:
    table = Table("uplink", "downlink", "bits", "printed", box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(row.uplink, row.downlink, f"{row.bits:.2e}".replace("e+0", "e").replace("e+", "e"), row.printed)
    return table
