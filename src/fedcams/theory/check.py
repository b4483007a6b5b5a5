"""What the theorems say about one run: its constants, both bounds with every term, conditions, and its regime."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fedcams.engines import Shards
from fedcams.experiment import Experiment
from fedcams.experiment.assembly import assemble
from fedcams.optimizers.base import Adaptive, ServerOptimizer
from fedcams.optimizers.fedadagrad import FedAdagrad
from fedcams.probes.floor import RARELY
from fedcams.simulation import RoundRecord
from fedcams.theory.constants import Instance, constants_of
from fedcams.theory.describe import failures, setting_of
from fedcams.theory.measure import Measured
from fedcams.theory.paper import printed, theorem
from fedcams.theory.proved import sound
from fedcams.theory.setting import BOUND, LOWER, Bound, Constants, Setting


@dataclass(frozen=True)
class Checked:
    """One run against the theorems."""

    label: str
    theorem: int
    constants: Constants
    run: Setting
    bounds: tuple[Bound, Bound]
    """The paper's, as printed, and the one proved in docs/theory.md."""
    fails: list[str]
    """The assumptions that do not hold, and what the bounds use instead."""
    regime: str
    twin: str
    """The FedAvgM that the server equals while v̂ is on its floor; empty if there is none."""
    seen: dict[str, float]
    """What a recorded run measured: the mean of `gradient_sq`, the largest `q_max`, `gamma` and `off_floor`.

    With `theory_every`, also `measured_gradient_sq`, the mean of ‖∇f‖² from the gradients themselves, and
    `measured_rounds`, the number of rounds behind it.
    """
    may_leave: float | None
    """The share of coordinates that can ever have left the floor, by the norms of the recorded updates."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON stores it."""
        found = dataclasses.asdict(self)
        for text, bound in zip(found["bounds"], self.bounds, strict=True):
            text |= {"value": _finite(bound.value), "admissible": bound.admissible}
            text["terms"] = {name: _finite(term) for name, term in bound.terms.items()}
            for shown, condition in zip(text["conditions"], bound.conditions, strict=True):
                shown |= {"holds": condition.holds, "allowed": _finite(condition.allowed)}
        found["alpha"], found["u"] = self.run.alpha, self.run.adaptivity(self.constants)
        return found


def check(
    experiment: Experiment,
    records: Sequence[RoundRecord] = (),
    data: Path | None = None,
    measured: Sequence[Measured] = (),
) -> Checked:
    """Check an experiment, or a run by its records, against the theorems; refuses missing data.

    `measured` is what a run with `theory_every` measured; otherwise constants that are not known are measured at the
    start. If an assumption does not hold, `fails` lists it, and the bound is that of the closest case.
    """
    loaded = experiment.task.load(data)
    built = assemble(dataclasses.replace(experiment, engine="loop"), loaded)
    problem, seen = built.simulation.problem, _seen(records) | _measured_gradient(measured)
    assert isinstance(problem.clients, Shards)
    sizes = problem.clients.sizes()
    known = constants_of(Instance(experiment, problem, loaded, built.state.x), measured)
    run = setting_of(experiment, sizes, problem.layout, seen.get("gamma", 0.0))
    fails = [*failures(experiment, problem, sizes), *_of_the_run(records, run, seen)]
    fails += _of_constants(experiment, known, measured)
    run = dataclasses.replace(run, q=min(run.q, seen.get("q_max") or run.q))
    server = experiment.server
    twin = server.twin(digits=3)
    return Checked(
        label=experiment.label,
        theorem=theorem(run),
        constants=known,
        run=run,
        bounds=(printed(known, run), sound(known, run)),
        fails=fails,
        regime=_regime(known, run, server, seen.get("off_floor"), certain=not fails and known.how["G"] == BOUND),
        twin="" if twin is None else twin.spelled_out(),
        seen=seen,
        may_leave=may_leave(records, server, known.d),
    )


def _of_the_run(records: Sequence[RoundRecord], run: Setting, seen: Mapping[str, float]) -> Iterator[str]:
    """Yield the assumptions that the records show to fail, or that measurements replace; `run` has the proven q."""
    if refusing := sum(bool(record.refused) for record in records):
        yield f"fixed n: the server refused updates in {refusing} of {len(records)} rounds"
    if 0 < (largest := seen.get("q_max", 0.0)) < run.q:
        yield f"a proven q: the largest measured, {largest:.4g}, replaces the proven {run.q:.6g}"
    if run.q and run.full and "gamma" in seen:
        yield f"a proven γ: the bound uses the largest measured, {run.gamma:.4g}"
    elif run.q and run.full:
        yield "a known γ: it was not measured, so the bound uses 0; the probe gamma records it"


def _of_constants(experiment: Experiment, known: Constants, measured: Sequence[Measured]) -> Iterator[str]:
    """Yield which constants are not proven everywhere."""
    if known.how["L"].startswith(LOWER):
        count = len(measured) + (len(measured) > 0 and measured[0].round > 1)  # the start counts too
        when = f"in {count} round{'s' * (count > 1)}" if measured else "at the start"
        yield f"known constants: those of {experiment.task} are measured {when}, so L and G may be larger"
    if "no farther" in known.how.get("G", ""):
        yield "bounded gradients: those of a quadratic are not; G holds while x stays as near the minimum as x_1"


def may_leave(records: Sequence[RoundRecord], server: ServerOptimizer, d: int) -> float | None:
    """Return a bound on the share of coordinates whose v̂ ever left the floor, from the norms of mean updates.

    In every coordinate `v_t` is at most the sum of (1-β2) Δ², or of Δ² with fedadagrad, so at most the sum of
    (1-β2) ‖Δ‖²/floor coordinates exceed the floor. Bias correction raises some floors from step to step: each Δ² then
    counts by the floor of its own step. None without records, and for servers without a floor or whose floor or β2
    follows a schedule.
    """
    moving = {place for place, _ in server.schedules()} & {"eps", "beta2"}
    if not records or moving or not isinstance(server, Adaptive | FedAdagrad):
        return None
    server = server.at(1, len(records))
    weight = 1 - float(server.beta2) if isinstance(server, Adaptive) else 1.0
    norms = [record.delta_norm for record in records if record.delta_norm]  # one for each step of the server
    return min(1.0, weight * math.fsum(norm**2 / server.floor(t) for t, norm in enumerate(norms, 1)) / d)


def _regime(known: Constants, run: Setting, server: ServerOptimizer, off_floor: float | None, certain: bool) -> str:
    """Return where v̂ was, if a run recorded it, and where it can be otherwise.

    `certain` says whether all assumptions hold with proven constants; if not, u is only an estimate.
    """
    if not run.adapts:
        return "not adaptive, like FedAMS on its floor; the printed theorems are about FedAMS, here with ε = 1"
    if off_floor is not None:
        name = "floor" if off_floor < RARELY else "mixed" if off_floor < 0.5 else "adaptive"
        return f"{name}, as measured: v̂ left its floor in at most {100 * off_floor:.4g}% of coordinates"
    if isinstance(server, FedAdagrad):
        return (
            "open: v̂ adds up all updates, so it may leave its floor whatever u is; a recorded run shows whether it does"
        )
    if run.adaptivity(known) > 1:
        return "open: u > 1, so v̂ may leave its floor; a recorded run shows whether it does"
    if not certain:
        return "probably floor: u ≤ 1, but not all assumptions behind it are proven; a recorded run shows where v̂ was"
    if not run.inside:
        return "floor: √v̂ never exceeds ε, so steps are 1/(1 + u) to 1 times those of the FedAvgM twin"
    return "floor: v̂ can never leave it, so the server is its FedAvgM twin"


def _seen(records: Sequence[RoundRecord]) -> dict[str, float]:
    def known(name: str) -> list[float]:
        return [value for record in records if (value := record.probes.get(name)) is not None]

    found = {name: max(values) for name in ("q_max", "gamma", "off_floor") if (values := known(name))}
    return found | ({"gradient_sq": fmean(values)} if (values := known("gradient_sq")) else {})


def _measured_gradient(lines: Sequence[Measured]) -> dict[str, float]:
    """Return the mean of the measured ‖∇f‖² over all rounds from the first measured one, interpolated, and its source.

    Measured rounds are not evenly spread: the first and the last are always among them.
    """
    known = [(line.round, value) for line in lines if (value := line.gradient_sq_of_all) is not None]
    if not known:
        return {}
    rounds, values = zip(*known, strict=True)
    mean = float(np.interp(np.arange(rounds[0], rounds[-1] + 1), rounds, values).mean())
    return {"measured_gradient_sq": mean, "measured_rounds": len(known)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
