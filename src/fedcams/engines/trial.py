"""Whether an engine trains a model as `loop` does, tried on a few examples."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import torch
from torch import Tensor

from fedcams.engines.base import Engine, engine
from fedcams.engines.problem import Problem, Update
from fedcams.local import SGD

SIZES = (3, 2)
"""Examples of the two clients of a trial: uneven, so that padding would show."""
APART = 0.02
"""Relative; rounding stays far below, a buffer that is lost or a batch that is mixed far above."""


def agrees(candidate: Engine, problem: Problem) -> bool:
    """Whether a step of two small clients comes out alike.

    Code of one's own may branch on data, draw, write in place or look at a whole batch, which is not known before it
    runs. The price is a copy of the model and a few examples.
    """
    x, y = problem.examples_of(next(iter(problem.clients)))
    few = [torch.arange(size, device=x.device) % len(x) for size in SIZES]
    clients = {client: (x[at], y[at]) for client, at in enumerate(few)}
    small = dataclasses.replace(problem, clients=clients, local=SGD(lr=1, batch=max(SIZES)))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "There is a performance drop")  # what vmap cannot batch is no faster
            ours = _train(candidate, small)
        return _alike(ours, _train(engine("loop"), small))
    except Exception:  # whatever a model raises; should `loop` raise it too, it does so again where it is seen
        return False


def _train(by: Engine, problem: Problem) -> Update:
    own = dataclasses.replace(problem, model=copy.deepcopy(problem.model))
    return by.train(own, *own.read(), list(own.clients), round=1, seed=0)


def _alike(ours: Update, truth: Update) -> bool:
    if ours.buffers is not None and truth.buffers is not None and not _close(ours.buffers, truth.buffers):
        return False
    return _close(ours.delta, truth.delta)


def _close(ours: Tensor, truth: Tensor) -> bool:
    return float((ours - truth).norm()) <= APART * float(truth.norm())
