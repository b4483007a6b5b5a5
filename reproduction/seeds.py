"""What single seeds reached, and how sure the differences between methods are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, stdev

from reproduction import words
from reproduction.runs import Done, Results, with_common_seeds
from reproduction.tables import named, table

DIFFERENCES = """\
### Differences from FedAMS

The table compares methods with FedAMS over the seeds that both have, if these are at least three. Runs with the same
seed share shards, cohorts, batches and initial weights. *Accuracy* is that of the last 100 rounds, or that of the
averaged model at the end. *95%* is Student's confidence interval for the mean difference. It allows for chance between
seeds, not for that of the test images, and holds for each row alone: of twenty such intervals, about one misses.
FedAMS and its twin take the same steps while v̂ stays on its floor, so their difference is an example of chance.
"""
T = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Number of seeds -> the 97.5% quantile of Student's t distribution with one degree of freedom less."""
COMPARED: dict[str, tuple[str, Callable[[Done], list[float]]]] = {
    "fig1": ("last 100", lambda done: done.accuracies),
    "compression": ("last 100", lambda done: done.accuracies),
    "bytes": ("averaged", lambda done: done.averages),
}
"""Presets whose methods are compared -> by which accuracy."""


def seeds(results: Results) -> Iterator[str]:
    """Yield a table of every method that was run with several seeds, under the first preset that has it."""
    figures = [f"{figure}-{model}" for figure in ("fig1", "compression", "two-way") for model in words.MODELS]
    rows: dict[Path, list[str]] = {}
    for preset in (*figures, *words.FURTHER):
        for done in results.of(preset):
            if len(done.runs) > 1:
                rows.setdefault(done.run.path, [f"`{preset}`", *_seeds(done)])
    if rows:
        yield "## Seeds\n"
        yield from table("preset | run | seed: accuracy | mean", "lllr", list(rows.values()))
    yield from differences(results)


def _seeds(done: Done) -> list[str]:
    each = ", ".join(f"{seed}: {score:.2f}" for seed, score in zip(done.seeds, done.accuracies, strict=True))
    return [done.label, each, f"{done.accuracy:.2f}"]


def differences(results: Results) -> Iterator[str]:
    """Yield a table of every method that has three seeds or more in common with FedAMS."""
    rows = [
        [f"`{figure}-{model}`", *row]
        for figure, (name, scores) in COMPARED.items()
        for model in words.MODELS
        for row in _differences(results.of(f"{figure}-{model}"), name, scores)
    ]
    if rows:
        yield DIFFERENCES
        heads = "preset | run | accuracy | seeds | mean difference | standard deviation | 95%"
        yield from table(heads, "lllrrrr", rows)


def _differences(runs: list[Done], name: str, scores: Callable[[Done], list[float]]) -> Iterator[list[str]]:
    pairs = [(done, base) for base in runs if base.label == "FedAMS" for done in runs if done is not base]
    for done, base in pairs:
        own, other = with_common_seeds([done, base])
        if own.seeds == other.seeds and len(own.seeds) in T:
            points = [a - b for a, b in zip(scores(own), scores(other), strict=True)]
            yield [done.label, name, named(own.seeds), *interval(points)]


def interval(points: list[float]) -> list[str]:
    """Return the mean of differences, their standard deviation, and the 95% interval of the mean."""
    mean, deviation = fmean(points), stdev(points)
    wide = T[len(points)] * deviation / len(points) ** 0.5
    return [f"{mean:+.2f}", f"{deviation:.2f}", f"{mean - wide:+.2f} to {mean + wide:+.2f}"]
