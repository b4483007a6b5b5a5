"""The truth: one client after the other, one batch after the other, in plain PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcams.engines.base import Engine, rows
from fedcams.engines.problem import Problem, Update, naming
from fedcams.keys import derive
from fedcams.local import batches
from fedcams.local.schedule import Batch
from fedcams.registry import register

_GENERATOR = threading.RLock()
"""Layers that draw do so from torch's generator, which all threads share: one client at a time has it."""


@register("loop")
@dataclass(frozen=True)
class Loop(Engine):
    """Client after client, as one would write it by hand: short, slow, and the definition of what is right."""

    examples = ("loop",)

    def train(
        self, problem: Problem, start: Tensor, buffers: Tensor | None, cohort: Sequence[int], round: int, seed: int
    ) -> Update:
        starts = rows(start, cohort)
        held = [None] * len(cohort) if buffers is None else list(rows(buffers, cohort))
        results = [
            _train_one(problem, x, b, client, round, seed) for client, x, b in zip(cohort, starts, held, strict=True)
        ]
        deltas, after, losses, examples, steps = zip(*results, strict=True)
        kept = None if buffers is None else torch.stack(after)
        return Update(torch.stack(deltas), kept, torch.stack(losses), list(examples), list(steps))


def _train_one(
    problem: Problem, start: Tensor, buffers: Tensor | None, client: int, round: int, seed: int
) -> tuple[Tensor, Tensor | None, Tensor, int, int]:
    """delta `[d]`, buffers `[b]`, mean loss, examples, steps."""
    model, layout, buffer_layout = problem.model.train(), problem.layout, problem.buffer_layout
    problem.rewind()
    layout.write(start, model)
    if buffers is not None and buffer_layout is not None:
        buffer_layout.write(buffers, model)
    x, y = problem.examples_of(client)
    plan = batches(problem.local, len(x), seed, round, client)
    gpu = [problem.device] if problem.device.type == "cuda" else []
    with _GENERATOR, naming([client]), torch.random.fork_rng(devices=gpu):
        torch.manual_seed(derive(seed, "dropout", round, client))
        total = _descend(problem, model, x, y, plan, problem.draws(sum(map(len, plan)), seed, round, client))
    after = layout.read(model, out=torch.empty_like(start))
    left = None
    if buffers is not None and buffer_layout is not None:
        left = buffer_layout.read(model, out=torch.empty_like(buffers))
    return after - start, left, total / sum(map(len, plan)), len(x), len(plan)


def _descend(
    problem: Problem, model: nn.Module, x: Tensor, y: Tensor, plan: list[Batch], draws: Tensor | None
) -> Tensor:
    """All steps; returns the sum of the losses of all examples seen."""
    local = problem.local
    parameters = [p for p in model.parameters() if p.requires_grad]
    received = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.SGD(
        parameters, float(local.lr), float(local.momentum), weight_decay=float(local.weight_decay)
    )
    total, seen = torch.zeros((), dtype=problem.dtype, device=problem.device), 0
    for batch in plan:
        chosen = torch.from_numpy(batch).to(x.device)
        changes = None if draws is None else draws[seen : seen + len(batch)]
        loss = problem.loss(model(problem.inputs(x[chosen], changes)), y[chosen]).mean()
        optimizer.zero_grad()
        loss.backward()
        for p, w0 in zip(parameters, received, strict=True):
            if p.grad is not None:
                p.grad.add_(p.detach() - w0, alpha=float(local.prox))
        if local.clip is not None:
            nn.utils.clip_grad_norm_(parameters, float(local.clip))
        optimizer.step()
        total, seen = total + loss.detach() * len(batch), seen + len(batch)
    return total
