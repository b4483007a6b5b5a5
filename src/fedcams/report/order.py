"""The order of the runs in a folder: that of the preset from which they come."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from fedcams.experiment.preset import preset_files, read_file, slug


def in_order(runs: Iterable[Path]) -> list[Path]:
    """Sort folders of runs by the folder they are in, then by their place in the preset; unknown ones last, by name."""
    found = []
    for parent, group in groupby(sorted(runs), key=attrgetter("parent")):
        members = list(group)
        places = _places(parent.name, {_method(run.name) for run in members})
        found += sorted(members, key=lambda run: places.get(_method(run.name), len(places)))
    return found


def _places(folder: str, methods: set[str]) -> dict[str, int]:
    """Return method -> its place in the preset named like the folder, or in the first preset that has all methods."""
    names = preset_files()
    for name in names if folder not in names else [folder]:
        places = _preset_places(name)
        if name == folder or methods <= places.keys():
            return places
    return {}


@functools.cache  # reading all presets takes longer than reading a few runs
def _preset_places(name: str) -> dict[str, int]:
    places: dict[str, int] = {}
    for run in read_file(preset_files()[name]).runs:
        places.setdefault(slug(run.values["label"]), len(places))
    return places


def _method(folder: str) -> str:
    """Return the folder's name without the seed: `fedcams-sign-s2` -> `fedcams-sign`."""
    return re.sub(r"-s\d+$", "", folder)
