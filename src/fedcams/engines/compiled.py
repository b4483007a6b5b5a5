"""The gradients of a whole cohort as compiled code."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fedcams.engines.problem import Problem

Function = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Shapes = tuple[torch.Size, ...]

_OF_MODEL: weakref.WeakKeyDictionary[nn.Module, dict[Shapes, Function]] = weakref.WeakKeyDictionary()
_OF_CODE: dict[str, Function] = {}  # compiling takes seconds, and runs of one preset compute the same


def compiled_gradients(
    problem: Problem, parameters: Tensor, buffers: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Each client's loss `[C]` and gradient `[C, d]`, of a model without buffers; compiled once for each shape."""
    known = _OF_MODEL.setdefault(problem.model, {})
    shapes = (parameters.shape, x.shape, y.shape)
    with torch.no_grad():
        if shapes not in known:
            known[shapes] = _compile(problem, parameters, x, y, weight)
        gradient, losses = known[shapes](parameters, x, y, weight)
    return losses, gradient


def _compile(problem: Problem, *inputs: Tensor) -> Function:
    """The recorded operations are one function without branches, so nothing needs checking when it is called."""
    recorded = make_fx(vmap(grad_and_value(_weighted_loss(problem))))(*inputs)
    shared = not any(node.op == "get_attr" for node in recorded.graph.nodes)  # frozen parameters are the model's own
    code = f"{[(t.shape, t.dtype, t.device) for t in inputs]}\n{recorded.code}"
    if shared and code in _OF_CODE:
        return _OF_CODE[code]
    compiled = _compiled(recorded)
    if shared:
        _OF_CODE[code] = compiled
    return compiled


def _compiled(recorded: GraphModule) -> Function:
    unchecked = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    return cast(Function, torch.compile(recorded, fullgraph=True, dynamic=False, options=unchecked))


def _weighted_loss(problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    model, layout, loss = problem.model.train(), problem.layout, problem.loss

    def weighted_loss(row: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        parameters = {
            name: part.view(shape)
            for name, part, shape in zip(layout.names, row.split(layout.sizes), layout.shapes, strict=True)
        }
        return (loss(functional_call(model, parameters, (x,)), y) * weight.to(row.dtype)).sum()

    return weighted_loss
