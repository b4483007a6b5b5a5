"""`fedcams list`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedcams.errors import SpecError
from fedcams.experiment import Experiment
from fedcams.experiment.preset import presets
from fedcams.registry import Spec, kinds, params, registered
from fedcams.registry.params import nearest, show

PRESETS, EXPERIMENT = "presets", "experiment"


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND", help="presets, experiment, server, ...; by default an overview.", show_default=False
        ),
    ] = None,
) -> None:
    """Show what there is to choose from: presets, the keys of an experiment, and the pieces that spec strings name."""
    console = Console(highlight=False)
    if kind is None:
        console.print(_overview())
    elif kind == PRESETS:
        console.print(_table(["preset", "shows"], presets().items()))
    elif kind == EXPERIMENT:
        console.print(_table(["key", "default", "says"], _keys()))
    elif kind in kinds():
        console.print(_table([kind, "defaults", "does"], map(_row, registered(kind).values())))
    else:
        known = [PRESETS, EXPERIMENT, *kinds()]
        raise SpecError(f"nothing of the kind {kind!r}{nearest(kind, known)}; known: {', '.join(known)}")


def _overview() -> Table:
    names = {PRESETS: list(presets()), EXPERIMENT: list(params(Experiment))}
    names |= {kind: list(registered(kind)) for kind in kinds()}
    return _table(["kind", "names"], ((kind, ", ".join(found)) for kind, found in names.items()))


def _keys() -> Iterator[tuple[str, str, str]]:
    """What the file of an experiment may say, and `-s` change."""
    for key, (param, default) in params(Experiment).items():
        yield key, default if isinstance(default, str) else show(default), param.doc


def _row(cls: type[Spec]) -> tuple[str, str, str]:
    """Name, defaults, and the first line of its description."""
    return cls.name, ", ".join(_defaults(cls)), (cls.__doc__ or "").strip().partition("\n")[0]


def _defaults(cls: type[Spec]) -> Iterator[str]:
    for key, (_, default) in params(cls).items():
        yield (
            f"{key}=..." if default is dataclasses.MISSING else f"{key}={'none' if default is None else show(default)}"
        )


def _table(titles: list[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(*titles, box=SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*map(escape, row))
    return table
