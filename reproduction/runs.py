"""The finished runs in results/, found by their experiment and shown under the label that a preset gives it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fedcams.averages import NoAverage
from fedcams.experiment import Experiment
from fedcams.experiment.preset import load_preset
from fedcams.report import Collection, Method
from fedcams.report.collection import Look, look, read_checked
from fedcams.runs import Run
from fedcams.runs.folder import EXPERIMENT, ROUNDS

LAST = 100
"""Accuracies are means over this many last rounds, at most a fifth of all, since single rounds vary by a point."""
NEAR = 0.5
"""Points of accuracy within which two methods count as equal: single seeds differ by about 0.3."""
APART = ("label", "probes", "engine", "evaluate_every", "theory_every")
"""Keys that do not change how the model is trained."""
LOOKS = {
    "FedAvg": 0, "FedAdam": 1, "FedYogi": 2, "FedAMSGrad": 11, "FedAMS": 4, "FedAMS without bias correction": 12,
    "FedAvgM, twin of FedAMS": 20, "FedAvgM, twin of FedAdam": 17, "FedAvgM, twin of FedYogi": 18,
    "FedCAMS sign": 5, "FedCAMS top-k 1/64": 6, "FedCAMS top-k 1/128": 8, "FedCAMS top-k 1/256": 10,
    "FedCAMS sign, replica 4 bits": 0, "FedCAMS sign, replica 2 bits": 1, "FedCAMS sign, shared 4 bits": 2,
    "FedCAMS sign, shared top-k 1/16": 3, "FedCAMS top-k 1/64, shared top-k 1/64": 14,
    "FedCAMS sign, stateless 8 bits": 13, "FedAMS, lower falling rate": 12, "FedAMS, recipes' rate": 12,
    "FedCAMS one-way": 2, "FedCAMS one-way, lower falling rate": 10, "FedCAMS light": 5, "FedCAMS lighter": 7,
    "FedCAMS ternary 1/16": 7, "FedCAMS Option 2, sign": 13, "FedCAMS Option 2, top-k 1/64": 14,
    "FedCAMS sign, all 10 clients": 13, "FedCAMS top-k 1/64, all 10 clients": 14,
    "FedCAMS lightest": 3, "FedCAMS sign of tensors": 6, "FedCAMS sign both ways": 5, "FedCAMS top-k 1/64 both ways": 6,
}  # fmt: skip
"""A method looks the same in every picture, and no two methods in one picture look the same."""


@dataclass(frozen=True)
class Done:
    """The finished runs of one experiment, under the label of a preset; numbers are means over the seeds."""

    label: str
    runs: list[Run]
    """By ascending seed."""

    @property
    def run(self) -> Run:
        """The run of the first seed, for what all have in common."""
        return self.runs[0]

    @property
    def seeds(self) -> list[int]:
        """The seeds, ascending."""
        return [run.experiment.seed for run in self.runs]

    @cached_property
    def accuracies(self) -> list[float]:
        """The mean accuracy over the last rounds of each run, in percent."""
        return [fmean(last_scores(run)) for run in self.runs]

    @property
    def accuracy(self) -> float:
        """The mean accuracy over the last rounds, in percent."""
        return fmean(self.accuracies)

    @property
    def last(self) -> float:
        """The accuracy of the last round that was tested, in percent."""
        return fmean(last_scores(run)[-1] for run in self.runs)

    @property
    def best(self) -> float:
        """The highest accuracy of all rounds, in percent."""
        return fmean(max(scores(run, "test_accuracy")) for run in self.runs)

    @cached_property
    def averages(self) -> list[float]:
        """The accuracy of the averaged model of each run after the last round, in percent; empty if there is none."""
        return [known[-1] for run in self.runs if (known := scores(run, "averaged_accuracy"))]

    @property
    def averaged(self) -> float | None:
        """The mean accuracy of the averaged models, in percent; None if the method keeps none."""
        return fmean(self.averages) if self.averages else None

    @property
    def held(self) -> float | None:
        """The mean accuracy of the model that clients hold, or None if it was not measured."""
        found = [score for run in self.runs for score in scores(run, "held_accuracy", LAST)]
        return fmean(found) if found else None

    def sum(self, *keys: str) -> float:
        """Return the sum of these fields over all rounds."""
        return fmean(sum(getattr(record, key) for record in run.records for key in keys) for run in self.runs)

    @property
    def up(self) -> float:
        """Bytes of all clients, all rounds."""
        return self.sum("wire_up")

    @property
    def down(self) -> float:
        """Bytes to all clients, all rounds."""
        return self.sum("wire_down")

    @property
    def total(self) -> float:
        """Bytes up and down."""
        return self.up + self.down

    @cached_property
    def with_gamma(self) -> list[Run]:
        """The runs that measured γ."""
        return [run for run in self.runs if "gamma" in run.probed]

    @cached_property
    def gamma(self) -> dict[int, float]:
        """Round -> γ, as a mean over the runs that measured it; no round if none did, or without any update."""
        found: dict[int, list[float]] = {}
        for record in (record for run in self.with_gamma for record in run.records):
            if (value := record.probes.get("gamma")) is not None:
                found.setdefault(record.round, []).append(value)
        return {round: fmean(values) for round, values in sorted(found.items())}

    @property
    def early_gamma(self) -> float:
        """The mean of γ over the first rounds."""
        return fmean(list(self.gamma.values())[:LAST])

    @property
    def late_gamma(self) -> float:
        """The mean of γ over the last rounds."""
        return fmean(list(self.gamma.values())[-LAST:])

    @cached_property
    def timings(self) -> list[dict[str, Any]]:
        """The times of every round of the fastest run: the others may have shared the GPU. Empty without times."""
        timed = [run.timings for run in self.runs if run.timings]
        return min(timed, key=lambda timings: median(timing["seconds"] for timing in timings), default=[])

    @property
    def seconds(self) -> list[float]:
        """Seconds of every round of the fastest run, including evaluation."""
        return [timing["seconds"] for timing in self.timings]

    @property
    def second(self) -> float | None:
        """Seconds of the median round, since the first one compiles."""
        return median(self.seconds) if self.seconds else None

    @property
    def environments(self) -> list[str]:
        """The devices and the versions of the runs, each once."""
        return list(dict.fromkeys(map(_environment, self.runs)))


def with_common_seeds(runs: list[Done]) -> list[Done]:
    """Return these with only the seeds that all of them have, which makes comparisons fair.

    If they have none in common, each keeps its own.
    """
    common = set.intersection(*(set(done.seeds) for done in runs)) if runs else set()
    if not common:
        return runs
    return [Done(done.label, [run for run in done.runs if run.experiment.seed in common]) for done in runs]


def ahead(done: Done, other: Done) -> list[float]:
    """Return a method's lead over another in points, one number for each seed that both have.

    If they share no seed, return one number, the difference of their means.
    """
    own, rest = with_common_seeds([done, other])
    if own.seeds != rest.seeds:
        return [own.accuracy - rest.accuracy]
    return [a - b for a, b in zip(own.accuracies, rest.accuracies, strict=True)]


def spread(values: list[float], sign: str = "") -> str:
    """Return the mean of percentages, with the lowest and the highest if there are several; `+` shows their signs."""
    low, mean, high = (f"{each:{sign}.2f}" for each in (min(values), fmean(values), max(values)))
    return mean if len(values) == 1 else f"{mean} ({low} … {high})"


def scores(run: Run, key: str, last: int | None = None) -> list[float]:
    """Return the accuracies under a key of a run's record that were measured, of its last rounds or of all."""
    first = 0 if last is None else run.records[-1].round - last
    found = (getattr(record, key) for record in run.records if record.round > first)
    return [100 * score for score in found if score is not None]


def last_scores(run: Run) -> list[float]:
    """Return the accuracies of the last rounds, at most a fifth of all, in percent."""
    return scores(run, "test_accuracy", min(LAST, run.experiment.rounds // 5))


def unusable(run: Run) -> str:
    """Return why a run's numbers cannot be compared; an empty string if they can."""
    done, due = len(run.records), run.experiment.rounds
    if done != due:
        how = "was stopped early" if run.stopped else "is not finished"
        return f"it {how}, with {done} of {due} rounds"
    return "" if last_scores(run) else "it was not tested in its last rounds"


def _environment(run: Run) -> str:
    about, named = run.environment, {"torch": "torch", "python": "Python"}
    known = [f"{name} {about[key].partition('+')[0]}" for key, name in named.items() if key in about]  # without build
    return ", ".join([about.get("device", "device not recorded"), *known])


@functools.cache  # a page asks a hundred times, and reading takes longer than all that is done with it
def shipped(preset: str) -> list[Experiment]:
    """Return the experiments of a preset that comes with the package."""
    return load_preset(preset).experiments


class Results:
    """All runs below a folder that have all their rounds; refuses damaged ones."""

    def __init__(self, folder: Path) -> None:
        folders = sorted({path.parent for name in (EXPERIMENT, ROUNDS) for path in folder.rglob(name)})
        found = [(run, unusable(run)) for run in map(read_checked, folders)]
        self.runs = [run for run, why in found if not why]
        self.left_out = {run.path: why for run, why in found if why}
        """Why the other runs are not used."""

    def of(self, preset: str) -> list[Done]:
        """Return the experiments of a preset in its order, with their runs of every seed, wherever these were made."""
        wanted = {key(e)[1:]: e for e in reversed(shipped(preset))}
        found = [(e.label, self._by_seed(e)) for e in reversed(wanted.values())]
        return [Done(label, [runs[seed] for seed in sorted(runs)]) for label, runs in found if runs]

    def _by_seed(self, wanted: Experiment) -> dict[int, Run]:
        """Return the runs of an experiment.

        Averaging models does not affect training, so an experiment without it also gets the runs that averaged. Of
        several runs with one seed, it takes one with the same average, then one that measured γ, or else the first.
        """
        averages = {wanted.average}
        if wanted.average == NoAverage():
            averages |= {run.experiment.average for run in self.runs}
        same = {key(replace(wanted, average=average))[1:] for average in averages}
        found = [run for run in self.runs if key(run.experiment)[1:] in same]
        found.sort(key=lambda run: (run.experiment.average != wanted.average, not run.records[0].probes.get("gamma")))
        return {run.experiment.seed: run for run in reversed(found)}

    def missing(self, preset: str) -> list[str]:
        """Return the labels of a preset that have no run."""
        there = {done.label for done in self.of(preset)}
        return list(dict.fromkeys(e.label for e in shipped(preset) if e.label not in there))

    def repeats(self) -> list[list[Run]]:
        """Return groups of runs that were made several times with the same seed."""
        groups: dict[tuple[object, ...], list[Run]] = {}
        for run in self.runs:
            groups.setdefault(key(run.experiment), []).append(run)
        return [group for group in groups.values() if len(group) > 1]


@functools.cache  # every section of the page asks for the keys of all runs
def key(experiment: Experiment) -> tuple[object, ...]:
    """Return what an experiment computes, the seed first."""
    values = experiment.to_dict()
    return values.pop("seed"), *(values[name] for name in sorted(values) if name not in APART)


def collection(runs: list[Done]) -> Collection:
    """Return a collection for the report's charts, each method in its own look."""
    return Collection([Method(done.label, done.runs) for done in runs], [], looks(runs))


def looks(runs: list[Done]) -> list[Look]:
    """Return the look of each method: the one in `LOOKS`, or else one by its position."""
    return [look(LOOKS.get(done.label, place)) for place, done in enumerate(runs)]
