"""A step of a whole cohort as compiled code."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch import _inductor as inductor
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedcams.engines.descent import descend
from fedcams.engines.problem import Problem, Step

_OF_CODE: dict[str, Step] = {}  # compiling takes seconds, and runs of one preset often compute the same


def compiled_step(
    problem: Problem,
    parameters: Tensor,
    direction: Tensor | None,
    received: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The new parameters `[C, d]` and directions, and the losses `[C]`; rows without weight stay as they are.

    For a model without buffers. Compiled once for each form of what comes in.
    """
    known = problem.compiled
    batch = (part.contiguous() for part in (x, y, weight))  # whatever the number of steps they were laid out with
    inputs = [parameters, received, *batch, *(() if direction is None else (direction,))]
    forms = tuple((tensor.shape, tensor.stride()) for tensor in inputs)
    with torch.no_grad():
        if forms not in known:
            known[forms] = _compile(problem, inputs)
        loss, after, *moved = known[forms](*inputs)
    return after, moved[0] if moved else None, loss


def _compile(problem: Problem, inputs: list[Tensor]) -> Step:
    """Recorded first: what is compiled then is one flat list of operations, with little to check at each call."""
    recorded = make_fx(_step(problem))(*inputs)
    shared = not any(node.op == "get_attr" for node in recorded.graph.nodes)  # frozen parameters are the model's own
    code = f"{[(t.shape, t.stride(), t.dtype, t.device) for t in inputs]}\n{recorded.code}"
    if shared and code in _OF_CODE:
        return _OF_CODE[code]
    compiled = cast(Step, inductor.compile(recorded, [*inputs]))  # 35 µs a call less than by torch.compile
    if shared:
        _OF_CODE[code] = compiled
    return compiled


def _step(problem: Problem) -> Step:
    model, layout, loss = problem.model.train(), problem.layout, problem.losses

    def weighted_loss(row: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        parts = zip(layout.names, row.split(layout.sizes), layout.shapes, strict=True)
        parameters = {name: part.view(shape) for name, part, shape in parts}
        return (loss(functional_call(model, parameters, (x,)), y) * weight).sum()

    def step(
        parameters: Tensor, received: Tensor, x: Tensor, y: Tensor, weight: Tensor, *direction: Tensor
    ) -> tuple[Tensor, ...]:
        gradient, losses = vmap(grad_and_value(weighted_loss))(parameters, x, y, weight)
        before, after = (parameters, *direction), [old.clone() for old in (parameters, *direction)]
        descend(problem.local, after[0], after[1] if direction else None, gradient, received)
        taking = weight.sum(-1, keepdim=True) > 0
        return losses, *(torch.where(taking, new, old) for new, old in zip(after, before, strict=True))

    return step
