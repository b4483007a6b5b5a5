"""How long the GPU takes for every preset of CIFAR: estimated from the measured round of FedAMS and the local steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple, Self

from fedcams.experiment import Experiment
from fedcams.experiment.preset import presets
from fedcams.experiment.sweep import load_sweep
from fedcams.local import step_count
from fedcams.registry import exact
from reproduction import words
from reproduction.runs import Done, Results, shipped
from reproduction.tables import table

TEXT = """\
## Run it yourself

`fedcams run PRESET --data DIR --device cuda` starts all runs of a preset, one after the other, and continues where it
was interrupted. To spread a preset over several sessions, prefix the command with `timeout 25m` and repeat it; at most
25 rounds are run again. `--only LABEL` starts one run, and `-s seeds=[2,3]` sets other seeds. Put finished runs into
`results/PRESET/`; `make reproduction` then shows them on this page, and names those that it cannot use.

The minutes are estimates for an idle {device}. They take the median round of FedAMS
({rounds}), and scale its training with the number of local
steps of all clients. *Longest* is the longest single run. Compression adds up to a tenth. Clients of unequal sizes take
longer, because a round lasts as long as its largest client.
"""
SEARCH = """\
To repeat the paper's search over rates and ε, use
`fedcams sweep sweeps/cifar10/sweep.toml --data DIR --device cuda`: {runs} runs
of {rounds} rounds, {minutes:.0f} minutes. Repeat the command to continue; `leaderboard.md` ranks what is finished.
"""
SWEEP = Path(__file__).resolve().parents[1] / "sweeps" / "cifar10" / "sweep.toml"
IMAGES = 50_000
"""Of CIFAR-10, and of CIFAR-100, to train on."""
STEPS = 10 * 60
"""The local steps of all clients in one of the paper's rounds: ten clients, and three epochs of 400 images."""


class Round(NamedTuple):
    """The seconds of one of the paper's rounds."""

    training: float
    rest: float

    @classmethod
    def of(cls, done: Done) -> Self:
        """Return the median round of a run, or raise ValueError if it was not timed."""
        training = median(timing["phases"]["train"] for timing in done.timings)
        return cls(training, median(timing["seconds"] for timing in done.timings) - training)

    def minutes(self, run: Experiment) -> float:
        """Return how long a run takes."""
        return (self.training * work(run) + self.rest) * run.rounds / 60


def costs(results: Results) -> Iterator[str]:
    """Yield the section on GPU time, if FedAMS has been timed for every model."""
    timed = {model: _fedams(results, model) for model in words.MODELS}
    rounds = {model: Round.of(done) for model, done in timed.items() if done and done.timings}
    if set(rounds) != set(words.MODELS):
        return
    device = " or ".join(sorted({done.run.environment["device"] for done in timed.values() if done}))
    shown = " and ".join(f"{sum(each):.3f} s for {words.MODELS[model]}" for model, each in rounds.items())
    yield TEXT.format(device=device, rounds=shown)
    yield from table("preset | compares | runs | minutes | longest", "llrrr", list(_rows(rounds)))
    tried = [experiment for trial in load_sweep(SWEEP) for experiment in trial.experiments]
    minutes = sum(rounds[str(run.model)].minutes(run) for run in tried)
    yield SEARCH.format(runs=len(tried), rounds=tried[0].rounds, minutes=minutes)


def _fedams(results: Results, model: str) -> Done | None:
    return next((done for done in results.of(f"compression-{model}") if done.label == "FedAMS"), None)


def _rows(rounds: dict[str, Round]) -> Iterator[list[str]]:
    for preset, description in presets().items():
        runs = shipped(preset)
        if all(str(run.task).startswith("cifar") and str(run.model) in rounds for run in runs):
            minutes = [rounds[str(run.model)].minutes(run) for run in runs]
            yield [f"`{preset}`", description, str(len(runs)), _whole(sum(minutes)), _whole(max(minutes))]


def _whole(minutes: float) -> str:
    return "<1" if minutes < 0.5 else f"{minutes:.0f}"


def work(run: Experiment) -> float:
    """Return the local steps of all clients in a round on CIFAR, compared with those of the paper's rounds."""
    steps = step_count(run.local, math.floor(exact(run.train_fraction) * IMAGES / run.clients))
    return float(run.sampler.expected(run.clients)) * steps / STEPS
