"""What docs/theory.md measures through the package's own rounds: slopes on quadratics, and γ as the gradient falls."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fedcams.experiment import build
from fedcams.probes import Probe
from fedcams.tasks.quadratic import Quadratic
from fedcams.theory import rates
from fedcams.theory.rates import Measured, Trial

DOCS = Path(__file__).resolve().parents[1] / "docs"
FILE = DOCS / "theory" / "measured.json"
SEEDS = (1, 2, 3, 4, 5)
GAMMA = Trial(T=400, K=1, m=8, sigma_l=0, dim=64, rate=40.0, condition=2, uplink="sign")
SPREADS = (0.05, 0.2)
"""How much the clients differ for γ, as `Trial.sigma_g` takes it."""


@dataclass(frozen=True)
class Package:
    """What the package's rounds gave."""

    rates: list[tuple[str, Measured]]
    """Every trial with the name of the number that varies."""
    gamma: list[dict[str, Any]]
    """σ_g, and ‖∇f‖ and γ of every round."""


def trials() -> Iterator[tuple[str, Trial]]:
    """Yield every trial of `fedcams theory rates` with the name of the number that varies."""
    for axis, values in rates.FULL.items():
        for value in values:
            for seed in SEEDS:
                changed: dict[str, Any] = {axis: value, "seed": seed}
                yield axis, dataclasses.replace(rates.BASE["full"], **changed)


def run(file: Path = FILE, processes: int = 2) -> int:
    """Run everything, write what it gave, and return the number of runs."""
    axes, todo = zip(*trials(), strict=True)
    with get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool:
        curves = pool.map_async(gamma, SPREADS)
        found = pool.map(rates.measure, todo, chunksize=1)
        dissimilar = curves.get()
    points = rates.points(list(zip(axes, found, strict=True)))
    file.write_text(json.dumps({"rates": points, "gamma": dissimilar}, indent=1) + "\n", "utf-8")
    return len(found) + len(dissimilar)


def stored(file: Path = FILE) -> Package:
    """Return what was measured."""
    kept = json.loads(file.read_text("utf-8"))
    return Package([_measured(**each) for each in kept["rates"]], kept["gamma"])


def _measured(axis: str, value: int, seed: int, **averages: float) -> tuple[str, Measured]:
    changed: dict[str, Any] = {axis: value, "seed": seed}
    return axis, Measured(dataclasses.replace(rates.BASE["full"], **changed), **averages)


def gamma(sigma_g: float) -> dict[str, Any]:
    """Return ‖∇f‖ and γ of every round of a run whose clients differ by sigma_g."""
    trial = dataclasses.replace(GAMMA, sigma_g=sigma_g)
    experiment = dataclasses.replace(trial.experiment, probes=(Probe.parse("gamma"),))
    built = build(experiment)
    state, norms, gammas = built.state, [], []
    assert isinstance(experiment.task, Quadratic)
    curvature = experiment.task.curvature().double()
    for _ in range(experiment.rounds):
        norms.append(float((curvature * (state.x.double() - 1)).norm()))
        state, record = built.simulation.advance_(state)
        gammas.append(record.probes["gamma"])
    return {"sigma_g": sigma_g * (0.8 * GAMMA.dim) ** 0.5, "norm": norms, "gamma": gammas}
