"""The gradients of a whole cohort as one compiled function."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from fedcams.engines.problem import Problem

Compiled = Callable[[Problem, Tensor, dict[str, Tensor], Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_COMPILED: weakref.WeakKeyDictionary[nn.Module, Compiled] = weakref.WeakKeyDictionary()  # compiling takes long


def compiled_gradients(problem: Problem) -> Compiled:
    """(problem, parameters `[C, d]`, no buffers, x, y, weight) -> loss `[C]` and gradient `[C, d]`; compiled once."""
    if problem.model not in _COMPILED:
        _COMPILED[problem.model] = _compile(problem)
    return _COMPILED[problem.model]


def _compile(problem: Problem) -> Compiled:
    model, layout, loss = problem.model.train(), problem.layout, problem.loss

    def weighted_loss(row: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        parameters = {
            name: part.view(shape)
            for name, part, shape in zip(layout.names, row.split(layout.sizes), layout.shapes, strict=True)
        }
        return (loss(functional_call(model, parameters, (x,)), y) * weight.to(row.dtype)).sum()

    batched = torch.compile(vmap(grad_and_value(weighted_loss)), fullgraph=True, dynamic=False)

    def gradients(
        _: Problem, parameters: Tensor, buffers: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        gradient, losses = batched(parameters, x, y, weight)
        return losses, gradient

    return gradients
