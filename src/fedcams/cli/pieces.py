"""What there is to choose from, as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedcams.errors import SpecError
from fedcams.experiment import Experiment
from fedcams.experiment.preset import presets
from fedcams.registry import Spec, kinds, params, registered
from fedcams.registry.params import nearest, show

PRESETS, EXPERIMENT = "presets", "experiment"


def pieces(kind: str | None) -> Table:
    """All of one kind; of none, an overview."""
    if kind is None:
        return _overview()
    if kind == PRESETS:
        return _table(["preset", "shows"], presets().items())
    if kind == EXPERIMENT:
        return _table(["key", "default", "says"], _keys())
    if kind in kinds():
        return _table([kind, "defaults", "does"], map(_row, registered(kind).values()))
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
