"""Does leaving the floor help? FedAMS on digits over rate and ε, beside FedAvgM, which has no floor."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from fedcams.experiment import Experiment, build
from fedcams.experiment.preset import load_preset
from fedcams.experiment.sweep import score
from fedcams.optimizers import server

FILE = Path(__file__).resolve().parents[1] / "docs" / "theory" / "adaptivity.csv"
CHOOSING, SHOWN = (11, 12), (1, 2, 3)
"""The seeds by which a rate is chosen, and those that the page shows."""
STEPS = tuple(round(10 ** (power / 2), 3) for power in range(-2, 7))
"""The rates lr/√ε that a coordinate has while it stays on its floor, from 0.1 to 1000."""
EPS = tuple(10.0**-power for power in range(1, 10))


class Point(NamedTuple):
    """One run: its server and seed, and what came out."""

    family: str
    eps: float
    step: float
    seed: int
    accuracy: float = 0.0
    averaged: float = 0.0
    off_floor: float = 0.0

    @property
    def spec(self) -> str:
        """The server's spec string."""
        if self.family == "fedavgm":
            return f"fedavgm(lr={0.1 * self.step:.6g}, momentum=0.9)"  # the twin of fedams on its floor, whatever ε is
        return f"fedams(lr={self.step * self.eps**0.5:.6g}, eps={self.eps:g}, beta1=0.9)"


def grid() -> Iterator[Point]:
    """Yield every setting with every seed that chooses among rates."""
    for seed in CHOOSING:
        for step in STEPS:
            yield Point("fedavgm", 0.0, step, seed)
            yield from (Point("fedams", eps, step, seed) for eps in EPS)


def best(points: Sequence[Point]) -> Iterator[tuple[str, float, float]]:
    """Yield family, ε and the rate with the highest accuracy over the seeds that choose."""
    for family, eps in dict.fromkeys((p.family, p.eps) for p in points):
        chosen = [p for p in points if (p.family, p.eps) == (family, eps) and p.seed in CHOOSING]
        yield family, eps, max(STEPS, key=lambda step: fmean(p.accuracy for p in chosen if p.step == step))


def measured(point: Point) -> Point:
    """Run a setting, and return it with what came out."""
    built = build(experiment(point))
    state, records = built.state, []
    for _ in range(experiment(point).rounds):
        state, record = built.simulation.advance_(state)
        records.append(replace(record, averaged_accuracy=None))
    averaged = record.averaged_accuracy
    assert averaged is not None
    off_floor = record.probes.get("off_floor") or 0.0  # FedAvgM has no floor
    return point._replace(accuracy=score(records) or 0.0, averaged=averaged, off_floor=off_floor)


def experiment(point: Point) -> Experiment:
    """Return the demo's experiment with the server of a point."""
    demo = next(each for each in load_preset("demo").experiments if each.label == "FedAMS")
    return replace(demo, server=server(point.spec), seed=point.seed)


def run(file: Path = FILE, processes: int = 2) -> int:
    """Run the grid, then the best rate of every ε with other seeds, write all of it, and return the number of runs."""
    with get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool:
        tried = pool.map(measured, list(grid()), chunksize=4)
        again = [Point(*chosen, seed) for chosen in best(tried) for seed in SHOWN]
        shown = pool.map(measured, again, chunksize=1)
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(Point._fields)
        writer.writerows(tried + shown)
    return len(tried) + len(shown)


def stored(file: Path = FILE) -> list[Point]:
    """Return what was measured."""
    with file.open(encoding="utf-8") as rows:
        return [_point(row) for row in csv.DictReader(rows)]


def _point(row: dict[str, str]) -> Point:
    eps, step, *found = (float(row[key]) for key in ("eps", "step", "accuracy", "averaged", "off_floor"))
    return Point(row["family"], eps, step, int(row["seed"]), *found)
