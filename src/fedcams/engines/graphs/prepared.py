"""What is made once per model and used in every round: its program, memory and graphs, to train and to predict."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedcams.engines.base import CohortUpdate, local_rate, rows
from fedcams.engines.batches import Batches
from fedcams.engines.graphs.block import Block, Packing
from fedcams.engines.graphs.cohort import Cohort, compute_type, operations_for
from fedcams.engines.graphs.operations import run
from fedcams.engines.graphs.program import Program
from fedcams.engines.graphs.translation import translate
from fedcams.engines.problem import Problem

Result = tuple[Tensor, Tensor | None, Tensor, list[int], list[int]]


class Prepared:
    """A model's program, and the memory and graph that train it, for each shape of cohort."""

    def __init__(self, problem: Problem) -> None:
        self.program = translate(problem.model)
        self.packing = Packing.of(problem.layout, self.program.orders())
        self.cohorts: dict[Any, Cohort] = {}
        self.predictors: dict[Any, Predictor] = {}

    def train(
        self, problem: Problem, precision: str, at_once: int, streams: int, start: Tensor, buffers: Tensor | None,
        cohort: Sequence[int], round: int, seed: int, *, rate: float | None = None,
        shift: Tensor | None = None,
    ) -> CohortUpdate:  # fmt: skip
        """Train like an engine's `train`, with at most `at_once` clients at a time, in groups of equal size."""
        used, starts = local_rate(problem, rate), rows(start, cohort)
        held = None if buffers is None else rows(buffers, cohort)
        width = -(-len(cohort) // -(-len(cohort) // at_once))
        results: list[Result] = []
        for first in range(0, len(cohort), width):
            some = slice(first, first + width)
            batches = Batches(problem, cohort[some], round, seed, width)
            refuse_single_values(problem, cohort[some], batches)
            before = None if held is None else _filled(held[some], width)
            added = None if shift is None else _filled(shift[some], width)
            chosen = self._cohort(problem, precision, streams, width, batches, shift is not None)
            trained = chosen.train(_filled(starts[some], width), before, batches, used, added)
            results.append((*trained, batches.examples, batches.steps))
        return _joined(results, used)

    def predictor(self, problem: Problem, precision: str) -> Predictor:
        """Return the memory and graphs that evaluate the model."""
        key = (precision, str(problem.device), problem.dtype)
        if key not in self.predictors:
            self.predictors[key] = Predictor(problem, self.program, self.packing, precision)
        return self.predictors[key]

    def _cohort(
        self, problem: Problem, precision: str, streams: int, width: int, batches: Batches, shifted: bool
    ) -> Cohort:
        shape = (width, *batches.x.shape[1:])
        key = (precision, streams, str(problem.device), problem.dtype, shape, problem.local, problem.loss, shifted)
        if key not in self.cohorts:
            self.cohorts[key] = Cohort(problem, self.program, self.packing, width, precision, streams, shifted)
        return self.cohorts[key]


class Predictor:
    """A model's outputs for many examples: the forward pass as a CUDA graph, batch-norm folded into convolutions.

    Holds the memory of one model and a graph for each shape of batch; reused in every round.
    """

    def __init__(self, problem: Problem, program: Program, packing: Packing, precision: str) -> None:
        self.program, self.compute = program, compute_type(problem, precision)
        self.block = Block.empty(
            packing, problem.buffer_layout, 1, problem.device, problem.dtype, self.compute, train=False
        )
        self.operations = operations_for(self.block, False, precision)
        self.graphs: dict[torch.Size, tuple[Callable[[], None], Tensor, Tensor]] = {}

    def of(self, x: Tensor, buffers: Tensor | None, prepare: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return the model `x [d]` as a function of raw inputs `[n, ...]`, which gives outputs `[n, classes]`."""
        with torch.no_grad():
            self.block.load(x[None], None if buffers is None else buffers[None])
        return lambda raw: self._outputs(prepare(raw))

    @torch.no_grad()
    def _outputs(self, x: Tensor) -> Tensor:
        x = (x.movedim(1, -1) if x.dim() == 4 else x)[None].to(self.compute)
        if x.shape not in self.graphs:
            self.graphs[x.shape] = self._capture(x.contiguous())
        replay, inputs, outputs = self.graphs[x.shape]
        inputs.copy_(x)
        replay()
        wide = outputs[0].float() if outputs.dtype == torch.bfloat16 else outputs[0]
        return wide.clone()

    def _capture(self, inputs: Tensor) -> tuple[Callable[[], None], Tensor, Tensor]:
        if inputs.device.type != "cuda":
            outputs = run(self.program, self.operations, inputs)

            def again() -> None:
                outputs.copy_(run(self.program, self.operations, inputs))

            return again, inputs, outputs
        from fedcams.engines.graphs.kernels.entry import compiling

        side = torch.cuda.Stream(inputs.device)
        side.wait_stream(torch.cuda.current_stream(inputs.device))
        with torch.cuda.stream(side):
            with compiling():
                run(self.program, self.operations, inputs)
            run(self.program, self.operations, inputs)
        torch.cuda.current_stream(inputs.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run(self.program, self.operations, inputs)
        return graph.replay, inputs, outputs


_PREPARED: weakref.WeakKeyDictionary[nn.Module, Prepared] = weakref.WeakKeyDictionary()  # compiling takes long


def prepared(problem: Problem) -> Prepared:
    """Return what was prepared for the problem's model; prepare it on first use."""
    if problem.model not in _PREPARED:
        _PREPARED[problem.model] = Prepared(problem)
    return _PREPARED[problem.model]


def refuse_single_values(problem: Problem, cohort: Sequence[int], batches: Batches) -> None:
    """Refuse a batch of one example of one pixel, naming the client: it has no variance, so torch refuses it too."""
    lonely = [client for client, size in zip(cohort, batches.smallest, strict=True) if size == 1]
    if lonely and 1 in _norm_pixels(problem, batches.x[:1]):
        with problem.naming(lonely):
            raise ValueError("Expected more than 1 value per channel when training")


def _norm_pixels(problem: Problem, x: Tensor) -> set[int]:
    """Return the numbers of pixels that the model's batch-norms see in one example."""
    seen: set[int] = set()
    hook: Callable[..., None] = lambda _, inputs: seen.add(inputs[0][0, 0].numel())  # noqa: E731
    with problem.evaluating() as model, contextlib.ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                hooks.enter_context(module.register_forward_pre_hook(hook))
        model(problem.prepare(x))
    return seen


def _filled(values: Tensor, width: int) -> Tensor:
    """Return exactly `width` rows, because the last group may have fewer clients than the others."""
    missing = width - len(values)
    return values if missing == 0 else torch.cat([values, values[-1:].expand(missing, -1)])


def _joined(results: list[Result], rate: float) -> CohortUpdate:
    deltas, buffers, losses, examples, steps = zip(*results, strict=True)
    known = [b for b in buffers if b is not None]
    return CohortUpdate(
        torch.cat(deltas) if len(deltas) > 1 else deltas[0],
        torch.cat(known) if known else None,
        torch.cat(losses),
        [n for part in examples for n in part],
        [n for part in steps for n in part],
        rate,
    )
