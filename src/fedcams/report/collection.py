"""From paths to methods: find runs, read them, group the seeds of one method, and give each group a look."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedcams.errors import FedcamsError, UnknownName
from fedcams.experiment import Experiment
from fedcams.recipes import RECIPES
from fedcams.report.order import in_order
from fedcams.rounds.alarm import Alarm
from fedcams.runs import Run, RunError, is_run, read_run
from fedcams.runs.folder import ENVIRONMENT, EXPERIMENT, ROUNDS, THEORY, TIMINGS, runs_below
from fedcams.simulation.record import DEFAULTS, FIELDS

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8250df", "#807840")
"""The colours of Okabe and Ito, which colour-blind readers can tell apart. Yellow and black, which are invisible on
white or black, are left out; a violet and an olive that differ from the others are added."""
DASHES = ("solid", "dash", "dot", "dashdot")
PATTERNS = ("", "/", "x", ".")
ASIDE = ("seed", "probes", "evaluate_every", "theory_every")
"""Keys in which the runs of one method may differ: probes, evaluations and measurements change nothing."""

NUMBERS = frozenset({int, float, bool, type(None)})
"""What JSON makes of the numbers in a record, and of those that were not measured."""
KINDS = {"cohort": frozenset({list}), "refused": frozenset({dict})}
"""The fields of a record that are not numbers."""
COUNTED = frozenset(name for name, default in DEFAULTS.items() if isinstance(default, int | float))
"""The fields that every record has as a finite number, such as bytes; others may not have been measured."""
SPLIT = ("wire_down_deltas", "wire_down_catchup", "wire_down_dense")
"""The parts of the bytes down: a record has all of them, or none if an older version wrote it."""


@dataclass(frozen=True)
class Look:
    """How a method is drawn in every chart; after the last colour they repeat with another dash and hatch."""

    colour: str
    dash: str = "solid"
    pattern: str = ""

    def faint(self, opacity: float) -> str:
        """Return the colour as CSS with an opacity between 0 and 1."""
        red, green, blue = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red},{green},{blue},{opacity})"


def look(index: int) -> Look:
    """Return the look of the method at a place in the collection."""
    turn = index // len(COLOURS) % len(DASHES)
    return Look(COLOURS[index % len(COLOURS)], DASHES[turn], PATTERNS[turn])


@dataclass(frozen=True)
class Method:
    """The runs of one experiment with different seeds; they share a colour and a row of the table."""

    label: str
    """Unique within a collection."""
    runs: list[Run]
    """By ascending seed."""

    @property
    def experiment(self) -> Experiment:
        """The experiment, with the seed of the first run."""
        return self.runs[0].experiment

    @property
    def recipe(self) -> str | None:
        """The name of the recipe whose compression settings this is, whatever the average; None if there is none."""
        settings = self.experiment.to_dict()
        found = (name for name, fields in _recipe_fields().items() if fields.items() <= settings.items())
        return next(found, None)

    @property
    def unfinished(self) -> list[str]:
        """A note for each run that has fewer rounds than its experiment."""
        due = self.experiment.rounds
        return [
            f"{self.label}, seed {run.experiment.seed}: {run.records[-1].round} of {due} rounds"
            for run in self.runs
            if run.records[-1].round < due and not run.finished
        ]

    @property
    def refusals(self) -> list[str]:
        """A note for each run in which updates were refused: how many, of how many clients, and the last reason."""
        return [f"{self.label}, seed {run.experiment.seed}: {note}" for run in self.runs if (note := run.refusals)]

    @property
    def epsilon(self) -> float | None:
        """The largest ε that a run has spent; None without privacy."""
        spent = [record.get("epsilon") for run in self.runs for record in run.records[-1:]]
        return None if not self.experiment.privacy.active or None in spent else float(max(spent))

    @property
    def private(self) -> str | None:
        """The note on what each run has spent, and that this report is not covered; None without privacy."""
        if (spent := self.epsilon) is None:
            return None
        claim = f"the models of each run together spend ε = {spent:.4g} with {self.experiment.privacy}"
        local = [record.get("local_epsilon") for run in self.runs for record in run.records[-1:]]
        if None not in local:
            claim += f", and what the server sees of one client spends ε = {max(local):.4g}"
        return f"{self.label}: {claim}; losses, norms, counts and cohorts are not covered: keep this report private"

    @property
    def on_floor(self) -> str | None:
        """The note that an adaptive server never adapted, of the first seed that says so; None if all adapted."""
        notes = (run.on_floor for run in self.runs)
        return next((f"{self.label}: {note}" for note in notes if note), None)

    @functools.cached_property
    def exploded(self) -> list[str]:
        """A note for each run whose training loss or updates exploded."""
        found = []
        for run in self.runs:
            alarm = Alarm()
            said = map(alarm.hear, *map(run.recorded, ("round", "train_loss", "delta_norm")))
            found += [f"{self.label}, seed {run.experiment.seed}, {line}" for line in said if line]
        return found


@dataclass(frozen=True)
class Collection:
    """The runs that a report compares."""

    methods: list[Method]
    empty: list[Path]
    """Runs without any round yet."""
    looks: list[Look]
    """How each method is drawn, in every chart."""

    @property
    def runs(self) -> list[Run]:
        """All runs, method by method."""
        return [run for method in self.methods for run in method.runs]

    @property
    def cautions(self) -> tuple[list[str], ...]:
        """Notes on private, unfinished and exploding runs, and on refused updates: one list for each of these."""
        return (
            [f"Private: {note}" for method in self.methods if (note := method.private)],
            [f"Unfinished: {note}" for method in self.methods for note in method.unfinished],
            [f"Exploding: {note}" for method in self.methods for note in method.exploded],
            [f"Refused: {note}" for method in self.methods for note in method.refusals],
        )


def collect(paths: Sequence[Path]) -> Collection:
    """Read runs and group those that differ only in the seed.

    Arguments:
        paths: folders of runs, or folders that hold runs; those in one folder come in the order of their preset.

    Returns:
        The methods, in the order of `paths`.

    Raises:
        RunError: for a path without runs, a damaged run, and a named run that has no round yet.

    Examples:
        >>> from pathlib import Path
        >>> from fedcams.experiment import Experiment
        >>> from fedcams.report import collect
        >>> from fedcams.runs import run
        >>> tiny = Experiment(task="quadratic", model="point", clients=2, sampler="full", rounds=1)
        >>> finished = run(tiny, Path("collected"))
        >>> [method.label for method in collect([Path("collected")]).methods]
        ['run']
    """
    if not paths:
        raise RunError("no path was given; name the folder of a run, or a folder that holds runs")
    folders = {folder.resolve(): folder for path in paths for folder in _folders(Path(path))}
    runs = [read_checked(folder) for folder in folders.values()]
    empty = [run.path for run in runs if not run.records]
    if (named := {Path(path) for path in paths} & set(empty)) or len(empty) == len(runs):
        raise RunError(
            f"{sorted(named or empty)[0]}: no round is recorded yet; wait for the first round, then report again"
        )
    methods = _methods(run for run in runs if run.records)
    return Collection(methods, empty, [look(index) for index in range(len(methods))])


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise RunError(f"{path} is not a folder; name the folder of a run, or a folder that holds runs")
    if is_run(path):
        return [path]
    if not (found := in_order(runs_below(path))):
        raise RunError(
            f"no run under {path}: no folder there holds {EXPERIMENT}; name the folder of a run, or one above it"
        )
    return found


def read_checked(folder: Path) -> Run:
    """Read a run, and refuse values that no run writes; whatever is wrong, the error names its folder."""
    try:
        run = read_run(folder)
        _check(run)
    except RunError:
        raise
    except UnknownName as error:
        raise RunError(f"{folder}: {error}; if it is your own, load it with fedcams --import MODULE") from None
    except (FedcamsError, OSError, OverflowError, RecursionError, TypeError, ValueError) as error:
        if not (folder / ROUNDS).exists():  # perhaps a file of the user's that has this name
            raise RunError(f"{folder}: {EXPERIMENT} describes no run ({error}); name the folders of runs") from None
        raise RunError(f"{folder}: damaged ({error}); restore it, or delete the folder and run it again") from None
    return run


def _check(run: Run) -> None:
    """Refuse values that no run writes, before they become a wrong curve."""
    _check_columns(run)
    if odd := [name for name in run.probed if not name.isprintable()]:
        raise ValueError(f"{ROUNDS}: {odd[0]!r} is not the name of a probe")
    if run.recorded("round") != [*range(1, len(run.records) + 1)]:
        raise ValueError(f"{ROUNDS}: rounds are not in ascending order without gaps")
    if any(later.round <= earlier.round for earlier, later in pairwise(run.measured)):
        raise ValueError(f"{THEORY}: rounds are not in ascending order")
    if not all(isinstance(line, dict) for line in list[object](run.timings)):
        raise ValueError("a timing is not an object")
    if not all(isinstance(sitting, dict) for sitting in run.environment.get("resumed", [])):
        raise ValueError(f"{ENVIRONMENT}: what it says of a resumption is not an object")
    if np.isinf(run.seconds).any():
        raise ValueError(f"{TIMINGS}: seconds are not finite in some rounds")
    if run.histogram and np.array(run.histogram, np.int64).ndim != 2:
        raise ValueError("the partition's histogram is not a table")


def _check_columns(run: Run) -> None:
    """Refuse records with values of a wrong kind, and with some of the parts of the bytes down but not all."""
    for name in (*sorted(FIELDS), *run.probed):
        column, kinds = run.recorded(name), KINDS.get(name, NUMBERS)
        if not kinds.issuperset(map(type, column)):
            known = zip(run.recorded("round"), column, strict=True)
            round, wrong = next((round, value) for round, value in known if type(value) not in kinds)
            raise ValueError(f"round {round!r} contains something other than numbers and a cohort: {name}={wrong!r}")
        numbers = np.array(column if kinds is NUMBERS else [], np.float64)  # refuses integers that no float can hold
        if name in COUNTED and not np.isfinite(numbers).all():
            raise ValueError(f"{ROUNDS}: {name} is missing or not finite in some rounds")
    for parts in zip(*map(run.recorded, SPLIT), strict=True):
        if parts != (None,) * len(SPLIT) and not all(part is not None and math.isfinite(part) for part in parts):
            raise ValueError(f"{ROUNDS}: {', '.join(SPLIT)} are {parts} in one round")


def _methods(runs: Iterable[Run]) -> list[Method]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        described = {key: value for key, value in run.experiment.to_dict().items() if key not in ASIDE}
        groups.setdefault(repr(described), []).append(run)
    members = [sorted(group, key=lambda run: run.experiment.seed) for group in groups.values()]
    labels = _labels([group[0].experiment for group in members])
    return [Method(label, group) for label, group in zip(labels, members, strict=True)]


def _labels(experiments: list[Experiment]) -> list[str]:
    """Return the labels; a label that several experiments share is followed by as few keys as tell them apart."""
    sharing: dict[str, list[dict[str, Any]]] = {}
    for experiment in experiments:
        sharing.setdefault(experiment.label, []).append(experiment.to_dict())
    telling = {label: _telling(settings) for label, settings in sharing.items()}
    return [f"{e.label}{_told(e.to_dict(), telling[e.label])}" for e in experiments]


def _telling(settings: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the fewest keys in which all these differ from each other; of equally many, those that come first."""
    keys = [key for key in settings[0] if key not in ASIDE and any(each[key] != settings[0][key] for each in settings)]
    chosen = (few for size in range(len(keys)) for few in combinations(keys, size))
    return next((few for few in chosen if len({_told(each, few) for each in settings}) == len(settings)), tuple(keys))


def _told(settings: dict[str, Any], keys: tuple[str, ...]) -> str:
    return f" ({', '.join(f'{key}={settings[key]}' for key in keys)})" if keys else ""


@functools.cache
def _recipe_fields() -> dict[str, dict[str, Any]]:
    """Return each recipe's fields, spelled as experiments spell them; its average is left out, since it may differ."""
    whole = {name: {"downlink": "none", **recipe.fields} for name, recipe in RECIPES.items()}
    spelled = {name: Experiment.from_dict(fields).to_dict() for name, fields in whole.items()}
    return {name: {key: spelled[name][key] for key in whole[name] if key != "average"} for name in whole}
