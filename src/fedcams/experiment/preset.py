"""Presets: one TOML file is one figure, a base and the runs that differ from it.

description = "what the figure shows"
seeds = [1, 2, 3]               # every run with each of them; without it, `seed` counts
task = "cifar10"                # every key of an experiment may stand here ...

[[run]]
label = "FedCAMS"
uplink = "sign"                 # ... and here, where it wins
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from fedcams.errors import SpecError
from fedcams.experiment.experiment import Experiment, read_toml
from fedcams.registry import params
from fedcams.registry.fields import nearest

SHIPPED = Path(__file__).parents[1] / "presets"
KEYS = tuple(params(Experiment))


@dataclass(frozen=True)
class Preset:
    """Experiments that are shown together, each with a folder name of its own."""

    name: str
    description: str
    experiments: list[Experiment]

    def __post_init__(self) -> None:
        folders(self.experiments, self.name)

    @property
    def folders(self) -> dict[str, Experiment]:
        """Folder name -> experiment."""
        return folders(self.experiments, self.name)


@dataclass(frozen=True)
class Table:
    """One run as a file describes it, the base's keys included."""

    where: str
    values: dict[str, Any]

    def experiment(self, **more: Any) -> Experiment:
        """The experiment; errors say where it stands."""
        try:
            return Experiment.from_dict(self.values | more)
        except SpecError as error:
            raise error.within(self.where) from None


@dataclass(frozen=True)
class File:
    """A preset or a sweep as it is written."""

    name: str
    description: str
    seeds: list[dict[str, Any]]
    """What to add to a run for each seed: `{"seed": 1}`; one empty dict when the runs say it themselves."""
    runs: list[Table]


def presets() -> dict[str, str]:
    """Name -> description of those that come with the package."""
    return {path.stem: read_file(path).description for path in sorted(SHIPPED.glob("*.toml"), key=attrgetter("stem"))}


def load_preset(source: str | Path) -> Preset:
    """The preset of that name, or in that TOML file."""
    file = read_file(_find(source))
    return Preset(file.name, file.description, [run.experiment(**seed) for run in file.runs for seed in file.seeds])


def overridden(preset: Preset, settings: Mapping[str, str]) -> Preset:
    """Every run with these keys changed; a value is a TOML literal or, where it is none, a string.

    `seeds` repeats every run. Runs that become equal, such as two seeds with the same `seed` given, are kept once.
    """
    if "label" in settings:
        raise SpecError("label cannot be set for all runs at once, since it tells them apart; change it in the file")
    _check_keys(settings, (*KEYS, "seeds"), "-s")
    values = {key: _literal(value) for key, value in settings.items()}
    seeds = _pop_seeds(values, "-s")
    bases = [experiment.to_dict() | values for experiment in preset.experiments]
    changed = [Experiment.from_dict(base | seed) for base in bases for seed in seeds]
    return dataclasses.replace(preset, experiments=list(dict.fromkeys(changed)))


def folder_name(experiment: Experiment) -> str:
    """`FedCAMS top-k 1/64` with seed 2 -> `fedcams-top-k-1-64-s2`."""
    slug = re.sub(r"[^a-z0-9.]+", "-", experiment.label.lower()).strip("-.")
    return f"{slug or 'run'}-s{experiment.seed}"


def folders(experiments: Sequence[Experiment], where: str) -> dict[str, Experiment]:
    """Folder name -> experiment; two that would share a folder are refused."""
    named: dict[str, Experiment] = {}
    for experiment in experiments:
        other = named.setdefault(folder_name(experiment), experiment)
        if other is not experiment:
            raise SpecError(
                f"{where}: the runs {other.label!r} and {experiment.label!r} with seed {experiment.seed} would share "
                f"the folder {folder_name(experiment)!r}; give each another label"
            )
    return named


# -- reading -------------------------------------------------------------------------------------------------------


def read_file(path: Path, also: tuple[str, ...] = ()) -> File:
    """A file's tables, whose keys are those of an experiment and what is `also` allowed."""
    values = read_toml(path)
    _check_keys(values, (*KEYS, *also, "description", "seeds", "run"), f"{path.name}, top level")
    description, runs = values.pop("description", ""), values.pop("run", [{}])
    seeds = _pop_seeds(values, path.name)
    if not isinstance(description, str):
        raise SpecError(f"{path.name}: description={description!r}; description must be a string, in quotes")
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise SpecError(f"{path.name}: run={runs!r}; begin each run with a line [[run]], in two brackets")
    tables = []
    for number, run in enumerate(runs, start=1):
        where = f"{path.name}, [[run]] {number}" + (f" ({run['label']})" if "label" in run else "")
        _check_keys(run, (*KEYS, *also), where)
        _check_seed(run, seeds, where)
        tables.append(Table(where, values | run))
    return File(path.stem, description, seeds, tables)


def _find(source: str | Path) -> Path:
    shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}
    if str(source) in shipped:
        return shipped[str(source)]
    path = Path(source)
    if path.suffix != ".toml" and not path.is_file():
        known = ", ".join(shipped)
        raise SpecError(
            f"no preset is named {str(source)!r}{nearest(str(source), shipped)}; known: {known}; a file "
            "of your own is named with its ending .toml"
        )
    return path


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
    _check_seed(values, found := [{"seed": seed} for seed in seeds], where)
    return found


def _check_seed(values: Mapping[str, Any], seeds: list[dict[str, Any]], where: str) -> None:
    if "seed" in values and seeds != [{}]:
        raise SpecError(f"{where}: seed={values['seed']} beside the seeds of all runs; give one of them")


def _literal(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text
