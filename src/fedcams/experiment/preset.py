"""Presets: one TOML file describes one figure, with common settings and the runs that differ from them.

description = "what the figure shows"
seeds = [1, 2, 3]               # repeat every run with each seed; without it, `seed` applies
task = "cifar10"                # every key of an experiment is allowed here …

[[run]]
label = "FedCAMS"
uplink = "sign"                 # … and here, where it takes precedence

[[run]]
label = "FedCAMS light"
recipe = "light"                # sets several fields; those given here win
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedcams.errors import SpecError
from fedcams.experiment.experiment import FIRST, RETIRED, Experiment, read_toml
from fedcams.recipes import KEY as RECIPE
from fedcams.recipes import merged
from fedcams.registry import params
from fedcams.registry.fields import nearest

SHIPPED = Path(__file__).parents[1] / "presets"
KEYS = (*FIRST, RECIPE, *(key for key in params(Experiment) if key not in FIRST))
TEXTS = frozenset(key for key, (param, _) in params(Experiment).items() if param.kind == "text")


@dataclass(frozen=True)
class Preset:
    """Experiments that are shown together, each in its own folder; refuses two that would share one."""

    name: str
    description: str
    experiments: list[Experiment]

    def __post_init__(self) -> None:
        folders(self.experiments, self.name)

    @property
    def folders(self) -> dict[str, Experiment]:
        """The experiments by folder name."""
        return folders(self.experiments, self.name)

    def only(self, labels: Collection[str]) -> Preset:
        """Return the preset with only the runs that have one of these labels."""
        return dataclasses.replace(self, experiments=[each for each in self.experiments if each.label in labels])


@dataclass(frozen=True)
class Table:
    """One run as a file describes it, including the common keys; `where` names its place in errors."""

    where: str
    values: dict[str, Any]

    def experiment(self, **more: Any) -> Experiment:
        """Return the experiment, with these keys added; errors name its place in the file."""
        try:
            return Experiment.from_dict(self.values | more)
        except SpecError as error:
            raise error.within(self.where) from None


@dataclass(frozen=True)
class File:
    """The contents of a preset or sweep file."""

    name: str
    description: str
    seeds: list[dict[str, Any]]
    """The keys to add to each run for each seed: `{"seed": 1}`; one empty dict if the runs set their own."""
    runs: list[Table]


def presets() -> dict[str, str]:
    """Return name -> description of the presets that come with the package."""
    return {name: read_file(path).description for name, path in preset_files().items()}


def preset_files() -> dict[str, Path]:
    """Return name -> TOML file of the presets that come with the package."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"), key=attrgetter("stem"))}


def load_preset(source: str | Path) -> Preset:
    """Return the preset with this name, or in this TOML file; refuses unknown names, keys and values."""
    file = read_file(_find(source))
    return Preset(file.name, file.description, [run.experiment(**seed) for run in file.runs for seed in file.seeds])


def choose(
    sources: Sequence[str], labels: Sequence[str] = (), settings: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Preset]:
    """Return name -> preset with only the runs that have one of the labels, if any are given, and with keys changed.

    Presets in which no run has such a label are left out. Refuses two presets of one name and unknown labels.
    """
    found: dict[str, Preset] = {}
    for preset in map(load_preset, sources):
        if found.setdefault(preset.name, preset) is not preset:
            raise SpecError(
                f"two presets are named {preset.name!r}, and would share a folder; run them one after the other"
            )
    check_labels(labels, [experiment.label for preset in found.values() for experiment in preset.experiments])
    kept = {name: preset.only(labels) if labels else preset for name, preset in found.items()}
    return {name: overridden(preset, settings) for name, preset in kept.items() if preset.experiments}


def overridden(preset: Preset, settings: Mapping[str, str]) -> Preset:
    """Return the preset with these keys changed in every run; a value is a TOML literal, or else a string.

    `seeds` repeats every run. Runs that become equal, such as two seeds with the same `seed` given, are kept once.
    Refuses unknown keys, and `label` for runs with several labels.
    """
    values, seeds = read_settings(settings, [experiment.label for experiment in preset.experiments])
    bases = [merged(experiment.to_dict(), values) for experiment in preset.experiments]
    changed = [Experiment.from_dict(base | seed) for base in bases for seed in seeds]
    return dataclasses.replace(preset, experiments=list(dict.fromkeys(changed)))


def read_settings(settings: Mapping[str, str], labels: Collection[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the values that `-s` sets in every run, and the keys to add for each seed, as in `File.seeds`.

    Refuses unknown keys, and a `label` if the runs have several `labels`: it could not tell them apart any more.
    """
    if "label" in settings and len(set(labels)) > 1:
        raise SpecError(
            f"label={settings['label']}: cannot give {len(set(labels))} runs the same label; pick one run with --only"
        )
    _check_keys(settings, (*KEYS, "seeds"), "-s")
    values = {key: _value(key, value) for key, value in settings.items()}
    return values, _pop_seeds(values, "-s")


def check_labels(labels: Collection[str], known: Collection[str]) -> None:
    """Refuse a label that no run has, suggesting the nearest one."""
    for label in labels:
        if label not in known:
            choice = ", ".join(map(repr, dict.fromkeys(known)))
            raise SpecError(f"--only {label}: no run has this label{nearest(label, known)}; known: {choice}")


def folder_name(experiment: Experiment) -> str:
    """Return the folder of an experiment: `FedCAMS top-k 1/64` with seed 2 gives `fedcams-top-k-1-64-s2`."""
    return f"{slug(experiment.label)}-s{experiment.seed}"


def slug(label: str) -> str:
    """Return a label as part of a folder's name: `FedCAMS top-k 1/64` gives `fedcams-top-k-1-64`."""
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.") or "run"


def folders(experiments: Sequence[Experiment], where: str) -> dict[str, Experiment]:
    """Return folder name -> experiment; refuses two that would share a folder, in an error that starts with `where`."""
    named: dict[str, Experiment] = {}
    for experiment in experiments:
        other = named.setdefault(folder_name(experiment), experiment)
        if other is not experiment:
            raise SpecError(
                f"{where}: the runs {other.label!r} and {experiment.label!r} with seed {experiment.seed} would share "
                f"the folder {folder_name(experiment)!r}, which keeps only the letters a-z, digits and dots of a "
                "label; give each a label that differs in these"
            )
    return named


# -- reading -------------------------------------------------------------------------------------------------------


def read_file(path: Path, also: tuple[str, ...] = ()) -> File:
    """Return the contents of a preset file; its keys are those of an experiment, and `also` allows others."""
    values = read_toml(path)
    _check_keys(_current(values), (*KEYS, *also, "description", "seeds", "run"), f"{path.name}, top level")
    description, runs = values.pop("description", ""), values.pop("run", [{}])
    seeds = _pop_seeds(values, path.name)
    if not isinstance(description, str):
        raise SpecError(f"{path.name}: description={description!r}; description must be a string, in quotes")
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise SpecError(f"{path.name}: run={runs!r}; begin each run with a line [[run]], in two brackets")
    tables = []
    for number, run in enumerate(runs, start=1):
        where = f"{path.name}, [[run]] {number}" + (f" ({run['label']})" if "label" in run else "")
        _check_keys(_current(run), (*KEYS, *also), where)
        _check_seed(run, seeds, where)
        tables.append(Table(where, merged(values, run)))
    return File(path.stem, description, seeds, tables)


def _find(source: str | Path) -> Path:
    shipped = preset_files()
    if str(source) in shipped:
        return shipped[str(source)]
    path = Path(source)
    if path.is_dir():
        raise SpecError(
            f"{path} is a folder; name a preset or a TOML file, such as the experiment.toml of a run; `fedcams resume` "
            "and `fedcams report` take folders, and `fedcams theory check` that of one run"
        )
    if path.suffix != ".toml" and not path.is_file():
        known = ", ".join(shipped)
        raise SpecError(
            f"no preset is named {str(source)!r}{nearest(str(source), shipped)}; known: {known}; for a "
            "file of your own, give its path, ending in .toml"
        )
    return path


def _current(values: Mapping[str, Any]) -> list[str]:
    """Return the keys without those of version 0.1, so that the experiment.toml of an old run is a preset too."""
    return [key for key in values if key not in RETIRED]


def _check_keys(values: Collection[str], known: tuple[str, ...], where: str) -> None:
    for key in values:
        if key not in known:
            hint = " (a file with grids is for `fedcams sweep`)" if key == "grid" else nearest(key, known)
            raise SpecError(f"{where}: no key {key!r}{hint}; known: {', '.join(known)}")


def _pop_seeds(values: dict[str, Any], where: str) -> list[dict[str, Any]]:
    if "seeds" not in values:
        return [{}]
    seeds = values.pop("seeds")
    if not isinstance(seeds, list) or not seeds:
        raise SpecError(f"{where}: seeds={seeds!r}; give a list of one or more, as in seeds = [1, 2, 3]")
    if any(seeds.count(seed) > 1 for seed in seeds):
        raise SpecError(f"{where}: seeds={seeds!r}; give each seed once")
    _check_seed(values, found := [{"seed": seed} for seed in seeds], where)
    return found


def _check_seed(values: Mapping[str, Any], seeds: list[dict[str, Any]], where: str) -> None:
    if "seed" in values and seeds != [{}]:
        raise SpecError(f"{where}: seed={values['seed']} and seeds are both given; give only one of them")


def _value(key: str, text: str) -> Any:
    """Return what `-s` sets a key to; text may look like a number, as in `label=2026`."""
    found = _literal(text)
    return found if isinstance(found, str) or key not in TEXTS else text


def _literal(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text
