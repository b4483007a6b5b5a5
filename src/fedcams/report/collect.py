"""From paths to methods: runs are found, read, and those that differ in nothing but the seed put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from fedcams.errors import FedcamsError, UnknownName
from fedcams.experiment import Experiment
from fedcams.report.order import in_order
from fedcams.report.palette import Look, look
from fedcams.runs import Run, RunError, is_run, read_run
from fedcams.runs.folder import EXPERIMENT


@dataclass(frozen=True)
class Method:
    """Runs of one experiment with different seeds: one colour, one line in a table."""

    label: str
    """Unique within a collection."""
    runs: list[Run]
    """By ascending seed."""

    @property
    def experiment(self) -> Experiment:
        """What was run; its seed is that of the first run."""
        return self.runs[0].experiment

    @property
    def unfinished(self) -> list[str]:
        """One note for each run with fewer rounds than it was asked for."""
        due = self.experiment.rounds
        return [
            f"{self.label}, seed {run.experiment.seed}: {run.records[-1].round} of {due} rounds"
            for run in self.runs
            if run.records[-1].round < due
        ]


@dataclass(frozen=True)
class Collection:
    """What a report is about."""

    methods: list[Method]
    empty: list[Path]
    """Runs that were found but have no round yet."""
    looks: list[Look]
    """How each method is drawn, wherever it is."""

    @property
    def runs(self) -> list[Run]:
        """All runs, method by method."""
        return [run for method in self.methods for run in method.runs]


def collect(paths: Sequence[Path]) -> Collection:
    """The runs at these paths, or in folders below them, in the order in which they are met.

    Of those below a path, runs that lie in one folder come in the order of their preset.
    """
    if not paths:
        raise RunError("no path was given; name at least one folder of a run, or one that holds runs")
    folders = {folder.resolve(): folder for path in paths for folder in _folders(Path(path))}
    runs = [_read(folder) for folder in folders.values()]
    empty = [run.path for run in runs if not run.records]
    if (named := {Path(path) for path in paths} & set(empty)) or len(empty) == len(runs):
        raise RunError(
            f"{sorted(named or empty)[0]}: no round is recorded; let the run come further, then report again"
        )
    methods = _methods(run for run in runs if run.records)
    return Collection(methods, empty, [look(index) for index in range(len(methods))])


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise RunError(f"{path} is not a folder; name the folder of a run, or one that holds runs")
    if is_run(path):
        return [path]
    if not (found := in_order(file.parent for file in path.rglob(EXPERIMENT))):
        raise RunError(
            f"no run under {path}: no folder there holds {EXPERIMENT}; name the folder that runs were put in"
        )
    return found


def _read(folder: Path) -> Run:
    """The run, or an error that names its folder whatever is wrong."""
    try:
        run = read_run(folder)
        _check(run)
    except RunError:
        raise
    except UnknownName as error:
        raise RunError(f"{folder}: {error}; if it is a piece of your own, fedcams --import MODULE loads it") from None
    except (FedcamsError, OSError, TypeError, ValueError) as error:
        raise RunError(f"{folder}: damaged ({error}); delete the folder and start the run anew") from None
    return run


def _check(run: Run) -> None:
    """Refuses what no run writes, before it turns up as a wrong curve."""
    for record in run.records:
        numbers = dict(vars(record))
        cohort = numbers.pop("cohort")
        if not isinstance(cohort, list) or not all(isinstance(v, int | float | None) for v in numbers.values()):
            raise ValueError(f"round {record.round!r} holds something else than numbers and a cohort")
    if any(later.round <= earlier.round for earlier, later in pairwise(run.records)):
        raise ValueError("rounds are not in ascending order")
    if not all(isinstance(line, dict) for line in list[object](run.timings)):
        raise ValueError("a timing is not an object")
    if run.histogram and np.array(run.histogram, np.int64).ndim != 2:
        raise ValueError("the partition's histogram is not a table")


def _methods(runs: Iterable[Run]) -> list[Method]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        described = {**run.experiment.to_dict(), "seed": 0}
        groups.setdefault(repr(described), []).append(run)
    members = [sorted(group, key=lambda run: run.experiment.seed) for group in groups.values()]
    labels = _labels([group[0].experiment for group in members])
    return [Method(label, group) for label, group in zip(labels, members, strict=True)]


def _labels(experiments: list[Experiment]) -> list[str]:
    """The labels; those that several experiments share are followed by what these do not share."""
    count = Counter(experiment.label for experiment in experiments)
    return [e.label if count[e.label] == 1 else f"{e.label} ({_distinction(e, experiments)})" for e in experiments]


def _distinction(experiment: Experiment, experiments: list[Experiment]) -> str:
    mine = experiment.to_dict()
    others = [other.to_dict() for other in experiments if other.label == experiment.label]
    return ", ".join(
        f"{key}={value}"
        for key, value in mine.items()
        if key != "seed" and any(other[key] != value for other in others)
    )
