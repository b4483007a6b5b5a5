"""A step of a whole cohort as compiled code."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from fedcams.engines.problem import Problem, Step
from fedcams.engines.trees import size
from fedcams.local import Slots, step_count

if TYPE_CHECKING:
    from torch import Tensor

COMPILE_BREAK_EVEN_STEPS = 10_000
"""The number of steps above which compiling saves more time than it takes: a step of ten clients gets some milliseconds
faster, and compilers take about half a minute."""

_OF_CODE: dict[str, Step] = {}  # compiling takes seconds, and the runs of a preset often need the same code


def has_compiler() -> bool:
    """Return whether torch can compile for the CPU here, which takes a C++ compiler and Python's headers."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    return found is not None and (Path(sysconfig.get_path("include")) / "Python.h").exists()


def compiling_pays(problem: Problem, rounds: int) -> bool:
    """Return whether clients take so many steps in this many rounds that compiling them saves time."""
    some = size(problem.clients[next(iter(problem.clients))])
    return rounds * step_count(problem.local, some) >= COMPILE_BREAK_EVEN_STEPS


class Rows(NamedTuple):
    """The state of clients in a step: parameters `[C, d]`, slots, the rate `[C]`, and a shift `[C, d]` or None."""

    parameters: Tensor
    slots: Slots
    rate: Tensor
    shift: Tensor | None


def compiled_step(problem: Problem, rows: Rows, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Slots, Tensor]:
    """Return the new parameters `[C, d]` and slots, and the losses `[C]`; rows with zero weight do not change.

    The model must not have buffers. Compiles once for each set of input shapes; the rate is an input.
    """
    known = problem.compiled
    batch = (part.contiguous() for part in (x, y, weight))  # independent of how many steps they were laid out for
    shift = () if rows.shift is None else (rows.shift,)
    inputs = [rows.parameters, rows.rate, *batch, *shift, *rows.slots.values()]
    forms = (bool(shift), *((tensor.shape, tensor.stride()) for tensor in inputs))
    with torch.no_grad():
        if forms not in known:
            known[forms] = _compile(_step(problem, list(rows.slots), bool(shift)), inputs)
        loss, after, *moved = known[forms](*inputs)
    return after, dict(zip(rows.slots, moved, strict=True)), loss


def _compile(step: Step, inputs: list[Tensor]) -> Step:
    """Record the step as one flat list of operations, with little to check at each call, and compile it."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes long, so only processes that compile import it

    recorded = make_fx(step)(*inputs)
    shared = not any(node.op == "get_attr" for node in recorded.graph.nodes)  # frozen parameters are the model's own
    code = f"{[(t.shape, t.stride(), t.dtype, t.device) for t in inputs]}\n{recorded.code}"
    if shared and code in _OF_CODE:
        return _OF_CODE[code]
    import torch._inductor as inductor  # takes seconds, so only processes that compile import it

    compiled: Step = inductor.compile(recorded, [*inputs])  # saves 35 µs per call compared with torch.compile
    if shared:
        _OF_CODE[code] = compiled
    return compiled


def _step(problem: Problem, names: list[str], shifted: bool) -> Step:
    """Return the function of tensors that is compiled: parameters, rate, batch, the shift if there is one, slots."""
    model, layout, loss = problem.model.train(), problem.layout, problem.losses

    def weighted_loss(row: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        parts = zip(layout.names, row.split(layout.sizes), layout.shapes, strict=True)
        parameters = {name: part.view(shape) for name, part, shape in parts}
        return (loss(torch.func.functional_call(model, parameters, (x,)), y) * weight).sum()

    def step(
        parameters: Tensor, rate: Tensor, x: Tensor, y: Tensor, weight: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        gradient, losses = torch.func.vmap(torch.func.grad_and_value(weighted_loss))(parameters, x, y, weight)
        gradient = gradient + rest[0] if shifted else gradient
        slots = {name: slot.clone() for name, slot in zip(names, rest[shifted:], strict=True)}
        after = parameters.clone()
        problem.rule.step_(after, gradient, slots, rate, weight.sum(-1) > 0)
        return losses, after, *slots.values()

    return step
