"""The finished runs in results/, found by their experiment and shown under the label that a preset gives it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median

from fedcams.experiment import Experiment
from fedcams.experiment.preset import load_preset
from fedcams.report import Collection, Method
from fedcams.report.collection import Look, look
from fedcams.runs import Run, read_run

LAST = 100
"""Accuracies are averaged over this many last rounds, since single rounds vary by a point."""
APART = ("label", "probes", "engine")
"""Keys that do not change what is computed."""
LOOKS = {
    "FedAvg": 0, "FedAdam": 1, "FedYogi": 2, "FedAMSGrad": 10, "FedAMS": 4, "FedAMS without bias correction": 11,
    "FedAvgM, twin of FedAMS": 18, "FedAvgM, twin of FedAdam": 15, "FedAvgM, twin of FedYogi": 16,
    "FedCAMS sign": 5, "FedCAMS top-k 1/64": 6, "FedCAMS top-k 1/128": 7, "FedCAMS top-k 1/256": 9,
    "FedCAMS sign, replica 4 bits": 0, "FedCAMS sign, replica 2 bits": 1, "FedCAMS sign, shared 4 bits": 2,
    "FedCAMS sign, shared top-k 1/16": 3, "FedCAMS top-k 1/64, shared top-k 1/64": 13,
    "FedCAMS sign, stateless 8 bits": 12,
}  # fmt: skip
"""A method looks the same in every picture, and no two methods in one picture look the same."""


@dataclass(frozen=True)
class Done:
    """A finished run, under the label of a preset."""

    label: str
    run: Run

    @cached_property
    def scores(self) -> list[float]:
        """The accuracies of the last rounds, in percent."""
        first = self.run.records[-1].round - LAST
        return [100 * r.test_accuracy for r in self.run.records if r.test_accuracy is not None and r.round > first]

    @property
    def accuracy(self) -> float:
        """The mean accuracy over the last rounds, in percent."""
        return fmean(self.scores)

    @property
    def averaged(self) -> float | None:
        """The accuracy of the averaged model after the last round, in percent; None if the method keeps none."""
        found = [r.averaged_accuracy for r in self.run.records if r.averaged_accuracy is not None]
        return 100 * found[-1] if found else None

    @property
    def held(self) -> float | None:
        """The mean accuracy of the model that clients hold, or None if it was not measured."""
        found = [r.held_accuracy for r in self.run.records[-LAST:] if r.held_accuracy is not None]
        return 100 * fmean(found) if found else None

    @property
    def best(self) -> float:
        """The highest accuracy of all rounds, in percent."""
        return max(100 * r.test_accuracy for r in self.run.records if r.test_accuracy is not None)

    def sum(self, *keys: str) -> int:
        """Return the sum of these fields over all rounds."""
        return sum(getattr(record, key) for record in self.run.records for key in keys)

    @property
    def up(self) -> int:
        """Bytes of all clients, all rounds."""
        return self.sum("wire_up")

    @property
    def down(self) -> int:
        """Bytes to all clients, all rounds."""
        return self.sum("wire_down")

    @property
    def total(self) -> int:
        """Bytes up and down."""
        return self.up + self.down

    @property
    def gamma(self) -> list[float]:
        """γ of every round; empty if it was not measured."""
        return [gamma for record in self.run.records if (gamma := record.probes.get("gamma")) is not None]

    @cached_property
    def seconds(self) -> list[float]:
        """Seconds of every round, including evaluation."""
        return [timing["seconds"] for timing in self.run.timings]

    @property
    def second(self) -> float | None:
        """Seconds of the median round, since the first one compiles."""
        return median(self.seconds) if self.seconds else None

    @property
    def environment(self) -> str:
        """The device and the versions of the run."""
        about = self.run.environment
        named = {"torch": "torch", "python": "Python"}
        known = [
            about.get("device", "device not recorded"),
            *(f"{n} {about[k]}" for k, n in named.items() if k in about),
        ]
        return ", ".join(known)


@functools.cache  # a page asks a hundred times, and reading takes longer than all that is done with it
def shipped(preset: str) -> list[Experiment]:
    """Return the experiments of a preset that comes with the package."""
    return load_preset(preset).experiments


class Results:
    """All finished runs below a folder."""

    def __init__(self, folder: Path) -> None:
        found = (read_run(path.parent) for path in sorted(folder.glob("*/*/rounds.jsonl")))
        self.runs = [run for run in found if run.finished]

    def of(self, preset: str) -> list[Done]:
        """Return the runs of a preset in its order, also those that were made for another preset.

        Of several equal runs, it takes one that measured γ, or else the first.
        """
        known: dict[tuple[object, ...], Run] = {}
        for run in sorted(self.runs, key=lambda run: not run.records[0].probes.get("gamma")):
            known.setdefault(key(run.experiment), run)
        return [Done(e.label, known[key(e)]) for e in shipped(preset) if key(e) in known]

    def missing(self, preset: str) -> list[str]:
        """Return the labels of a preset that have no run."""
        there = {done.label for done in self.of(preset)}
        return [e.label for e in shipped(preset) if e.label not in there]

    def seeds(self, done: Done) -> list[Done]:
        """Return the runs of the same experiment with every seed."""
        found = {
            run.experiment.seed: run for run in self.runs if key(run.experiment)[1:] == key(done.run.experiment)[1:]
        }
        return [Done(done.label, found[seed]) for seed in sorted(found)]

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
    return Collection([Method(done.label, [done.run]) for done in runs], [], looks(runs))


def looks(runs: list[Done]) -> list[Look]:
    """Return the look of each run: the one in `LOOKS`, or else one by its position."""
    return [look(LOOKS.get(done.label, place)) for place, done in enumerate(runs)]
