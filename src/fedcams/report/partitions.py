"""Partitions: how the labels lie over the clients, each distinct one once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcams.report.collect import Collection


@dataclass(frozen=True)
class Histogram:
    """One partition, and which runs had it."""

    title: str
    """Its spec and the seeds it was drawn with."""
    counts: NDArray[np.int64]
    """`[clients, labels]`, examples."""


def histograms(collection: Collection) -> list[Histogram]:
    """The distinct partitions of all runs, in the order in which they are met."""
    found: dict[tuple[str, str], list[int]] = {}
    counts: dict[tuple[str, str], NDArray[np.int64]] = {}
    for run in collection.runs:
        if run.histogram and run.histogram[0]:
            key = f"{run.experiment.task}, {run.experiment.partition.spelled_out()}", repr(run.histogram)
            found.setdefault(key, []).append(run.experiment.seed)
            counts[key] = np.array(run.histogram, np.int64)
    return [Histogram(f"{key[0]}, {_seeds(seeds)}", counts[key]) for key, seeds in found.items()]


def _seeds(seeds: list[int]) -> str:
    distinct = sorted(set(seeds))
    return f"seed{'s' if len(distinct) > 1 else ''} {', '.join(map(str, distinct))}"
