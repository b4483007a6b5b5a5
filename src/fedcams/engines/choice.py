"""Choose the engine of a run: the one that is named, or the fastest one that trains the model as `loop` does."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import TYPE_CHECKING

import torch

from fedcams.engines.base import CohortUpdate, Engine, engine
from fedcams.engines.problem import Problem
from fedcams.engines.trees import size, take
from fedcams.errors import SpecError
from fedcams.local import local
from fedcams.registry import registered

if TYPE_CHECKING:
    from torch import Tensor

SIZES = (3, 2)
"""The numbers of examples of a trial's two clients; they differ, so that errors in padding would show."""
APART = 0.02
"""Relative; rounding errors are far smaller, and errors from a lost buffer or mixed batches far larger."""


def choose(spec: str | Engine, problem: Problem, rounds: int = 1, varies: bool = False) -> Engine:
    """Return the engine that a spec names or, with `auto`, the fastest one for a run of this many rounds.

    `varies` says that cohorts differ in size. `auto` asks engines by priority whether they support the problem, and
    runs a trial with those that cannot know; `loop` trains everything. The choice depends only on the machine and the
    arguments, so a resumed run continues with the same engine. Refuses an engine that cannot train the problem.
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
    """Return whether an engine takes the same step as `loop` with two small clients.

    A user's own code may branch on data, draw random numbers, write in place or depend on the whole batch; only running
    it shows. This costs a copy of the model and training on a few examples.
    """
    own = problem.examples_of(next(iter(problem.clients)))
    few = [torch.arange(count, device=problem.device) % size(own) for count in SIZES]
    clients = {client: take(own, at) for client, at in enumerate(few)}
    small = dataclasses.replace(problem, clients=clients, local=local(f"sgd(lr=1, batch={max(SIZES)})"))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "There is a performance drop")  # what vmap cannot batch is no faster
            ours = _train(candidate, small)
        return _alike(ours, _train(engine("loop"), small))
    except Exception:  # a model may raise anything; if `loop` raises it too, the run will show the error
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
