"""The rate experiment of docs/theory.md: which cases the oracle runs, and what came out, without the package.

`make theory ARGS="--only oracle"` runs all of them again.
"""

from __future__ import annotations

import csv
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from theory_page import oracle

FILE = Path(__file__).resolve().parents[1] / "docs" / "theory" / "oracle.csv"
SEEDS = (1, 2, 3, 4, 5)
"""Each draws a start, clients, noise and cohorts of its own."""
EPS = 1e-3


COMPRESSORS: Mapping[str, oracle.Compress | None] = {
    "identity": None,
    "sign": oracle.scaled_sign,
    **{f"top-k {ratio}": partial(oracle.topk, ratio=ratio) for ratio in ("1/4", "1/16", "1/64")},
}


@dataclass(frozen=True)
class Case:
    """One setting, run once per seed."""

    T: int = 4096
    K: int = 4
    m: int = 8
    n: int = 0
    """Clients per round; all if it is 0."""
    d: int = 20
    condition: float = 10.0
    """The largest curvature, 1, over the smallest."""
    gap: float = 1.0
    """f(x_1) - min f."""
    nonconvex: bool = False
    s_l: float = 4.0
    s_g: float = 0.0
    beta1: float = 0.0
    uplink: str = "identity"
    eps: float = EPS
    by_steps: bool = True
    """Whether the step of a round grows with √K, as in the corollaries."""
    step: float = 0.0
    """α, the step of a round for ε = 1e-3, if it does not follow the rule."""
    travel: float = 0.0
    """η_l K, if it does not follow the rule."""

    @property
    def cohort(self) -> int:
        """Clients per round."""
        return self.n or self.m

    @property
    def alpha(self) -> float:
        """The step η η_l K/√ε of a round, for ε = 1e-3: ½ √(K n/T) by the rule."""
        return self.step or 0.5 * math.sqrt((self.K if self.by_steps else 1) * self.cohort / self.T)

    @property
    def eta_l(self) -> float:
        """The local rate: √ε/(√T K) by the rule."""
        return (self.travel or math.sqrt(EPS / self.T)) / self.K

    @property
    def eta(self) -> float:
        """The server's rate: ½ √(K n) by both rules."""
        return self.alpha * math.sqrt(EPS) / (self.eta_l * self.K)


class Measured(NamedTuple):
    """The result of one seed of a case."""

    seed: int
    average: float
    """The mean of ‖∇f(x_t)‖² over all rounds."""
    late: float
    """The mean over the second half."""
    off_floor: float
    """The share of coordinates whose v̂ left its floor."""


Found = Mapping[Case, Sequence[Measured]]


# -- the table of slopes -----------------------------------------------------------------------------------------------

ROUNDS = (512, 1024, 2048, 4096, 8192, 16384)
COUNTS = (1, 2, 4, 8, 16, 32, 64)
ALL = {"T": ROUNDS, "K": COUNTS, "m": COUNTS}


@dataclass(frozen=True)
class Row:
    """A base case, and the numbers that vary while the others stay fixed."""

    name: str
    base: Case
    axes: Mapping[str, Sequence[int]]
    theory: Mapping[str, float] = field(default_factory=dict)
    """The exponents of the theory where they are not -1/2."""

    def cases(self, axis: str) -> list[Case]:
        """Return the cases along an axis."""
        changes: list[dict[str, Any]] = [{axis: value} for value in self.axes[axis]]
        return [replace(self.base, **change) for change in changes]


PARTIAL = Case(m=64, n=8, s_g=4.0, s_l=1.0)
FEW = (1, 2, 4, 8, 16)
"""Cohorts that leave out at least three quarters of the clients, which makes sampling most of the noise."""
PACKAGE = Case(T=256, K=2, m=4, d=400, condition=4.0, gap=108.244, s_l=math.sqrt(320))
"""The problem on which `fedcams theory rates` measures the package itself."""
ROWS = (
    Row("FedAMS, quadratic", Case(), ALL),
    Row("FedAMS, nonconvex", Case(nonconvex=True), ALL),
    Row("FedAMS, quadratic, β1 = 0.9", Case(beta1=0.9), ALL),
    Row("FedCAMS, sign, d = 64", Case(uplink="sign", d=64), ALL),
    Row("FedCAMS, top-k 1/16, d = 64", Case(uplink="top-k 1/16", d=64), ALL),
    Row("8 of 64 clients, σ_g = 4, σ_l = 1", PARTIAL, {"T": ROUNDS, "K": COUNTS, "n": FEW}, {"K": 0.5}),
    Row("the same, α = ½√(n/T)", replace(PARTIAL, by_steps=False), {"K": COUNTS}, {"K": 0.0}),
    Row("8 of 64 clients, σ_g = 0", Case(m=64, n=8), {"K": COUNTS, "n": COUNTS}),
    Row("no noise, α = ¼", Case(s_l=0.0, step=0.25), {"T": ROUNDS}, {"T": -1.0}),
    Row("quadratic, d = 400, T ≤ 1024", PACKAGE, {"T": (64, 128, 256, 512, 1024), "K": FEW, "m": (2, 4, 8, 16, 32)}),
)
STEP_RULES = ROWS[5:7]
"""Both rules for the step of a round under partial participation: η ~ √(Kn), and η ~ √n."""


# -- other studies -----------------------------------------------------------------------------------------------------

LENGTHS = (256, *ROUNDS)
COHORTS = (2, 8, 32)
SAMPLED = ("identity", "sign", "top-k 1/64")
HALVED = ("identity", "top-k 1/64")
"""Which of these also run with half the step, if clients differ."""
FLOORS = tuple(10.0**-power for power in range(1, 9))
TRAVELS = (0.02, 0.1)


def compressed(uplink: str) -> list[Case]:
    """Return runs with all clients over ever more rounds."""
    return [Case(T=rounds, d=64, uplink=uplink) for rounds in LENGTHS]


def sampled(uplink: str, s_g: float, by_steps: bool = True) -> list[Case]:
    """Return runs with some of 64 clients per round; for K = 4, the step of a round is half as long without √K."""
    return [Case(m=64, n=n, d=64, s_g=s_g, uplink=uplink, by_steps=by_steps) for n in COHORTS]


def floors(travel: float) -> list[Case]:
    """Return runs with ever lower floors of v̂ and the same two rates, whose product does not depend on `travel`."""
    return [Case(nonconvex=True, s_l=1.0, eps=eps, step=0.025, travel=travel) for eps in FLOORS]


def cases() -> list[Case]:
    """Return everything that is run, each case once."""
    slopes = [case for row in ROWS for axis in row.axes for case in row.cases(axis)]
    full = [case for uplink in COMPRESSORS for case in compressed(uplink)]
    some = [case for s_g in (0.0, 4.0) for uplink in SAMPLED for case in sampled(uplink, s_g)]
    halved = [case for uplink in HALVED for case in sampled(uplink, 4.0, by_steps=False)]
    low = [case for travel in TRAVELS for case in floors(travel)]
    return list(dict.fromkeys([*slopes, *full, *some, *halved, *low]))


# -- runs --------------------------------------------------------------------------------------------------------------


def measure(case: Case, seeds: Sequence[int] = SEEDS) -> list[Measured]:
    """Run a case with all seeds at once."""
    draw, memory = [np.random.default_rng([seed, 2022]) for seed in seeds], oracle.Memory()
    problem = oracle.problem(draw, case.d, case.m, case.s_g, case.gap, case.condition, case.nonconvex)
    step = partial(oracle.fedams, memory, lr=case.eta, beta1=case.beta1, eps=case.eps)
    cohorts = oracle.random_cohorts(draw, case.m, case.cohort)
    noise = oracle.random_signs(draw, (case.K, case.cohort, case.d), case.s_l)
    models = oracle.fedcams(problem, cohorts, noise, case.eta_l, step, COMPRESSORS[case.uplink])
    norms = np.stack([(problem.gradient(x) ** 2).sum(-1) for x in islice(models, case.T)])
    numbers = (norms.mean(0), norms[case.T // 2 :].mean(0), np.mean(memory.vhat > case.eps, axis=-1))
    return [Measured(seed, *map(float, each)) for seed, *each in zip(seeds, *numbers, strict=True)]


def run(file: Path = FILE, processes: int = 2) -> int:
    """Run all cases, write what they gave, and return the number of runs."""
    todo = cases()
    with get_context("spawn").Pool(processes) as pool:
        found = pool.map(measure, todo, chunksize=1)
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*(each.name for each in fields(Case)), *Measured._fields])
        for case, seeds in zip(todo, found, strict=True):
            given = asdict(case).values()
            writer.writerows([*given, each.seed, *(f"{value:.7g}" for value in each[1:])] for each in seeds)
    return sum(map(len, found))


def stored(file: Path = FILE) -> Found:
    """Return what was measured."""
    kinds, found = typing.get_type_hints(Case), dict[Case, list[Measured]]()
    with file.open(encoding="utf-8") as rows:
        for row in csv.DictReader(rows):
            case: dict[str, Any] = {
                name: row[name] == "True" if kind is bool else kind(row[name]) for name, kind in kinds.items()
            }
            seed, *numbers = (row[name] for name in Measured._fields)
            found.setdefault(Case(**case), []).append(Measured(int(seed), *map(float, numbers)))
    return found


# -- slopes ------------------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """An exponent over seeds."""

    slopes: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return fmean(self.slopes)

    @property
    def deviation(self) -> float:
        """The standard deviation over seeds."""
        return stdev(self.slopes)


def fit(found: Found, row: Row, axis: str, late: bool = False) -> Fit:
    """Return the exponents p of `y ~ x^p` that fit best in logarithms, one for each seed."""
    x = np.log(row.axes[axis])
    y = np.log([[each.late if late else each.average for each in found[case]] for case in row.cases(axis)])
    return Fit(tuple(np.polyfit(x, y, 1)[0].tolist()))
