"""The section on accuracy against all bytes: recipes and FedAMS, all averaged, as means over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean

from reproduction.runs import Done, Results
from reproduction.tables import GB, table, where

PRESETS = {
    "bytes-resnet18": "ResNet-18",
    "bytes-convmixer": "ConvMixer-256-8",
    "bytes-noniid-resnet18": "ResNet-18, different labels (Dirichlet 0.3)",
}
TEXT = """\
## Accuracy against all bytes

[Recipes](methods.md#recipes) compress both directions, or updates alone, and all methods here keep the same average of
the server's models. *Last 100* is the mean test accuracy over the last 100 rounds, of which every tenth was tested;
*averaged* is that of the averaged model after the last round. *Fewer* compares with the first line, first contacts and
buffers included. The final model's own delivery to clients is not part of a run. Ratios and schedules of the two-way
recipes were chosen in earlier runs with seed 1, and their server's rate in runs of 60 rounds with seed 11.
"""


def by_bytes(results: Results) -> Iterator[str]:
    """Yield the section, with a table for each preset that has runs; nothing without any."""
    found = {preset: runs for preset in PRESETS if (runs := results.of(preset))}
    if found:
        yield TEXT
    for preset, runs in found.items():
        yield f"### {PRESETS[preset]}\n\n`fedcams run {preset} --data DIR --device cuda`\n"
        yield from _table(runs)
        yield where(runs)


def _table(runs: list[Done]) -> Iterator[str]:
    methods = {label: [done for done in runs if done.label == label] for label in dict.fromkeys(d.label for d in runs)}
    first = next(iter(methods.values()))
    rows = []
    for label, seeds in methods.items():
        sizes = [f"{_mean(seeds, number) / GB:.2f} GB" for number in NUMBERS]
        fewer = [f"{_mean(first, number) / _mean(seeds, number):.1f}x" for number in (NUMBERS[0], NUMBERS[2])]
        averaged = [done.averaged for done in seeds if done.averaged is not None]
        shown = f"{fmean(averaged):.2f}" if averaged else ""
        about = [label, f"{_mean(seeds, lambda done: done.accuracy):.2f}", shown]
        rows.append([*about, *sizes, *fewer, ", ".join(str(done.run.experiment.seed) for done in seeds)])
    heads = "run | last 100 | averaged | up | down | up + down | fewer up | fewer up + down | seeds"
    yield from table(heads, "lrrrrrrrr", rows)


NUMBERS: tuple[Callable[[Done], float], ...] = (lambda done: done.up, lambda done: done.down, lambda done: done.total)


def _mean(seeds: list[Done], number: Callable[[Done], float]) -> float:
    return fmean(map(number, seeds))
