"""The whole cohort as one batched computation: every client's parameters are a row of one matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedcams.engines.base import Engine, rows
from fedcams.engines.batching import Step, steps
from fedcams.engines.compiled import compiled_gradients
from fedcams.engines.problem import Problem, Update, naming
from fedcams.errors import SpecError
from fedcams.local import SGD, batches
from fedcams.registry import flag, register

DRAWS = (nn.modules.dropout._DropoutNd, nn.RReLU)
"""Layers that draw from torch's generator, which a batched computation does in another order."""


@register("stacked")
@dataclass(frozen=True)
class Stacked(Engine):
    """All clients at once with torch.func; clients of uneven size are padded with examples of weight zero.

    Where padding would show (batch-norm, or a loss that is already a mean) clients are grouped by the size of their
    batch instead. Clients with more steps go on when the others are done.
    """

    compile: bool = flag(False, doc="compile a step with torch.compile: takes a C++ compiler and half a minute once")

    examples = ("stacked", "stacked(compile=true)")
    refused = (("stacked(compile=1)", "allowed: true or false"),)

    def train(
        self, problem: Problem, start: Tensor, buffers: Tensor | None, cohort: Sequence[int], round: int, seed: int
    ) -> Update:
        check_supported(problem.model)
        data = [problem.examples_of(client) for client in cohort]
        plans = [batches(problem.local, len(x), seed, round, c) for c, (x, _) in zip(cohort, data, strict=True)]
        order = sorted(range(len(cohort)), key=lambda i: -len(plans[i]))  # so that active rows are always the first
        received = rows(start, cohort)[order]
        stack = _Stack.of(problem, received, None if buffers is None else rows(buffers, cohort)[order])
        draws = [problem.draws(sum(map(len, plans[i])), seed, round, cohort[i]) for i in order]
        examples = _Examples(problem, [data[i] for i in order], draws)
        sizes = [len(data[i][0]) for i in order]
        padded, fixed = problem.may_pad, self._fixed_width(problem)
        gradients = _gradients if fixed is None else compiled_gradients(problem)
        problem.model.train()
        for step in steps([plans[i] for i in order], sizes, padded=padded, fixed=fixed):
            with naming([cohort[order[row]] for row in step.numbers]):
                stack.descend(examples, step.to(received.device), gradients)
        back = np.argsort(order)
        after = stack.joined_buffers()
        return Update(
            stack.parameters.sub_(received)[back],
            None if after is None else after[back],
            (stack.loss / stack.seen)[back],
            [len(x) for x, _ in data],
            [len(plan) for plan in plans],
        )

    def _fixed_width(self, problem: Problem) -> int | None:
        """The examples of every compiled step; None where nothing is compiled."""
        if not self.compile:
            return None
        if not problem.may_pad or any(True for _ in problem.model.buffers()):
            raise SpecError(f"{self}: only models without buffers and losses of each example compile; use stacked")
        return problem.local.batch


def check_supported(model: nn.Module) -> None:
    """Refuses a model whose layers draw random numbers."""
    for name, module in model.named_modules():
        if isinstance(module, DRAWS) and getattr(module, "p", 1.0) > 0:
            raise SpecError(f"engine=stacked: layer {name!r} is a {type(module).__name__} and draws; use engine=loop")


class _Examples:
    """The cohort's examples and augmentation draws, each laid end to end."""

    def __init__(self, problem: Problem, data: list[tuple[Tensor, Tensor]], draws: list[Tensor | None]) -> None:
        self.problem = problem
        self.x, self.y = (torch.cat(column) for column in zip(*data, strict=True))
        self.draws = None if problem.augment is None else torch.cat([d for d in draws if d is not None])

    def of(self, step: Step) -> tuple[Tensor, Tensor]:
        """Inputs and targets `[G, B, ...]`."""
        flat = step.example.flatten()
        changes = None if self.draws is None else self.draws[step.draw.flatten()]
        inputs = self.problem.inputs(self.x[flat], changes)
        shape = step.example.shape
        return inputs.unflatten(0, shape), self.y[flat].unflatten(0, shape)


Gradients = Callable[[Problem, Tensor, dict[str, Tensor], Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class _Stack:
    """The state of all clients while they train; row i is one client's."""

    problem: Problem
    received: Tensor
    parameters: Tensor
    direction: Tensor
    buffers: dict[str, Tensor]
    loss: Tensor
    seen: Tensor

    @classmethod
    def of(cls, problem: Problem, received: Tensor, buffers: Tensor | None) -> _Stack:
        count = len(received)
        held = {name: b.detach().expand(count, *b.shape).clone() for name, b in problem.model.named_buffers()}
        if buffers is not None and problem.buffer_layout is not None:
            held |= {name: part.clone() for name, part in problem.buffer_layout.split(buffers).items()}
        zero = received.new_zeros(count)
        return cls(problem, received, received.clone(), torch.zeros_like(received), held, zero, zero.clone())

    def joined_buffers(self) -> Tensor | None:
        """`[C, b]`, as the layout of the buffers has them."""
        layout = self.problem.buffer_layout
        if layout is None:
            return None
        return layout.join(self.buffers, out=self.received.new_empty(len(self.received), layout.d))

    def descend(self, examples: _Examples, step: Step, gradients: Gradients) -> None:
        """One step of some rows, in place."""
        at = step.rows
        parameters, direction = self.parameters[at], self.direction[at]
        buffers = {name: held[at] for name, held in self.buffers.items()}
        loss, gradient = gradients(self.problem, parameters, buffers, *examples.of(step), step.weight)
        taking = slice(0, step.active)
        _sgd(self.problem.local, parameters[taking], direction[taking], gradient[taking], self.received[at][taking])
        if isinstance(at, Tensor):  # what was taken out by index is a copy
            self.parameters[at], self.direction[at] = parameters, direction
            for name, held in self.buffers.items():
                held[at] = buffers[name]
        self.loss[at] += loss * step.sizes
        self.seen[at] += step.sizes


def _gradients(
    problem: Problem, parameters: Tensor, buffers: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Each client's loss `[G]` and gradient `[G, d]`; buffers change in place.

    Clients do not touch each other, so the gradient of the sum of their losses holds each one's own.
    """
    model = problem.model

    def losses(p: dict[str, Tensor], b: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return problem.loss(functional_call(model, (p, b), (inputs,)), targets)

    leaf = parameters.detach().requires_grad_()
    each = vmap(losses)(problem.layout.split(leaf), buffers, x, y)
    per_client = (each * weight.to(each.dtype)).sum(-1) if each.dim() > 1 else each
    (gradient,) = torch.autograd.grad(per_client.sum(), leaf)
    return per_client.detach(), gradient


def _sgd(local: SGD, parameters: Tensor, direction: Tensor, gradient: Tensor, received: Tensor) -> None:
    """The step of `SGD` on rows `[G, d]`; parameters and direction change in place."""
    if local.prox:
        gradient.add_(parameters - received, alpha=float(local.prox))
    if local.clip is not None:
        norms = gradient.norm(dim=-1, keepdim=True)
        gradient.mul_((float(local.clip) / (norms + 1e-6)).clamp_(max=1.0))  # as torch.nn.utils.clip_grad_norm_ does
    if local.weight_decay:
        gradient.add_(parameters, alpha=float(local.weight_decay))
    if local.momentum:
        gradient = direction.mul_(float(local.momentum)).add_(gradient)
    parameters.sub_(gradient, alpha=float(local.lr))
