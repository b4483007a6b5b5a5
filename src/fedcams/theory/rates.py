"""The rate experiment: averages of ‖∇f‖² against rounds, local steps and clients, through the package's own rounds.

A quadratic with many coordinates is many small problems at once: without compression, coordinates are independent, so
one run with 400 of them averages out as much noise as 20 runs with 20.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedcams.experiment import Experiment, build
from fedcams.experiment.assembly import Built
from fedcams.tasks.quadratic import Quadratic

EPS = 1e-3


@dataclass(frozen=True)
class Trial:
    """One run on a quadratic: clients, length, and the rule for the two rates."""

    T: int = 128
    K: int = 2
    m: int = 4
    n: int | None = None
    """Clients per round; all if it is None."""
    factor: float = 0.5
    """c in η = c √(K n); 0.5 balances the two leading terms."""
    by_steps: bool = True
    """Whether η grows with √K, as in the corollaries."""
    beta1: float = 0.0
    uplink: str = "identity"
    sigma_l: float = 1.0
    """The noise of a local step, in units of √(0.8 dim)."""
    sigma_g: float = 0.0
    """The same for the difference between clients."""
    dim: int = 400
    condition: float = 4.0
    eps: float = EPS
    rate: float | None = None
    """η/√ε, if it should not follow the rule."""
    seed: int = 1

    @property
    def experiment(self) -> Experiment:
        """The experiment of the trial: η = c √(K n) and η_l = √ε/(√T K), so that η η_l K/√ε = c √(K n/T)."""
        scale, cohort = math.sqrt(0.8 * self.dim), self.n or self.m
        noise = f"sigma_l={self.sigma_l * scale:.9g}, sigma_g={self.sigma_g * scale:.9g}, seed={self.seed}"
        eta = self.factor * math.sqrt((self.K if self.by_steps else 1) * cohort)
        eta = eta if self.rate is None else self.rate * math.sqrt(self.eps)
        return Experiment.from_dict({
            "task": f"quadratic(dim={self.dim}, groups={self.m}, size=32, condition={self.condition:.9g}, {noise})",
            "model": "point", "partition": "natural", "clients": self.m, "sampler": f"uniform(n={cohort})",
            "local": f"sgd(lr={math.sqrt(EPS / self.T) / self.K:.12g}, steps={self.K}, batch=1, replace=true)",
            "server": f"fedams(lr={eta:.12g}, eps={self.eps:.12g}, beta1={self.beta1:.9g})", "uplink": self.uplink,
            "rounds": self.T, "seed": self.seed, "engine": "stacked", "evaluate_every": 10**9, "probes": "",
        })  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """The result of a trial."""

    trial: Trial
    average: float
    """The mean of ‖∇f(x_t)‖² over all rounds, the quantity that theorems bound."""
    late: float
    """The mean over the second half."""
    off_floor: float
    """The share of coordinates whose v̂ left its floor."""


def measure(trial: Trial) -> Measured:
    """Run a trial and return its averages; the gradient of a quadratic is known in closed form."""
    norms, built = gradient_norms(trial.experiment)
    off = built.simulation.server.method.server.off_floor(built.state.optimizer)
    share = 0.0 if off is None else float(off.double().mean())
    return Measured(trial, float(np.mean(norms)), float(np.mean(norms[len(norms) // 2 :])), share)


def gradient_norms(experiment: Experiment) -> tuple[list[float], Built]:
    """Return ‖∇f(x_t)‖² before every round of an experiment on a quadratic, and its state after the last."""
    built = build(experiment)
    task, state, norms = experiment.task, built.state, []
    assert isinstance(task, Quadratic)
    curvature = task.curvature().double()
    for _ in range(experiment.rounds):
        norms.append(float((curvature * (state.x.double() - 1)).square().sum()))
        state, _ = built.simulation.advance_(state)
    return norms, replace(built, state=state)


# -- grids and slopes ----------------------------------------------------------------------------------------------

QUICK: Mapping[str, Sequence[int]] = {"T": (64, 128, 256), "K": (1, 2, 4, 8), "m": (2, 4, 8, 16)}
FULL: Mapping[str, Sequence[int]] = {"T": (64, 128, 256, 512, 1024), "K": (1, 2, 4, 8, 16), "m": (2, 4, 8, 16, 32)}
BASE = {"quick": Trial(T=128), "full": Trial(T=256)}
"""The fixed values of the others while one of T, K and m varies; T ≥ 4 K m keeps the step of a round small."""


def sweep(
    base: Trial, axes: Mapping[str, Sequence[int]], seeds: Sequence[int] = (1,)
) -> Iterator[tuple[str, Measured]]:
    """Yield the result of every trial, with the name of the number that varies."""
    for axis, values in axes.items():
        for value in values:
            for seed in seeds:
                changed: dict[str, Any] = {axis: value, "seed": seed}
                yield axis, measure(replace(base, **changed))


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the exponent p of the power law y ~ x^p that fits best in logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def slopes(found: Sequence[tuple[str, Measured]], late: bool = False) -> dict[str, list[float]]:
    """Return the exponents for each axis, one for every seed, over all rounds or the second half."""
    runs: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for axis, each in found:
        point = (getattr(each.trial, axis), each.late if late else each.average)
        runs.setdefault(axis, {}).setdefault(each.trial.seed, []).append(point)
    return {axis: [slope(*zip(*points, strict=True)) for points in seeds.values()] for axis, seeds in runs.items()}


def points(found: Sequence[tuple[str, Measured]]) -> list[dict[str, Any]]:
    """Return every trial as plain numbers: what varies, its value, the seed, and both averages."""
    return [
        {"axis": axis, "value": getattr(each.trial, axis), "seed": each.trial.seed, "average": each.average}
        | {"late": each.late, "off_floor": each.off_floor}
        for axis, each in found
    ]
