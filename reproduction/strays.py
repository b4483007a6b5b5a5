"""What `make reproduction` says about runs in results/ that the pages do not use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fedcams.averages import NoAverage
from fedcams.experiment import Experiment
from fedcams.experiment.preset import presets
from reproduction.runs import APART, Results, key


def strays(results: Results) -> Iterator[str]:
    """Yield a line for each run that is not used: it has too few rounds or tests, or it is in no preset."""
    yield from (f"{path} is left out: {why}" for path, why in results.left_out.items())
    known = {(name, each) for name in presets() for each in results.wanted(name)}
    wanted = {key(each)[1:] for _, each in known}
    for run in results.runs:
        plain = replace(run.experiment, average=NoAverage())  # such a run serves where no average is wanted
        if wanted.isdisjoint(key(each)[1:] for each in (run.experiment, plain)):
            yield f"{run.path} is in no preset: {_nearest(run.experiment, known)}"


def _nearest(experiment: Experiment, known: set[tuple[str, Experiment]]) -> str:
    """Return in what an experiment differs from the most similar one, with the same label if there is one."""
    apart = {(each.label != experiment.label, len(changed), name): changed
             for name, each in known if (changed := _changed(experiment, each))}  # fmt: skip
    (_, _, name), changed = min(apart.items())
    return f"in {name}, {', '.join(changed)}"


def _changed(experiment: Experiment, other: Experiment) -> list[str]:
    """Return the keys, and the values of the other experiment, that make another run of it, whatever the seed."""
    own = experiment.to_dict()
    return [
        f"{name} is {value!r}, not {own[name]!r}"
        for name, value in other.to_dict().items()
        if name not in (*APART, "seed") and value != own[name]
    ]
