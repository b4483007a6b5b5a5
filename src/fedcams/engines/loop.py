"""The reference engine: one client after the other, one batch after the other, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.engines.base import CohortUpdate, Engine, local_rate, rows
from fedcams.engines.problem import Problem
from fedcams.engines.trees import Tree, call, size, take
from fedcams.keys import derive, seed_torch, torch_generator
from fedcams.local import BatchOrder, batch_order
from fedcams.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("loop")
@dataclass(frozen=True)
class Loop(Engine):
    """Trains one client after the other, as you would write it by hand: short, slow, and the reference."""

    examples = ("loop",)

    def supports(self, problem: Problem) -> str:
        return ""

    def train(
        self, problem: Problem, start: Tensor, buffers: Tensor | None, cohort: Sequence[int], round: int, seed: int,
        *, rate: float | None = None, shift: Tensor | None = None,
    ) -> CohortUpdate:  # fmt: skip
        used = local_rate(problem, rate)
        starts = rows(start, cohort)
        held = [None] * len(cohort) if buffers is None else list(rows(buffers, cohort))
        shifts = [None] * len(cohort) if shift is None else list(shift)
        clients = zip(cohort, starts, held, shifts, strict=True)
        results = [_train_one(problem, x, b, client, round, seed, used, added) for client, x, b, added in clients]
        deltas, after, losses, examples, steps = zip(*results, strict=True)
        kept = None if buffers is None else torch.stack(after)
        return CohortUpdate(torch.stack(deltas), kept, torch.stack(losses), list(examples), list(steps), used)


def _train_one(
    problem: Problem, start: Tensor, buffers: Tensor | None, client: int, round: int, seed: int, rate: float,
    shift: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, int, int]:  # fmt: skip
    """Return the change `[d]`, the buffers `[b]`, the mean loss, and the numbers of examples and steps."""
    problem.model.train()
    problem.rewind()
    problem.load(start, buffers)
    x, y = problem.examples_of(client)
    steps = batch_order(problem.local, size(x), seed, round, client)
    draws = problem.draws(len(steps.order), seed, round, client)
    received = start.detach().to(problem.device, problem.dtype)
    row = received.clone()[None]
    gpu = [problem.device] if problem.device.type == "cuda" else []
    with torch_generator(gpu), problem.naming([client]):
        seed_torch(derive(seed, "dropout", round, client), problem.device)
        total = _descend_(row, problem, x, y, steps, draws, rate, shift)
    left = None
    if buffers is not None and problem.buffer_layout is not None:
        left = problem.buffer_layout.read(problem.model, out=torch.empty_like(buffers))
    return row[0].to(start) - received.to(start), left, total / len(steps.order), size(x), len(steps.sizes)


def _descend_(
    row: Tensor, problem: Problem, x: Tree, y: Tree, steps: BatchOrder, draws: Tensor | None, rate: float,
    shift: Tensor | None,
) -> Tensor:  # fmt: skip
    """Take all steps of the model `row [1, d]`; returns the sum of the losses of all examples seen."""
    model, rule = problem.model, problem.local.in_sections(problem.layout.sizes)
    parameters = [p for p in model.parameters() if p.requires_grad]
    slots = rule.init(row)
    total, seen = torch.zeros((), dtype=problem.sum_dtype, device=problem.device), 0
    for batch in steps.batches():
        chosen = torch.from_numpy(batch).to(problem.device)
        inputs, targets = take(x, chosen), take(y, chosen)
        changes = None if draws is None else draws[seen : seen + len(batch)]
        loss = problem.loss(call(model, problem.inputs(inputs, changes)), targets).mean()
        _take_over_(row[0], parameters)
        parts = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        gradient = torch.cat([part.to_dense().flatten() for part in parts])[None].to(row.dtype)
        if shift is not None:
            gradient.add_(shift)
        rule.step_(row, gradient, slots, rate)
        problem.load(row[0], None)
        total, seen = total + loss.detach().to(total) * len(batch), seen + len(batch)
    return total


def _take_over_(row: Tensor, parameters: Sequence[Tensor]) -> None:
    """Copy what forward changed in the parameters, as `max_norm` does, into the row `[d]`."""
    if all(p.dtype == row.dtype for p in parameters):
        torch.cat([p.detach().flatten() for p in parameters], out=row)
        return
    for part, p in zip(row.split([p.numel() for p in parameters]), parameters, strict=True):
        held = p.detach().flatten()  # a narrow type holds the row rounded
        part.copy_(torch.where(held == part.to(held.dtype), part, held.to(part.dtype)))
