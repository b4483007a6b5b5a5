"""What is made once per model and used in every round: the seats of clients, with their memory and graphs."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fedcams.engines.base import CohortUpdate, local_rate, rows
from fedcams.engines.captured.seat import Recipe, Seat
from fedcams.engines.captured.staging import Staging, as_channels_last
from fedcams.engines.captured.step import Batch, Computing, draws_in_attention, frozen_parameters
from fedcams.engines.problem import Problem
from fedcams.engines.trees import Tree, call, map_tensors, size, take
from fedcams.keys import derive

if TYPE_CHECKING:
    from torch import Tensor, nn


class Prepared:
    """The seats that train a model, for each precision, rule and loss."""

    def __init__(self) -> None:
        self.seats: dict[Any, list[Seat]] = {}
        self.recipes: dict[Any, Recipe] = {}
        self.habits: dict[Any, Habits] = {}

    def seats_for(self, problem: Problem, precision: str, compile: bool, count: int, shifted: bool) -> list[Seat]:
        """Return this many seats; they are made on first use, and share what is compiled."""
        frozen = tuple(tensor.data_ptr() for tensor in frozen_parameters(problem).values())
        kind = (str(problem.device), problem.dtype, problem.layout.id, frozen, problem.local, problem.loss)
        key = (precision, compile, shifted, *kind)
        habits = self.habits_of(problem)
        how = Computing(precision, habits.plain_attention, habits.channels_last)
        recipe = self.recipes.setdefault(key, Recipe(how, compile))
        seats = self.seats.setdefault(key, [])
        seats += [Seat(problem, recipe, shifted) for _ in range(count - len(seats))]
        return seats[:count]

    def habits_of(self, problem: Problem) -> Habits:
        """Return what the model supports and needs, found by a trial with two examples."""
        key = str(problem.device)
        if key not in self.habits:
            self.habits[key] = Habits.of(problem)
        return self.habits[key]


class Habits(NamedTuple):
    """What the engine must know about a model before training."""

    channels_last: bool
    """Whether it has convolutions of images and takes images with channels last in memory."""
    plain_attention: bool
    """Whether its attention applies dropout, and so must be computed step by step."""

    @classmethod
    def of(cls, problem: Problem) -> Habits:
        """Return the habits of a problem's model."""
        client = _some_client(problem)
        x, y = map_tensors(torch.clone, take(problem.examples_of(client), slice(2)))  # a model may change its inputs
        training, prepared_x = problem.model.training, problem.prepare(x)
        try:
            # On a CPU, oneDNN's backward pass of a 1x1 convolution with channels last writes beyond its memory.
            turned = problem.device.type == "cuda" and takes_channels_last(problem.model.eval(), prepared_x)
            problem.model.train()
            with problem.naming([client]):
                draws = draws_in_attention(problem, Batch(prepared_x, y, None))
        finally:
            problem.model.train(training)
        return cls(turned, draws)


def _some_client(problem: Problem) -> int:
    """Return the first client that has two examples, since batch-norm refuses one; or else the first."""
    found = (client for client in problem.clients if size(problem.examples_of(client)[1]) > 1)
    return next(found, next(iter(problem.clients)))


def takes_channels_last(model: nn.Module, x: Tree) -> bool:
    """Return whether a model has convolutions of images, and takes images `x` with channels last in memory."""
    if not any(isinstance(module, torch.nn.Conv2d) for module in model.modules()):
        return False
    try:
        with torch.no_grad():
            call(model, map_tensors(as_channels_last, x))
    except RuntimeError:  # as `view` raises for images that are not contiguous
        return False
    return True


_PREPARED: weakref.WeakKeyDictionary[nn.Module, Prepared] = weakref.WeakKeyDictionary()  # compiling takes long


def prepared(problem: Problem) -> Prepared:
    """Return what was prepared for the problem's model; prepare it on first use."""
    return _PREPARED.setdefault(problem.model, Prepared())


@dataclass(frozen=True)
class Round:
    """The training of a cohort: what clients start from, and where the results go."""

    problem: Problem
    round: int
    seed: int
    rate: float
    channels_last: bool
    cohort: Sequence[int]
    start: Tensor
    """`[C, d]`"""
    buffers: Tensor | None
    """`[C, b]`"""
    shift: Tensor | None
    """`[C, d]`"""
    results: CohortUpdate
    """Filled in client by client."""

    @classmethod
    def of(
        cls, problem: Problem, start: Tensor, buffers: Tensor | None, cohort: Sequence[int], round: int, seed: int,
        rate: float | None, shift: Tensor | None,
    ) -> Round:  # fmt: skip
        """Return a round with empty results."""
        used, count = local_rate(problem, rate), len(cohort)
        left = None if buffers is None else buffers.new_empty(count, buffers.shape[-1])
        loss = torch.zeros(count, device=problem.device, dtype=problem.sum_dtype)
        results = CohortUpdate(start.new_empty(count, start.shape[-1]), left, loss, [0] * count, [0] * count, used)
        held = None if buffers is None else rows(buffers, cohort)
        channels_last = prepared(problem).habits_of(problem).channels_last
        return cls(problem, round, seed, used, channels_last, cohort, rows(start, cohort), held, shift, results)

    def train(self, seats: list[Seat]) -> CohortUpdate:
        """Train all clients: each seat takes the next one when it is done with its own, and seats take turns."""
        waiting = deque(range(len(self.cohort)))
        at_work = [self._clients(seat, waiting) for seat in seats]
        while at_work:
            at_work = [steps for steps in at_work if next(steps, _DONE) is not _DONE]
        for seat in seats:
            seat.join()
        return self.results

    def _clients(self, seat: Seat, waiting: deque[int]) -> Iterator[None]:
        """Train clients in a seat until none is waiting, and yield after each step."""
        while waiting:
            yield from self._client(seat, waiting.popleft())

    def _client(self, seat: Seat, row: int) -> Iterator[None]:
        problem, client, results = self.problem, self.cohort[row], self.results
        staging = Staging(problem, client, self.round, self.seed, self.channels_last)
        held, added = (None if rows is None else rows[row] for rows in (self.buffers, self.shift))
        key = derive(self.seed, "dropout", self.round, client)
        seat.load_(problem, self.start[row], held, added, self.rate, key)
        steps = seat.steps_(problem, staging.parts())
        with problem.naming([client]):
            yield from steps
        left = None if results.buffers is None else results.buffers[row]
        seat.store_(problem, self.start[row], results.delta[row], left, results.loss[row], staging.seen)
        results.examples[row], results.steps[row] = staging.examples, len(staging.order.sizes)


_DONE = object()
