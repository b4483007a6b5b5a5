"""The whole cohort as one batched computation: every client's parameters are a row of one matrix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fedcams.engines.base import CohortUpdate, Engine, local_rate
from fedcams.engines.batches import Grid, Integers, lay_out, padded_width, weighted
from fedcams.engines.compiled import Rows, compiled_step, compiling_pays, has_compiler
from fedcams.engines.modules import call_with, hooked_parameter
from fedcams.engines.problem import Pool, Problem
from fedcams.engines.trees import Tree, map_tensors, numbers_per_example, take
from fedcams.errors import SpecError
from fedcams.local import Slots, batch_order
from fedcams.local.base import mixes_rows
from fedcams.registry import flag, register

if TYPE_CHECKING:
    from torch import Tensor

GATHERED = 1 << 24
"""Bytes of examples that are gathered and prepared at once: few calls, and the data still fits into the cache."""
Which = slice | Integers
"""Some rows of a stack."""


@register("stacked")
@dataclass(frozen=True)
class Stacked(Engine):
    """Trains all clients at once with torch.func; smaller batches are padded with examples of weight zero.

    If padding would change the result (batch-norm, or a loss that is already a mean), clients are grouped by the size
    of their batch instead. Clients with more steps continue when the others are done.
    """

    compile: bool = flag(False, doc="compile a step with torch.compile; needs a C++ compiler and half a minute, once")

    examples = ("stacked", "stacked(compile=true)")
    refused = (("stacked(compile=1)", "allowed: true or false"),)

    priority = 1
    needs_trial = True

    def supports(self, problem: Problem) -> str:
        for name, module in problem.model.named_modules():
            if what := _not_batched(module):
                return f"engine=stacked: layer {name!r} is {what}; use engine=loop"
        if name := hooked_parameter(problem.model):
            return f"engine=stacked: parameter {name!r} has a hook on its gradient; use engine=loop"
        if mixes_rows(problem.local):
            why = f"local={problem.local.name} mixes clients, or changes one that is not active"
            return f"engine=stacked: {why}; use engine=loop, or see fedcams.local.base.only_active"
        if self.compile and not can_compile(problem):
            needs = "a model without buffers and per-example losses of pairs of tensors"
            return f"engine={self}: compiling needs {needs}; use engine=stacked"
        return ""

    def tuned(self, problem: Problem, rounds: int, size_varies: bool) -> Engine:
        """Compile if the run has enough steps to make up for the time that it takes."""
        pays = not size_varies and problem.device.type == "cpu" and compiling_pays(problem, rounds)
        return Stacked(compile=pays and has_compiler() and can_compile(problem))

    def train(
        self, problem: Problem, start: Tensor, buffers: Tensor | None, cohort: Sequence[int], round: int, seed: int,
        *, rate: float | None = None, shift: Tensor | None = None,
    ) -> CohortUpdate:  # fmt: skip
        if reason := self.supports(problem):
            raise SpecError(reason)
        used, pool = local_rate(problem, rate), problem.pool(cohort)
        orders = [
            batch_order(problem.local, len(part), seed, round, c) for c, part in zip(cohort, pool.places, strict=True)
        ]
        order = sorted(range(len(cohort)), key=lambda i: -len(orders[i].sizes))  # so that active rows are the first
        ordered = [orders[i] for i in order]
        width = padded_width(problem.local, ordered) if self.compile else None  # compiled code needs few shapes
        grid = lay_out(ordered, [pool.places[i] for i in order], width)
        draws = [problem.draws(len(orders[i].order), seed, round, cohort[i]) for i in order]
        held, shifts = (None if rows is None else _chosen(rows, order) for rows in (buffers, shift))
        stack = _Stack.of(problem, _chosen(start, order), held, shifts, used)
        losses = stack.parameters.new_zeros(grid.size.shape, dtype=problem.sum_dtype)
        clients = np.array(cohort, object)[order]  # ids of 64 bits next to smaller ones would become floats
        if not self.compile:  # compiled steps were recorded in training mode
            problem.model.train()
        for step, batch in enumerate(_batches(problem, pool, grid, draws)):
            for rows, width in self._parts(problem, grid, step):
                watching = contextlib.nullcontext() if step or self.compile else _refusing_padding_idx()
                with problem.naming(clients[rows].tolist()), watching:
                    losses[step, rows] = stack.step_(rows, batch.part(rows, width), self.compile).to(losses.dtype)
        back = None if order == sorted(order) else np.argsort(order)
        delta, after, loss = stack.delta().to(start.dtype), stack.joined_buffers(start.dtype), _mean_loss(losses, grid)
        return CohortUpdate(
            delta if back is None else delta[back],
            after if after is None or back is None else after[back],
            loss if back is None else loss[back],
            [len(part) for part in pool.places],
            [len(each.sizes) for each in orders],
            used,
        )

    def _parts(self, problem: Problem, grid: Grid, step: int) -> list[tuple[Which, int]]:
        """Return what is computed at once: rows, and the width of their batches."""
        rows, width = grid.example.shape[1:]
        if self.compile:
            return [(slice(0, rows), width)]
        return [(slice(0, grid.active[step]), width)] if problem.may_pad else list(grid.groups(step))


def _not_batched(module: torch.nn.Module) -> str:
    """Return what a layer is that torch.func does not compute for each client as alone; an empty string for others."""
    kind, draws = type(module).__name__, (torch.nn.modules.dropout._DropoutNd, torch.nn.RReLU)
    if isinstance(module, draws) and getattr(module, "p", 1.0) > 0:
        return f"a random {kind}"  # a batched computation draws in another order
    if isinstance(module, torch.nn.RNNBase):
        return f"an {kind}, which torch.func cannot batch"
    if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        own_gradients = module.padding_idx is not None or module.scale_grad_by_freq
        if own_gradients and module.weight.requires_grad:
            return f"an {kind} with padding_idx or scale_grad_by_freq, which torch.func ignores in gradients"
    return ""


@contextlib.contextmanager
def _refusing_padding_idx() -> Iterator[None]:
    """Refuse `F.embedding(..., padding_idx=...)` of a trained table: it is no layer, so `_not_batched` misses it."""

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = kwargs or {}
            looks_up = func is torch.nn.functional.embedding and given.get("padding_idx") is not None
            if looks_up and not isinstance(args[1], torch.nn.Parameter):  # as a frozen table, which stays in its place
                why = "the model calls F.embedding with padding_idx, which torch.func ignores in gradients"
                raise SpecError(f"engine=stacked: {why}; use engine=loop")
            return func(*args, **given)

    with Watch():
        yield


def can_compile(problem: Problem) -> bool:
    """Return whether padding does not change training, a step changes only parameters, and examples are tensors."""
    return problem.has_tensor_pairs and problem.may_pad and not any(True for _ in problem.model.buffers())


class _Batch(NamedTuple):
    """The examples that clients see in one step."""

    x: Tree
    """`[C, B, ...]`, augmented and prepared."""
    y: Tree
    weight: Tensor

    def part(self, rows: Which, width: int) -> _Batch:
        """Return the batches of some clients, cut to a width."""
        return _Batch(*take(tuple(self), (rows, slice(width))))


def _batches(problem: Problem, pool: Pool, grid: Grid, draws: list[Tensor | None]) -> Iterator[_Batch]:
    """Yield the batches of all steps, gathered for as many steps at once as fit into `GATHERED` bytes."""
    device, shape = problem.device, grid.example.shape
    example = torch.from_numpy(grid.example)
    weight = torch.from_numpy(grid.weight).to(device, problem.sum_dtype)
    changes = None if problem.augment is None else torch.cat([d for d in draws if d is not None])
    at_once = max(1, GATHERED // (shape[1] * shape[2] * numbers_per_example(pool.x) * weight.element_size()))
    for first in range(0, shape[0], at_once):
        some = slice(first, first + at_once)
        flat = example[some].flatten().to(device)
        drawn = None if changes is None else changes[torch.from_numpy(grid.draw[some]).flatten().to(device)]
        x, y = problem.inputs(take(pool.x, flat), drawn), take(pool.y, flat)
        batch = map_tensors(lambda part: part.unflatten(0, (-1, *shape[1:])), (x, y))
        for step, weights in enumerate(weight[some]):
            inputs, targets = take(batch, step)
            yield _Batch(inputs, targets, weights)


def _chosen(vectors: Tensor, order: list[int]) -> Tensor:
    """Return each client's vector as `[C, d]`; a vector that all clients share is not copied."""
    return vectors.expand(len(order), -1) if vectors.dim() == 1 else vectors[order]


def _mean_loss(losses: Tensor, grid: Grid) -> Tensor:
    """Return the mean loss `[C]` over the examples seen, from the losses `[S, C]` of the batches."""
    sums = (losses.cpu().double().numpy() * grid.size).sum(0)  # few numbers, so NumPy is faster than torch
    return torch.from_numpy(sums / grid.size.sum(0)).to(losses.device, losses.dtype)


@dataclass
class _Stack:
    """The state of all clients during training; row i belongs to one client."""

    problem: Problem
    received: Tensor
    parameters: Tensor
    slots: Slots
    buffers: dict[str, Tensor]
    shift: Tensor | None
    rate: float
    rates: Tensor
    """`[C]`, the rate as compiled code reads it."""

    @classmethod
    def of(
        cls, problem: Problem, received: Tensor, buffers: Tensor | None, shift: Tensor | None, rate: float
    ) -> _Stack:
        count, received = len(received), received.to(problem.dtype)
        problem.rewind()
        held = {name: b.detach().expand(count, *b.shape).clone() for name, b in problem.model.named_buffers()}
        if buffers is not None and problem.buffer_layout is not None:
            for name, part in problem.buffer_layout.split(buffers).items():
                held[name].copy_(part)
        parameters = received.clone(memory_format=torch.contiguous_format)
        slots, shift = problem.rule.init(parameters), None if shift is None else shift.to(parameters)
        return cls(problem, received, parameters, slots, held, shift, rate, parameters.new_full((count,), rate))

    def delta(self) -> Tensor:
        """`[C, d]`, in the memory of the parameters."""
        return self.parameters.sub_(self.received)

    def joined_buffers(self, dtype: torch.dtype) -> Tensor | None:
        """Return the buffers `[C, b]`, in the order of their layout."""
        layout = self.problem.buffer_layout
        if layout is None:
            return None
        return layout.join(self.buffers, out=self.parameters.new_empty(len(self.parameters), layout.d, dtype=dtype))

    def step_(self, rows: Which, batch: _Batch, compiled: bool) -> Tensor:
        """Take a step with some rows, and return their losses."""
        if compiled:
            now = Rows(self.parameters, self.slots, self.rates, self.shift)
            self.parameters, self.slots, loss = compiled_step(self.problem, now, *batch)
            return loss
        parameters = self.parameters[rows]
        slots = {name: slot[rows] for name, slot in self.slots.items()}
        buffers = {name: held[rows] for name, held in self.buffers.items()}
        loss, gradient = _gradients(self.problem, parameters, buffers, *batch)
        if self.shift is not None:
            gradient.add_(self.shift[rows])
        self.problem.rule.step_(parameters, gradient, slots, self.rate)
        if not isinstance(rows, slice):  # rows selected by index are copies
            self.parameters[rows] = parameters
            for mine, changed in ((self.slots, slots), (self.buffers, buffers)):
                for name, held in mine.items():
                    held[rows] = changed[name]
        return loss


def _gradients(
    problem: Problem, parameters: Tensor, buffers: dict[str, Tensor], x: Tree, y: Tree, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each client's loss `[G]` and gradient `[G, d]`; buffers change in place.

    Clients are independent, so the gradient of the sum of their losses contains the gradient of each one.
    """

    def losses(p: dict[str, Tensor], b: dict[str, Tensor], inputs: Tree, targets: Tree) -> Tensor:
        return problem.losses(call_with(problem.model, p, b, inputs), targets)

    leaf = parameters.detach().requires_grad_()
    each = torch.func.vmap(losses)(problem.layout.split(leaf), buffers, x, y)
    per_client = weighted(each, weight) if each.dim() > 1 else each
    (gradient,) = torch.autograd.grad(per_client.sum(), leaf)
    return per_client.detach(), gradient
