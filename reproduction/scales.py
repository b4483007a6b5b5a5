"""How much of an adaptive server's step is adaptive: a bound on v̂ from the norms that every run records."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from fedcams.optimizers import server
from fedcams.optimizers.base import Adaptive
from reproduction import words
from reproduction.runs import Done, Results
from reproduction.tables import table

WORDS = """\
### How adaptive the steps are

A coordinate moves by `lr m/(√v̂ + ε)`, or `lr m/max(√v̂, √ε)` with FedAMS; for FedAdam and FedYogi, v̂ is v. Since
v̂ ≤ (1 - β2) Σ Δ² in every coordinate, the norms in `rounds.jsonl` bound the mean of v̂ in every round; the table shows
the highest of these bounds. The bias correction of FedAdam and FedAMSGrad divides √v̂ by √(1 - β2^t) before ε is added,
and the bound does so too. *Above it* is the share of coordinates whose √v̂ exceeds that ε or √ε, in the round where this
share is largest; the cell is empty if no run recorded it.
"""
CONCLUSION = """\
The root mean square of √v̂ is therefore at most {percent:.1f}% of the ε or √ε that it competes with. By Markov's
inequality, at most {share:.1f}% of coordinates can exceed a tenth of that ε or √ε. With the paper's ε, all of these
methods are close to FedAvg with momentum at the rate in the last column, and runs with the same rate should differ
little.
"""


@dataclass(frozen=True)
class Scale:
    """The steps of a run: their rate if v̂ is small, and how small v̂ is."""

    label: str
    at_most: float
    """A bound on the root of the mean of v̂ over the coordinates, in any round and with any seed."""
    floor: float
    """ε, or √ε for FedAMS."""
    rate: float
    """lr divided by the floor."""
    off_floor: float | None
    """The largest share of coordinates off the floor in any round; None if no run recorded it."""


def scale(done: Done) -> Scale | None:
    """Return the scale of a run, or None if its server is not adaptive."""
    optimizer = server(done.run.experiment.server)
    if not isinstance(optimizer, Adaptive):
        return None
    d = done.run.records[0].paper_bits_down / 32  # a dense model, by the paper's rule
    every = [[record.delta_norm for record in run.records] for run in done.runs]
    bound = max(highest(optimizer, norms, d) for norms in every)
    floor = math.sqrt(optimizer.eps) if optimizer.name == "fedams" else float(optimizer.eps)
    most = max((share for run in done.runs for share in run.recorded("off_floor") if share is not None), default=None)
    return Scale(done.label, bound, floor, float(optimizer.lr) / floor, most)


def _cells(each: Scale) -> list[str]:
    above = "" if each.off_floor is None else f"{100 * each.off_floor:.2g}%"
    return [each.label, f"at most {each.at_most:.1e}", f"{each.floor:.3g}", above, f"{each.rate:.3g}"]


def highest(optimizer: Adaptive, norms: list[float], d: float) -> float:
    """Return a bound on the root of the mean of v, and of v̂, in any round of a run with updates of these norms.

    Where the bias correction divides v, it divides the bound: with the floor of a round, which falls in the same way.
    """
    sums = accumulate(norm**2 for norm in norms)
    corrected = [total * optimizer.floor(10**9) / optimizer.floor(t) for t, total in enumerate(sums, 1)]
    return math.sqrt((1 - float(optimizer.beta2)) * max(corrected) / d)


def scales(results: Results) -> Iterator[str]:
    """Yield a table of the runs of the first figure, and what follows from it."""
    runs = [(words.MODELS[model], done) for model in words.MODELS for done in results.of(f"fig1-{model}")]
    found = [(model, each) for model, done in runs if (each := scale(done))]
    if not found:
        return
    yield WORDS
    rows = [[model, *_cells(each)] for model, each in found]
    heads = "model | run | √v̂, root mean square | ε, or √ε | above it, at most | rate where v̂ is small"
    yield from table(heads, "llrrrr", rows)
    most = max(each.at_most / each.floor for _, each in found)
    yield CONCLUSION.format(percent=100 * most, share=100 * (most / 0.1) ** 2)
