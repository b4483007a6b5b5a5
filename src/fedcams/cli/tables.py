"""The tables that `fedcams list` and `bench gpu` print."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

import fedcams.trackers  # noqa: F401  (registers what `list` shows)
from fedcams.errors import SpecError
from fedcams.experiment import Experiment
from fedcams.experiment.preset import presets
from fedcams.recipes import KEY, RECIPES, Recipe
from fedcams.registry import Spec, kinds, params, registered
from fedcams.registry.fields import nearest, show

if TYPE_CHECKING:
    from fedcams.bench.gpu import Measured

PRESETS, RECIPE_LIST, EXPERIMENT = "presets", "recipes", "experiment"


# -- fedcams list ------------------------------------------------------------------------------------------------


def pieces(kind: str | None) -> Table:
    """Return a table of everything of one kind, or an overview of all kinds for None; refuse an unknown kind."""
    if kind is None:
        return _overview()
    if kind == PRESETS:
        return _listed(["preset", "compares"], presets().items())
    if kind == RECIPE_LIST:
        return _listed(["recipe", "sets", "meaning and measured cost"], map(_recipe, RECIPES.values()))
    if kind == EXPERIMENT:
        return _listed(["key", "default", "meaning"], _keys())
    if kind in kinds():
        return _listed([kind, "defaults", "meaning"], map(_row, registered(kind).values()))
    known = known_kinds()
    raise SpecError(f"no kind is named {kind!r}{nearest(kind, known)}; known: {', '.join(known)}")


def known_kinds() -> list[str]:
    """Return every kind that can be listed."""
    return [PRESETS, RECIPE_LIST, EXPERIMENT, *kinds()]


def _overview() -> Table:
    names = {PRESETS: list(presets()), RECIPE_LIST: list(RECIPES), EXPERIMENT: [*params(Experiment), KEY]}
    names |= {kind: list(registered(kind)) for kind in kinds()}
    return _listed(["kind", "names"], ((kind, ", ".join(found)) for kind, found in names.items()))


def _keys() -> Iterator[tuple[str, str, str]]:
    """Yield the keys of an experiment file, which `-s` can change."""
    for key, (param, default) in params(Experiment).items():
        yield key, default if isinstance(default, str) else show(default), param.doc
    yield KEY, "none", f"sets several keys at once: {', '.join(RECIPES)}; see `fedcams list recipes`"


def _recipe(recipe: Recipe) -> tuple[str, str, str]:
    """Name, fields and what is known of it."""
    fields = "\n".join(f"{key} = {value}" for key, value in recipe.fields.items())
    return recipe.name, fields, f"{recipe.doc} Measured: {recipe.cost}."


def _row(cls: type[Spec]) -> tuple[str, str, str]:
    """Return the name, the defaults and the first line of the description."""
    return cls.name, ", ".join(_defaults(cls)), (cls.__doc__ or "").strip().partition("\n")[0]


def _defaults(cls: type[Spec]) -> Iterator[str]:
    for key, (_, default) in params(cls).items():
        yield (
            f"{key}=..." if default is dataclasses.MISSING else f"{key}={'none' if default is None else show(default)}"
        )


def _listed(titles: list[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(*titles, box=SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*map(escape, row))
    return table


# -- fedcams bench gpu -------------------------------------------------------------------------------------------


def gpu_table(measured: Measured) -> Table:
    """Return the phases of a round and what follows from them."""
    table = Table(
        "",
        "seconds",
        title=f"{measured.model}, {measured.uplink}, {measured.engine}: median of {measured.rounds} rounds",
    )
    for name, seconds in measured.phases.items():
        table.add_row(name, f"{seconds:.4f}")
    table.add_row("a round", f"{measured.seconds:.4f}", style="bold")
    table.add_row("the first round", f"{measured.first_round:.1f}")
    if measured.loop_seconds is not None:
        table.add_row("a round with the eager loop (sampled)", f"{measured.loop_seconds:.2f}")
        table.add_row("ratio", f"{measured.ratio:.1f}x")
    table.add_row("images per second", f"{measured.images_per_second:,.0f}")
    table.add_row("TFLOP/s while training", f"{measured.tflops:.0f}")
    table.add_row("device memory", f"{measured.memory / 2**30:.2f} GiB")
    table.add_row("encode and aggregate", f"{measured.compression:.1%}")
    return table
