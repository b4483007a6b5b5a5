"""In which order runs that lie in one folder are shown: that of the preset they come from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from fedcams.experiment.preset import load_preset, presets


def in_order(runs: Iterable[Path]) -> list[Path]:
    """Folders of runs by the folder they lie in; within it by the preset, and what no preset has last, by name."""
    found = []
    for parent, group in groupby(sorted(runs), key=attrgetter("parent")):
        members = list(group)
        places = _places(parent.name, {_method(run.name) for run in members})
        found += sorted(members, key=lambda run: places.get(_method(run.name), len(places)))
    return found


def _places(folder: str, methods: set[str]) -> dict[str, int]:
    """Method -> place in the preset that has the folder's name, or else in the first one that has all methods."""
    for name in presets() if folder not in presets() else [folder]:
        places: dict[str, int] = {}
        for run in load_preset(name).folders:
            places.setdefault(_method(run), len(places))
        if name == folder or methods <= places.keys():
            return places
    return {}


def _method(folder: str) -> str:
    """A run's folder name without its seed: `fedcams-sign-s2` -> `fedcams-sign`."""
    return re.sub(r"-s\d+$", "", folder)
