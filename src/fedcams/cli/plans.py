"""The tables and the advice that `fedcams plan` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedcams import models
from fedcams.compress import compressor
from fedcams.compress.identity import IDENTITY
from fedcams.errors import SpecError
from fedcams.layout import Layout
from fedcams.models import model as model_named
from fedcams.plan import (
    CANDIDATES,
    Contacts,
    Option,
    Plan,
    Setting,
    advise,
    expected_contacts,
    plan,
    plan_recipes,
    recommend,
    simulated_contacts,
)
from fedcams.plan.paper import ROUNDS, D, PaperRow, paper_tables
from fedcams.registry import exact
from fedcams.registry.fields import nearest
from fedcams.report.numbers import human_bytes, human_seconds
from fedcams.report.profiles import PROFILES, Profile
from fedcams.sampler import Sampler, sampler

SHAPE, CLASSES = (3, 32, 32), 10
GIB = 2.0**30
UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
"""Suffixes of a number of parameters, as in `25M`."""
MOST = 10**15
"""The most parameters that a plan takes."""
EXPLAINED = (
    "Bytes cover all clients and rounds: expected, and counted for the cohorts of seed {seed}. Memory is what the "
    "server keeps for the downlink. The bound is the largest share of the squared gap between the server's model and "
    "the client's that a delta may leave. Transfer times exclude computation."
)
RECIPES_EXPLAINED = (
    "These numbers assume random positions and signs. Real updates have structure and take about a tenth fewer "
    "bytes: a ResNet-18 on CIFAR-10 measured 75x where the plan says 67x."
)


def sampled(cohort: str) -> Sampler:
    """Return the sampler for a number of clients per round or for a spec."""
    try:
        exact(cohort)
    except SpecError:
        return sampler(cohort)
    return sampler(f"uniform(n={cohort.strip()})")


def setting(size: str, uplink: str, rounds: int, buffers: str = "identity") -> Setting:
    """Return what is sent and how often: `size` is a number of parameters or a model's spec."""
    return Setting(*_size(size), compressor(uplink), rounds, compressor(buffers))


def _size(size: str) -> tuple[int, int]:
    """Trainable coordinates and floating-point buffers."""
    fix = f"give a whole number of parameters, 1 to {MOST:.0e}, as in 25M, or a model's spec such as resnet18"
    try:
        number = exact(size[:-1]) * UNITS[size[-1].lower()] if size[-1:].lower() in UNITS else exact(size)
    except SpecError:
        if not size[:1].isalpha():
            raise SpecError(f"MODEL={size}: {fix}") from None
        made = models.build(model_named(size), SHAPE, CLASSES, seed=0)
        buffers = Layout.of_buffers(made)
        return Layout.of(made).d, 0 if buffers is None else buffers.d
    if not 1 <= number <= MOST or number.denominator != 1:
        raise SpecError(f"MODEL={size}: {fix}")
    return int(number), 0


def compare(
    setting: Setting, chosen: Sampler, clients: int, seed: int, downlinks: Sequence[str] | None
) -> tuple[list[Plan], list[Plan]]:
    """Return a plan per downlink, by expected contacts and by the contacts of one seed."""
    expected = expected_contacts(clients, chosen.expected(clients), setting.rounds)
    counted = simulated_contacts(chosen, clients, setting.rounds, seed)
    specs = downlinks or CANDIDATES
    return [plan(setting, spec, expected) for spec in specs], [plan(setting, spec, counted) for spec in specs]


def question(setting: Setting, chosen: Sampler, clients: int) -> str:
    """Return the setting of a plan in one line."""
    what = f"{setting.d:,} parameters, {setting.buffers:,} buffers"
    who = f"{chosen.spelled_out()} of {clients:,} clients, {setting.rounds:,} rounds"
    by = "" if setting.buffer_codec == IDENTITY else f", buffers {setting.buffer_codec}"
    return f"{what}; {who}; uplink {setting.uplink}{by}"


def tables(plans: Sequence[Plan], counts: Sequence[Plan], rounds: int) -> list[Table]:
    """Return three tables: bytes and memory, where the bytes go, and how long transfers take."""
    return [_costs(plans, counts), _parts(plans), _times(plans, rounds)]


def _numbers(*heading: str) -> Table:
    """Return a table whose numbers are right-aligned and never wrap; the first column wraps instead."""
    table = Table(*heading, box=SIMPLE_HEAD)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    return table


def _costs(plans: Sequence[Plan], counts: Sequence[Plan]) -> Table:
    table = _numbers("downlink", "up + down", "one seed", "memory", "bound")
    for one, counted in zip(plans, counts, strict=True):
        sizes = (human_bytes(size) for size in (one.total, counted.total, one.memory))
        table.add_row(str(one.downlink), *sizes, f"{one.bound:.3g}")
    return table


def _parts(plans: Sequence[Plan]) -> Table:
    table = _numbers("where the bytes go", "up", "down", "deltas", "catch-up", "dense")
    for one in plans:
        sizes = (one.up, one.down, one.deltas, one.catchup, one.dense)
        table.add_row(str(one.downlink), *map(human_bytes, sizes))
    return table


def _times(plans: Sequence[Plan], rounds: int) -> Table:
    table = _numbers("transfers only", *(profile.name for profile in PROFILES))
    for one in plans:
        table.add_row(str(one.downlink), *(_rough(one.seconds(profile, rounds)) for profile in PROFILES))
    return table


def _rough(seconds: float) -> str:
    """Return a duration with two digits, as precise as a plan can be."""
    for size, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"
    return human_seconds(seconds)


def advice(plans: Sequence[Plan], memory: float, bound: float) -> str:
    """Return the recommended downlink for a server with `memory` GiB, as a sentence."""
    best = recommend(plans, memory * GIB, bound)
    if best is None:
        limits = f"{human_bytes(memory * GIB)} with a bound of at most {bound:g}"
        return f"None of these downlinks fits {limits}; consider stateless."
    first = plans[0]
    fewer = f", {first.total / best.total:.1f}x fewer bytes than {first.downlink}" if best is not first else ""
    return f"Recommended: [bold]{best.downlink}[/]{fewer}, with {human_bytes(best.memory)} at the server."


def recipes(setting: Setting, contacts: Contacts, memory: float, network: Profile) -> list[str | Table]:
    """Return two tables, what every recipe costs and how long its rounds take, and the advice on a network."""
    options = plan_recipes(setting, contacts)
    found = advise(options, contacts, memory * GIB, network)
    chosen = f"Recipe: [bold]{found.option.name}[/], {found.reason}"
    return [_recipe_costs(options), _recipe_times(options), RECIPES_EXPLAINED, chosen]


def _recipe_costs(options: Sequence[Option]) -> Table:
    table = _numbers("recipe", "up", "down", "up + down", "fewer", "memory")
    for one in options:
        fewer = f"{options[0].plan.total / one.plan.total:.3g}x"
        up, down, total, memory = map(human_bytes, (one.plan.up, one.plan.down, one.plan.total, one.plan.memory))
        table.add_row(one.name, up, down, total, fewer, memory)
    return table


def _recipe_times(options: Sequence[Option]) -> Table:
    table = _numbers("transfers per round", *(profile.name for profile in PROFILES))
    for one in options:
        table.add_row(one.name, *(_rough(one.plan.seconds(profile)) for profile in PROFILES))
    return table


def network_named(name: str) -> Profile:
    """Return the network with this name; refuses an unknown one, suggesting the nearest."""
    known = {profile.name.lower(): profile for profile in PROFILES}
    if name.lower() not in known:
        names = [profile.name for profile in PROFILES]
        raise SpecError(f"--network {name}: no network has this name{nearest(name, names)}; known: {', '.join(names)}")
    return known[name.lower()]


def paper() -> list[str | Table]:
    """Return the paper's two communication tables, each after its title."""
    titled = zip(("One-way compression", "Two-way compression"), paper_tables(), strict=True)
    about = f"one client's link, {ROUNDS} rounds, d = {D:,}"
    return [part for title, rows in titled for part in (f"{title}: {about}", _paper(rows))]


def _paper(rows: Sequence[PaperRow]) -> Table:
    table = Table("uplink", "downlink", "bits", "printed", box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(row.uplink, row.downlink, f"{row.bits:.2e}".replace("e+0", "e").replace("e+", "e"), row.printed)
    return table
