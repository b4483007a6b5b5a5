"""What docs/theory.md measures: runs on quadratics through the package's own rounds, kept as numbers in one file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from fedcams.experiment import build
from fedcams.tasks.quadratic import Quadratic
from fedcams.theory import Bound, rates, sound
from fedcams.theory.check import check
from fedcams.theory.rates import Trial

DOCS = Path(__file__).resolve().parents[1] / "docs"
FILE = DOCS / "theory" / "measured.json"
SEEDS = (1,)
PARTIAL = Trial(T=256, m=32, n=4, sigma_l=0.25, sigma_g=1.0)
UPLINKS = ("identity", "sign", "topk(ratio=1/16)")
GAMMA = Trial(T=400, K=1, m=8, sigma_l=0, dim=64, rate=40.0, condition=2)


def trials() -> Iterator[tuple[str, Trial]]:
    """Yield every trial with the name of the picture that shows it."""
    for axis, values in rates.FULL.items():
        for value in values:
            for seed in SEEDS:
                changed: dict[str, Any] = {axis: value, "seed": seed}
                yield f"rates {axis}", dataclasses.replace(rates.BASE["full"], **changed)
    for by_steps in (True, False):
        for steps in rates.FULL["K"]:
            yield "partial", dataclasses.replace(PARTIAL, K=steps, by_steps=by_steps)
    for uplink in UPLINKS:
        for rounds in rates.FULL["T"][:4]:
            yield "compression", Trial(T=rounds, uplink=uplink)
    for power in range(1, 9):
        yield "epsilon", Trial(T=256, factor=0.1, eps=10.0**-power)


def run(file: Path) -> None:
    """Run everything on two processes, and write what it gave."""
    file.parent.mkdir(parents=True, exist_ok=True)
    names, todo = zip(*trials(), strict=True)
    with get_context("spawn").Pool(2, torch.set_num_threads, (1,)) as pool:
        dissimilar = pool.map_async(gamma, (0.05, 0.2))
        found = pool.map(measured, todo, chunksize=1)
        curves = dissimilar.get()
    points = [{"of": name, **each} for name, each in zip(names, found, strict=True)]
    file.write_text(json.dumps({"points": points, "gamma": curves}, indent=1) + "\n")


def stored(file: Path) -> dict[str, Any]:
    """Return what was measured."""
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def measured(trial: Trial) -> dict[str, Any]:
    """Return the numbers of one trial, with the proved bound for it."""
    given, found = dataclasses.asdict(trial), rates.measure(trial)
    bound = bound_of(trial, found.off_floor)
    given |= {"average": found.average, "late": found.late, "off_floor": found.off_floor}
    return {name: value for name, value in given.items() if value is not None} | {
        "bound": bound.value, "admissible": bound.admissible,
    }  # fmt: skip


def bound_of(trial: Trial, off_floor: float) -> Bound:
    """Return the proved bound of a trial; if v̂ never left its floor, that of the FedAvgM which the run was."""
    checked = check(trial.experiment)
    return sound(checked.constants, dataclasses.replace(checked.run, adapts=checked.run.adapts and off_floor > 0))


def gamma(sigma_g: float) -> dict[str, Any]:
    """Return ‖∇f‖ and γ of every round of a run whose clients differ by sigma_g."""
    experiment = dataclasses.replace(
        dataclasses.replace(GAMMA, uplink="sign", sigma_g=sigma_g).experiment, probes=_probe()
    )
    built = build(experiment)
    state, norms, gammas = built.state, [], []
    assert isinstance(experiment.task, Quadratic)
    curvature = experiment.task.curvature().double()
    for _ in range(experiment.rounds):
        norms.append(float((curvature * (state.x.double() - 1)).norm()))
        state, record = built.simulation.advance_(state)
        gammas.append(record.probes["gamma"])
    return {"sigma_g": sigma_g * (0.8 * GAMMA.dim) ** 0.5, "norm": norms, "gamma": gammas}


def _probe() -> tuple[Any, ...]:
    from fedcams.probes import Probe

    return (Probe.parse("gamma"),)
