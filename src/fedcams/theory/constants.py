"""The constants of a problem: exact for `quadratic` and `logistic`, elsewhere measured in a run or at its start."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.engines import Problem, Shards
from fedcams.errors import SpecError
from fedcams.experiment import Experiment
from fedcams.local import Local, batch_order
from fedcams.tasks import TaskData
from fedcams.tasks.logistic import Logistic
from fedcams.tasks.quadratic import Quadratic, noise
from fedcams.theory.gradients import Point
from fedcams.theory.measure import Measured, measure
from fedcams.theory.setting import BOUND, ESTIMATE, EXACT, LOWER, Constants

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Instance:
    """One experiment on its data: the problem, the data, and the model `x [d]` that it starts from."""

    experiment: Experiment
    problem: Problem
    data: TaskData
    x: Tensor


def constants_of(one: Instance, lines: Sequence[Measured] = ()) -> Constants:
    """Return the constants of an experiment's problem, and how each is known; `lines` are what its run measured.

    Refuses a problem whose constants cannot be measured at all, for example without second derivatives.
    """
    task = one.experiment.task
    own = str(one.experiment.model) == task.model  # those of another model on the same data are not known
    if isinstance(task, Quadratic) and own:
        return _quadratic(one, task)
    if isinstance(task, Logistic) and own:
        return _logistic(one, task)
    return _measured(one, lines)


def batch_factor(local: Local, examples: int) -> float:
    """Return the variance of a batch's mean divided by that of one example; drawing without replacement lowers it.

    The batch is the smallest of a round: an epoch's last one may have fewer examples than the others.
    """
    batch = min(batch_order(local, examples, seed=0, round=1, client=0).sizes)
    alike = 1.0 if local.replace or examples == 1 else 1 - (batch - 1) / (examples - 1)
    return alike / batch


# -- exact ---------------------------------------------------------------------------------------------------------


def _quadratic(one: Instance, task: Quadratic) -> Constants:
    shards = _shards(one.problem)
    gradients = task.gradients(one.data, one.x)
    local = one.experiment.local
    curvature = task.curvature().double()
    centre = torch.stack([one.data.train_x[rows].double().mean(0) for rows in shards]).mean(0)
    away = one.x.double() - centre
    spread = float((curvature * (one.data.train_x.double() - centre)).norm(dim=1).max())
    return Constants(
        L=float(task.smoothness),
        G=float(task.smoothness) * float(away.norm()) + spread,
        s_l=max(noise(gradients, [rows]).sigma_l * batch_factor(local, len(rows)) ** 0.5 for rows in shards),
        s_g=noise(gradients, shards).sigma_g,
        F=0.5 * float((curvature * away.square()).sum()),
        d=one.problem.layout.d,
        how={"L": EXACT, "G": f"{BOUND}, no farther from the minimum than x_1", "s_l": EXACT, "s_g": EXACT, "F": EXACT},
    )


def _logistic(one: Instance, task: Logistic) -> Constants:
    factor = max(batch_factor(one.experiment.local, len(rows)) for rows in _shards(one.problem))
    return Constants(
        L=task.smoothness,
        G=math.sqrt(2),
        s_l=task.sigma_l * math.sqrt(factor),
        s_g=task.sigma_g,
        F=logistic_gap(one),
        d=one.problem.layout.d,
        how={"L": BOUND, "G": BOUND, "s_l": BOUND, "s_g": BOUND, "F": EXACT},
    )


def logistic_gap(one: Instance) -> float:
    """Return f(x_1) - min f of a logistic experiment, by L-BFGS in float64."""
    x, y, weights = one.data.train_x.double(), one.data.train_y, client_weights(one.problem, len(one.data.train_y))
    start = one.x.double().view(-1, x.shape[1])
    w = start.clone().requires_grad_()

    def f(at: Tensor) -> Tensor:
        return (weights * torch.nn.functional.cross_entropy(x @ at.T, y, reduction="none")).sum()

    search = torch.optim.LBFGS([w], max_iter=1000, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        value = f(w)
        value.backward()
        return value

    search.step(closure)
    return float(f(start)) - float(f(w.detach()))


def client_weights(problem: Problem, examples: int) -> Tensor:
    """Return the weight of each example in f, the mean over clients of the means over their examples, `[examples]`."""
    weights, shards = torch.zeros(examples, dtype=torch.float64), _shards(problem)
    for rows in shards:
        weights[rows] += 1 / (len(shards) * len(rows))
    return weights


def _shards(problem: Problem) -> list[Tensor]:
    assert isinstance(problem.clients, Shards)
    return [torch.from_numpy(part) for part in problem.clients.parts]


# -- measured ------------------------------------------------------------------------------------------------------


def _measured(one: Instance, lines: Sequence[Measured] = ()) -> Constants:
    """Return the largest values that a run measured; if it did not measure the start, that is measured now."""
    if not lines or lines[0].round != 1:
        lines = [measure(one.problem, Point(one.x, None), after=None, done=0), *lines]
    known, first, where = _values(lines), _where(lines[:1]), _where(lines)
    if unknown := [name for name, value in known.items() if math.isnan(value) or (name == "L" and not value)]:
        why = "; ".join(dict.fromkeys(reason for line in lines for reason in line.missing.values())) or "it is 0"
        fix = "check a run with theory_every" if unknown == ["L"] else "check another model or task"
        raise SpecError(f"model={one.experiment.model}: {', '.join(unknown)} cannot be measured ({why}); {fix}")
    bound = BOUND if lines[0].clients == lines[0].population else f"{ESTIMATE} of a bound"
    how = {
        "L": f"{LOWER}, {_where(lines, _clients_behind_l(lines))}", "G": f"{LOWER}, {where}",
        "s_l": f"{ESTIMATE}, {where}", "s_g": f"{ESTIMATE}, {where}",
        "F": f"{bound} if the loss is never negative, {first}",
    }  # fmt: skip
    return Constants(**known, d=one.problem.layout.d, how=how)


def _values(lines: Sequence[Measured]) -> dict[str, float]:
    """Return the largest L, by both ways to measure it, G, s_l and s_g, and the first loss; NaN where there is none."""

    def largest(name: str) -> float:
        values = (getattr(line, name) for line in lines)
        return max((value for value in values if value is not None), default=math.nan)

    start = lines[0].loss
    return {
        "L": largest("smoothness"), "G": largest("G"), "s_l": largest("s_l"), "s_g": largest("s_g"),
        "F": math.nan if start is None else start,
    }  # fmt: skip


def _clients_behind_l(lines: Sequence[Measured]) -> set[int]:
    """Return from how many clients the largest L is: the curvature is that of one client, the secant that of all."""
    power = max((line.L_power for line in lines if line.L_power is not None), default=-math.inf)
    secant = max((line.L_secant for line in lines if line.L_secant is not None), default=-math.inf)
    return {1} if power > secant else {line.clients for line in lines if line.L_secant is not None}


def _where(lines: Sequence[Measured], of: Collection[int] = ()) -> str:
    """Return when and at how many clients these lines were measured; `of` are these counts, if not those of lines."""
    counts = sorted(of or {line.clients for line in lines})
    clients = f"{'-'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} of {lines[0].population} clients"
    if len(lines) == 1 and lines[0].round == 1:
        return f"at the start, {clients}"
    return f"the largest in {len(lines)} rounds from {lines[0].round} to {lines[-1].round}, {clients} each"
