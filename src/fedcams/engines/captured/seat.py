"""A seat: memory and a stream that train one client after the other, each step a replayed CUDA graph.

On a CPU a step is not captured but taken as it is; everything else is the same.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fedcams.engines.captured.keyed_draws import key_words
from fedcams.engines.captured.staging import Staged
from fedcams.engines.captured.step import (
    Batch,
    Compiled,
    Computing,
    Memory,
    compile_step,
    frozen_parameters,
    run_compiled,
    take_step_,
)
from fedcams.engines.problem import Problem
from fedcams.engines.trees import map_tensors, named_tensors
from fedcams.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

MOST_GRAPHS = 32
"""How many batch sizes a seat keeps graphs for; beyond that, it drops the oldest."""


class Recorded(NamedTuple):
    """A step for one shape of batch."""

    batch: Batch
    """Where the step reads its examples."""
    replay: Callable[[Problem], None]


class Recipe:
    """How steps are made: how they compute, whether they are compiled, and what was compiled, for all seats."""

    def __init__(self, how: Computing, compile: bool) -> None:
        self.how, self.compile = how, compile
        self.compiled: dict[Any, Compiled | None] = {}
        """Shapes of a batch -> the step; None if it could not be compiled."""

    def stepper(self, problem: Problem, memory: Memory, batch: Batch, is_full: bool) -> Callable[[Problem], None]:
        """Return a function that takes a step; recording it for the first time changes the memory.

        Only full batches are compiled: it takes too long for the others, which are few.
        """
        if self.compile and is_full and (compiled := self._compiled(problem, memory, batch)) is not None:
            return lambda now: run_compiled(compiled, memory, frozen_parameters(now), batch)
        return lambda now: take_step_(now, self.how, memory, frozen_parameters(now), batch)

    def _compiled(self, problem: Problem, memory: Memory, batch: Batch) -> Compiled | None:
        shape = shapes(batch)
        if shape not in self.compiled:
            try:
                frozen = frozen_parameters(problem)
                self.compiled[shape] = compile_step(problem, self.how, memory, frozen, batch)
            # a compiler may raise anything; if the model itself fails, it fails again in a plain step
            except Exception as error:
                first = str(error).strip().partition("\n")[0]
                why = f"{type(error).__name__}: {first}"
                warnings.warn(f"engine=captured: steps are captured without compiling them ({why})", stacklevel=2)
                self.compiled[shape] = None
        return self.compiled[shape]


def shapes(batch: Batch) -> tuple[Any, ...]:
    """Return what a captured step depends on: names, shapes and types of all tensors of a batch."""
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in named_tensors(tuple(batch)))


class Seat:
    """The memory, the stream and the graphs that train one client at a time; reused in every round."""

    def __init__(self, problem: Problem, recipe: Recipe, shifted: bool) -> None:
        # Nothing here may refer to the problem or its model: the engine keeps this for as long as the model exists.
        self.recipe, self.memory, self.device = recipe, Memory.of(problem, shifted), problem.device
        on_cuda = problem.device.type == "cuda"
        self.stream = torch.cuda.Stream(problem.device) if on_cuda else None
        self.pool = torch.cuda.graph_pool_handle() if on_cuda else None
        self.recorded: dict[Any, Recorded] = {}

    # -- the stream ----------------------------------------------------------------------------------------------------

    def fork(self) -> None:
        """Make the seat's work wait for everything queued so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def join(self) -> None:
        """Make everything queued from now on wait for the seat's work."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def working(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which work is queued on the seat's stream."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    # -- a client ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_(
        self, problem: Problem, start: Tensor, buffers: Tensor | None, shift: Tensor | None, rate: float, key: int
    ) -> None:
        """Seat a client that starts from `start [d]` and `buffers [b]`, with a shift `[d]` and the key of its draws."""
        memory, at_home = self.memory, problem.at_home
        words = torch.tensor(key_words(key)).to(self.device)  # on the current stream, like all uploads
        self.fork()
        with self.working():
            memory.row.copy_(start)
            for name, fresh in problem.rule.init(memory.row).items():
                memory.slots[name].copy_(fresh)
            for name, value in at_home.items():
                memory.buffers[name].copy_(value)
            if buffers is not None and problem.buffer_layout is not None:
                for name, part in problem.buffer_layout.split(buffers).items():
                    memory.buffers[name].copy_(part)
            if memory.shift is not None and shift is not None:
                memory.shift.copy_(shift)
            memory.rate.fill_(rate)
            memory.loss.zero_()
            memory.words.copy_(words)
            _use_on(self.stream, words)

    def steps_(self, problem: Problem, staged: Iterator[Staged]) -> Iterator[None]:
        """Take the client's steps, and yield after each, so that seats can take turns."""
        for part in staged:
            self.fork()
            map_tensors(lambda tensor: _use_on(self.stream, tensor), tuple(part.batches))
            for step in range(len(part.sizes)):
                batch = part.batch(step)
                with self.working():
                    self._step_(problem, batch, part.is_full(step))
                yield

    def store_(
        self, problem: Problem, start: Tensor, delta: Tensor, buffers: Tensor | None, loss: Tensor, seen: int
    ) -> None:
        """Write the change `[d]`, the buffers `[b]` and the mean loss `[]` of a client that saw this many examples."""
        with self.working(), torch.no_grad():
            delta.copy_(self.memory.row[0]).sub_(start.to(self.memory.row.dtype))
            torch.div(self.memory.loss, seen, out=loss)
            if buffers is not None and problem.buffer_layout is not None:
                problem.buffer_layout.join(self.memory.buffers, out=buffers)

    # -- a step --------------------------------------------------------------------------------------------------------

    def _step_(self, problem: Problem, batch: Batch, is_full: bool) -> None:
        """Put a batch where the step reads it, and take the step; a new shape of batch is recorded first."""
        shape = shapes(batch)
        if shape not in self.recorded:
            self._make_room()
            self.recorded[shape] = self._record(problem, batch, is_full)
        static, replay = self.recorded[shape]
        with torch.no_grad():
            for (_, target), (_, source) in zip(named_tensors(tuple(static)), named_tensors(tuple(batch)), strict=True):
                target.copy_(source)
        replay(problem)

    def _make_room(self) -> None:
        if len(self.recorded) >= MOST_GRAPHS:
            if self.stream is not None:
                self.stream.synchronize()
            del self.recorded[next(iter(self.recorded))]

    def _record(self, problem: Problem, batch: Batch, is_full: bool) -> Recorded:
        """Return the step for batches of this shape; what recording changes is restored."""
        static = Batch(*map_tensors(torch.clone, tuple(batch)))
        kept = [tensor.clone() for tensor in self.memory.changing()]
        take_step = self.recipe.stepper(problem, self.memory, static, is_full)
        replay = take_step if self.stream is None else self._captured(problem, take_step)
        with torch.no_grad():
            for tensor, before in zip(self.memory.changing(), kept, strict=True):
                tensor.copy_(before)
        return Recorded(static, replay)

    def _captured(self, problem: Problem, take_step: Callable[[Problem], None]) -> Callable[[Problem], None]:
        """Return the replay of the step as a CUDA graph; two steps before it load kernels and workspaces.

        Graphs of a seat share one memory pool, because they run one after the other and leave nothing in it. Refuses a
        step that waits for the device.
        """
        take_step(problem)
        with _without_waiting():
            take_step(problem)
        torch.cuda.synchronize(self.device)  # other seats may be working, and a capture must not record their work
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            take_step(problem)
        return lambda _: graph.replay()


@contextlib.contextmanager
def _without_waiting() -> Iterator[None]:
    """Refuse what waits for the device inside, such as a branch on data: no graph can hold it.

    A capture that fails would leave torch's generator and its memory as if it were still capturing.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        why = "the model or its loss waits for the device, by .item(), a branch on data or a copy from the CPU"
        raise SpecError(f"engine=captured: {why}; use engine=loop") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _use_on(stream: torch.cuda.Stream | None, tensor: Tensor) -> Tensor:
    """Keep a tensor's memory until a stream has finished what is queued there now."""
    if stream is not None:
        tensor.record_stream(stream)
    return tensor
