"""How long the GPU takes for every preset of CIFAR: estimated from the measured round of FedAMS and the local steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedcams.experiment import Experiment
from fedcams.experiment.preset import presets
from fedcams.experiment.sweep import load_sweep
from reproduction import words
from reproduction.runs import Done, Results, shipped
from reproduction.tables import table

TEXT = """\
## Run it yourself

`fedcams run PRESET --data DIR --device cuda` starts all runs of a preset, one after the other, and continues where it
was interrupted. For other seeds, add `-s seeds=[2,3]`. Put finished runs into `results/PRESET/`; `make reproduction`
then shows them on this page. The minutes are estimates for an idle {device}. They scale the median round of FedAMS
({rounds}) with the number of local steps per round. Compression adds
up to a tenth. Clients of unequal sizes take longer, because a round lasts as long as its largest client.
"""
SEARCH = """\
To repeat the paper's search over rates and ε, use
`fedcams sweep sweeps/cifar10/sweep.toml --data DIR --device cuda`: {runs} runs
of {rounds} rounds, {minutes:.0f} minutes.
"""
SWEEP = Path(__file__).resolve().parents[1] / "sweeps" / "cifar10" / "sweep.toml"


def costs(results: Results) -> Iterator[str]:
    """Yield the section on GPU time, if FedAMS has been timed for every model."""
    timed = {model: _fedams(results, model) for model in words.MODELS}
    seconds = {model: done.second for model, done in timed.items() if done and done.second}
    if set(seconds) != set(words.MODELS):
        return
    device = " or ".join(sorted({done.run.environment["device"] for done in timed.values() if done}))
    rounds = " and ".join(f"{second:.3f} s for {words.MODELS[model]}" for model, second in seconds.items())
    yield TEXT.format(device=device, rounds=rounds)
    yield from table("preset | compares | runs | minutes", "llrr", list(_rows(seconds)))
    tried = [experiment for trial in load_sweep(SWEEP) for experiment in trial.experiments]
    yield SEARCH.format(runs=len(tried), rounds=tried[0].rounds, minutes=_minutes(tried, seconds))


def _fedams(results: Results, model: str) -> Done | None:
    return next((done for done in results.of(f"compression-{model}") if done.label == "FedAMS"), None)


def _rows(seconds: dict[str, float]) -> Iterator[list[str]]:
    for preset, description in presets().items():
        runs = shipped(preset)
        if all(work(run) and str(run.model) in seconds for run in runs):
            yield [f"`{preset}`", description, str(len(runs)), f"{_minutes(runs, seconds):.0f}"]


def _minutes(runs: list[Experiment], seconds: dict[str, float]) -> float:
    return sum(seconds[str(run.model)] * run.rounds * work(run) for run in runs) / 60


def work(run: Experiment) -> float:
    """Return the passes over images of a round on CIFAR in units of the paper's: ten clients of 100, three epochs.

    Zero for other tasks, and for clients that take a fixed number of steps.
    """
    epochs = run.method.local.epochs
    if not str(run.task).startswith("cifar") or epochs is None:
        return 0.0
    return (run.sampler.expected(run.clients) / run.clients) * epochs * run.train_fraction / (0.1 * 3 * 0.8)
