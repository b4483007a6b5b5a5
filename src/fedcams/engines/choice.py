"""The engine of a run: the one named, or the fastest that trains a model as `loop` does."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import torch
from torch import Tensor

from fedcams.engines.base import CohortUpdate, Engine, engine
from fedcams.engines.problem import Problem
from fedcams.errors import SpecError
from fedcams.local import local
from fedcams.registry import registered

SIZES = (3, 2)
"""Examples of the two clients of a trial: uneven, so that padding would show."""
APART = 0.02
"""Relative; rounding stays far below, a buffer that is lost or a batch that is mixed far above."""


def choose(spec: str | Engine, problem: Problem, rounds: int = 1, varies: bool = False) -> Engine:
    """Returns the engine that a spec names, or with `auto` the fastest for a run of so many rounds.

    `varies` says that cohorts differ in size. `auto` asks engines by priority whether they support the problem, and
    tries those that cannot know; `loop` trains everything. The choice depends on the machine and the arguments alone,
    so a resumed run continues with the same engine. Refuses, before anything runs, an engine that cannot train it.
    """
    if spec != "auto":
        chosen = engine(spec)
        if reason := chosen.supports(problem):
            raise SpecError(reason)
        return chosen
    names = sorted(registered("engine"), key=lambda name: -engine(name).priority)
    able = (each for each in map(engine, names) if not each.supports(problem))
    return next(each for each in able if not each.needs_trial or agrees(each, problem)).tuned(problem, rounds, varies)


def agrees(candidate: Engine, problem: Problem) -> bool:
    """Returns whether an engine takes a step of two small clients as `loop` does.

    A user's own code may branch on data, draw, write in place or look at a whole batch, which is not known before it
    runs. The price is a copy of the model and a few examples.
    """
    x, y = problem.examples_of(next(iter(problem.clients)))
    few = [torch.arange(size, device=x.device) % len(x) for size in SIZES]
    clients = {client: (x[at], y[at]) for client, at in enumerate(few)}
    small = dataclasses.replace(problem, clients=clients, local=local(f"sgd(lr=1, batch={max(SIZES)})"))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "There is a performance drop")  # what vmap cannot batch is no faster
            ours = _train(candidate, small)
        return _alike(ours, _train(engine("loop"), small))
    except Exception:  # whatever a model raises; should `loop` raise it too, it does so again where it is seen
        return False


def _train(by: Engine, problem: Problem) -> CohortUpdate:
    own = dataclasses.replace(problem, model=copy.deepcopy(problem.model))
    return by.train(own, *own.read(), list(own.clients), round=1, seed=0)


def _alike(ours: CohortUpdate, truth: CohortUpdate) -> bool:
    if ours.buffers is not None and truth.buffers is not None and not _close(ours.buffers, truth.buffers):
        return False
    return _close(ours.delta, truth.delta)


def _close(ours: Tensor, truth: Tensor) -> bool:
    return float((ours - truth).norm()) <= APART * float(truth.norm())
