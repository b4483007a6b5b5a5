"""What the shell offers when Tab is pressed: presets, labels, kinds and the names of registered pieces."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

SHIPPED = Path(__file__).parents[1] / "presets"
Complete = Callable[[str], list[str]]


def preset_names(incomplete: str) -> list[str]:
    """Return the presets, and the TOML files in this folder, that begin like this."""
    shipped = sorted(path.stem for path in SHIPPED.glob("*.toml"))
    own = sorted(path.name for path in Path().glob("*.toml"))
    return [name for name in (*shipped, *own) if _fits(name, incomplete)]


def labels(context: typer.Context, incomplete: str) -> list[str]:
    """Return the labels of the presets or the file that are already typed; none of those that cannot be read."""
    given = (*(context.params.get("presets") or ()), context.params.get("file"), *context.args)  # click chooses where
    found = dict.fromkeys(label for source in given if source for label in _labels(str(source)))
    return [label for label in found if _fits(label, incomplete)]


def _labels(source: str) -> list[str]:
    shipped = SHIPPED / f"{source}.toml"
    try:
        values: dict[str, Any] = tomllib.loads((shipped if shipped.is_file() else Path(source)).read_text("utf-8-sig"))
        return [str({**values, **run}.get("label", "run")) for run in values.get("run", [{}])]
    except (OSError, ValueError, TypeError):
        return []


def kind_names(incomplete: str) -> list[str]:
    """Return what `fedcams list` can list."""
    from fedcams.cli.tables import known_kinds

    return [kind for kind in known_kinds() if _fits(kind, incomplete)]


def piece_names(kind: str) -> Complete:
    """Return a function that offers the names of everything registered under a kind."""

    def names(incomplete: str) -> list[str]:
        from fedcams.experiment import Experiment  # noqa: F401  (these register all pieces)
        from fedcams.registry import registered

        return [name for name in registered(kind) if _fits(name, incomplete)]

    return names


def _fits(name: str, incomplete: str) -> bool:
    return name.lower().startswith(incomplete.lower())
