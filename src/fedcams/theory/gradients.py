"""The gradients and the curvature of one client's loss at any model; the problem's own model is restored afterwards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams.engines import Examples, Problem
from fedcams.engines.trees import call, size, take
from fedcams.keys import derive, generator, seed_torch

if TYPE_CHECKING:
    from torch import Tensor, nn

SAMPLE = 10
"""How many batches of a client are measured, and how many steps power iteration takes."""


class Point(NamedTuple):
    """A model."""

    x: Tensor
    """`[d]`, its parameters."""
    buffers: Tensor | None
    """`[b]`, its floating-point buffers; None if it has none."""


Load = Callable[[Point], None]


@contextlib.contextmanager
def borrowed(problem: Problem) -> Iterator[Load]:
    """Yield a function that loads a point into the model, in training mode; restore the model afterwards."""
    model = problem.model
    modes = [(module, module.training) for module in model.modules()]
    parameters = {name: part.detach().clone() for name, part in model.named_parameters() if part.requires_grad}
    buffers = {name: part.clone() for name, part in model.named_buffers()}
    grads = [(part, part.grad) for part in model.parameters()]

    def load_(point: Point) -> None:
        _write_(dict(model.named_buffers()), buffers)  # those too that do not travel, and that a pass changes
        problem.load(*point)

    try:
        model.train()
        yield load_
    finally:
        _write_(dict(model.named_buffers()), buffers)
        _write_(dict(model.named_parameters()), parameters)
        for part, grad in grads:
            part.grad = grad
        for module, training in modes:
            module.training = training


def _write_(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        tensors[name].detach().copy_(value)


@dataclass(frozen=True)
class ClientLoss:
    """One client's examples; all passes over them use the same pieces and the same draws of random layers."""

    problem: Problem
    load_: Load
    client: int
    done: int

    def gradient(self, at: Point) -> tuple[Tensor, float]:
        """Return the gradient `[d]` of the mean loss of all examples, and that loss."""
        total, mean = torch.zeros_like(at.x), 0.0
        for share, rows in self._passing(at):
            loss = self._loss(rows)
            total.add_(_flat(self._derivatives(loss)).to(total), alpha=share)
            mean += share * float(loss.detach())
        return total, mean

    def batches(self, at: Point) -> Iterator[Tensor]:
        """Yield the gradients `[d]` of batches like those of local steps, drawn and augmented independently."""
        local, rng = self.problem.local, generator(0, "theory batches", self.done, self.client)
        count = min(local.batch, self._size)
        draws = self.problem.draws(SAMPLE * count, derive(0, "theory"), self.done, self.client)
        self._begin(at)
        for batch in range(SAMPLE):
            rows = rng.choice(self._size, count, replace=local.replace)
            changes = None if draws is None else draws[batch * count : (batch + 1) * count]
            yield _flat(self._derivatives(self._loss(rows, changes))).to(at.x)

    def curvature(self, at: Point) -> float:
        """Return the largest eigenvalue, in magnitude, that power iteration finds of the Hessian on all examples."""
        v = torch.from_numpy(generator(0, "theory curvature").standard_normal(len(at.x))).to(at.x)
        length = norm(v)
        for _ in range(SAMPLE):
            v = self._times_hessian(at, v / length)
            length = norm(v)
            if length == 0:
                break
        return length

    def _times_hessian(self, at: Point, v: Tensor) -> Tensor:
        total = torch.zeros_like(v)
        for share, rows in self._passing(at):
            slope = _flat(self._derivatives(self._loss(rows), create_graph=True))
            if slope.requires_grad:  # otherwise the loss is linear
                total.add_(_flat(self._second_derivatives(slope @ v.to(slope))).to(total), alpha=share)
        return total

    def _passing(self, at: Point) -> Iterator[tuple[float, NDArray[np.int64]]]:
        """Yield pieces of the examples with their shares, no larger than a batch to limit memory."""
        order = generator(0, "theory pieces", self.done, self.client).permutation(self._size)
        self._begin(at)
        for rows in np.array_split(order, -(-self._size // self.problem.local.batch)):
            yield len(rows) / self._size, rows

    def _begin(self, at: Point) -> None:
        self.load_(at)
        seed_torch(derive(0, "theory layers", self.done, self.client), self.problem.device)

    @functools.cached_property
    def _examples(self) -> Examples:
        return self.problem.examples_of(self.client)

    @functools.cached_property
    def _size(self) -> int:
        return size(self._examples[0])

    def _loss(self, rows: NDArray[np.int64], changes: Tensor | None = None) -> Tensor:
        """Return the mean loss of some examples at the model's current parameters."""
        problem, chosen = self.problem, torch.from_numpy(rows).to(self.problem.device)
        x, y = (take(part, chosen) for part in self._examples)
        with problem.naming([self.client]):
            return problem.loss(call(problem.model, problem.inputs(x, changes)), y).mean()

    def _derivatives(self, value: Tensor, create_graph: bool = False) -> Sequence[Tensor]:
        return torch.autograd.grad(
            value, self._parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True
        )

    def _second_derivatives(self, slope: Tensor) -> Sequence[Tensor]:
        """Return the derivatives of a slope; unlike `autograd.grad`, `backward` refuses layers that have none."""
        for parameter in self._parameters:
            parameter.grad = None
        slope.backward()
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in self._parameters]

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.problem.model.parameters() if parameter.requires_grad]


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def norm(vector: Tensor) -> float:
    """Return the length of a vector, summed in float64."""
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))
