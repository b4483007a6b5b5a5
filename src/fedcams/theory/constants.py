"""The constants of a problem: exact for `quadratic` and `logistic`, measured at the start of a run elsewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedcams.engines import Problem, Shards
from fedcams.experiment import Experiment
from fedcams.keys import generator
from fedcams.local import Local, batch_order
from fedcams.tasks import TaskData
from fedcams.tasks.logistic import Logistic
from fedcams.tasks.quadratic import Quadratic, noise
from fedcams.theory.setting import BOUND, ESTIMATE, EXACT, LOWER, Constants

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE = 10
"""Clients, batches of each and products with the Hessian, where constants are measured."""


@dataclass(frozen=True)
class Instance:
    """One experiment on its data: the problem, the data, and the model `x [d]` that it starts from."""

    experiment: Experiment
    problem: Problem
    data: TaskData
    x: Tensor


def constants_of(one: Instance) -> Constants:
    """Return the constants of an experiment's problem, and how each is known."""
    task = one.experiment.task
    own = str(one.experiment.model) == task.model  # those of another model on the same data are not known
    if isinstance(task, Quadratic) and own:
        return _quadratic(one, task)
    if isinstance(task, Logistic) and own:
        return _logistic(one, task)
    return _measured(one)


def batch_factor(local: Local, examples: int) -> float:
    """Return the variance of the mean of a batch over that of one example; drawing without replacement lowers it.

    The batch is the smallest of a round: an epoch's last one may have fewer examples than the others.
    """
    batch = min(batch_order(local, examples, seed=0, round=1, client=0).sizes)
    alike = 1.0 if local.replace or examples == 1 else 1 - (batch - 1) / (examples - 1)
    return alike / batch


# -- exact ---------------------------------------------------------------------------------------------------------


def _quadratic(one: Instance, task: Quadratic) -> Constants:
    shards = _shards(one.problem)
    found = noise(task.gradients(one.data, one.x), shards)
    curvature = task.curvature().double()
    centre = torch.stack([one.data.train_x[rows].double().mean(0) for rows in shards]).mean(0)
    away = one.x.double() - centre
    spread = float((curvature * (one.data.train_x.double() - centre)).norm(dim=1).max())
    return Constants(
        L=float(task.smoothness),
        G=float(task.smoothness) * float(away.norm()) + spread,
        s_l=found.sigma_l * math.sqrt(max(batch_factor(one.experiment.local, len(rows)) for rows in shards)),
        s_g=found.sigma_g,
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


def _measured(one: Instance) -> Constants:
    """Measure at the start: full and batch gradients of some clients, and the largest curvature of one of them."""
    problem, ids = one.problem, list(one.problem.clients)
    chosen = sorted(generator(0, "theory").choice(len(ids), min(SAMPLE, len(ids)), replace=False).tolist())
    examples = [problem.examples_of(ids[i]) for i in chosen]
    full = torch.stack([gradient(problem, x, y) for x, y in examples])
    apart, longest = [], 0.0
    for (x, y), i in zip(examples, chosen, strict=True):
        batches = [gradient(problem, x[rows], y[rows]) for rows in _batches(one, len(x), i)]
        longest = max(longest, *(float(each.norm()) for each in batches))
        apart.append(np.mean([float((a - b).square().sum()) / 2 for a, b in itertools.pairwise(batches)]))
    start = float(np.mean([_loss(problem, x, y) for x, y in examples]))
    where = f"at the start, {len(chosen)} of {len(ids)} clients"
    return Constants(
        L=curvature(problem, *examples[0]),
        G=longest,
        s_l=math.sqrt(max(apart)),
        s_g=math.sqrt(float((full - full.mean(0)).square().sum(1).mean())),
        F=start,
        d=problem.layout.d,
        how={
            "L": f"{LOWER}, {where}", "G": f"{LOWER}, {where}", "s_l": f"{ESTIMATE}, {where}",
            "s_g": f"{ESTIMATE}, {where}", "F": f"{BOUND} if the loss is never negative, {where}",
        },
    )  # fmt: skip


def _batches(one: Instance, examples: int, client: int) -> Sequence[Tensor]:
    rng, local = generator(0, "theory batches", client=client), one.experiment.local
    size = min(local.batch, examples)
    return [torch.from_numpy(rng.choice(examples, size, replace=local.replace)) for _ in range(SAMPLE)]


def gradient(problem: Problem, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient `[d]` of the mean loss of some examples at the model's current parameters."""
    parameters = [p for p in problem.model.parameters() if p.requires_grad]
    loss = problem.loss(problem.model.train()(problem.prepare(x)), y).mean()
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])


def curvature(problem: Problem, x: Tensor, y: Tensor) -> float:
    """Return the largest eigenvalue, in magnitude, that power iteration finds of the Hessian on some examples."""
    parameters = [p for p in problem.model.parameters() if p.requires_grad]
    loss = problem.loss(problem.model.train()(problem.prepare(x)), y).mean()
    slope = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters, create_graph=True)])
    v = torch.from_numpy(generator(0, "theory curvature").standard_normal(slope.numel())).to(slope)
    length = v.norm()
    for _ in range(SAMPLE):
        v = v / length
        parts = torch.autograd.grad(slope @ v, parameters, retain_graph=True)
        v = torch.cat([part.flatten() for part in parts])
        length = v.norm()
    return float(length)


def _loss(problem: Problem, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(problem.loss(problem.model.train()(problem.prepare(x)), y).mean())
