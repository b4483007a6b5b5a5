"""One local step of a whole cohort, captured once as a CUDA graph and replayed for every step.

The cohort is split into a few lanes, each on its own stream: while the kernels of one lane wait for memory, those of
another compute, and the last tiles of one layer run alongside the first tiles of another lane's layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from fedcams.engines.batches import Batches, weighted
from fedcams.engines.graphs.block import Block, Packing
from fedcams.engines.graphs.operations import Operations, TorchOperations, run
from fedcams.engines.graphs.program import Program
from fedcams.engines.problem import Loss, Problem
from fedcams.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

COMPUTE = {"bf16": torch.bfloat16, "tf32": torch.float32, "float32": torch.float32}
AHEAD = 2**30
"""Bytes of inputs that are prepared at once."""


def uses_kernels(device: torch.device) -> bool:
    """Return whether Triton's kernels run there: on a CUDA device, or anywhere with its interpreter switched on."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def operations_for(block: Block, training: bool, precision: str, descends: bool = False) -> Operations:
    """Return fused kernels if they run there, else PyTorch operations; with `descends`, kernels also take the step."""
    if uses_kernels(block.values.device):
        from fedcams.engines.graphs.fused import FusedOperations

        return FusedOperations(block, training, precision, descends)
    return TorchOperations(block, training)


def compute_type(problem: Problem, precision: str) -> torch.dtype:
    """Return the dtype of activations: `precision` with kernels, the model's own with PyTorch operations."""
    return COMPUTE[precision] if uses_kernels(problem.device) else problem.dtype


class Lane(NamedTuple):
    """Some clients of a cohort, which take their step on a separate stream."""

    clients: slice
    block: Block
    operations: Operations
    stream: torch.cuda.Stream | None


class Cohort:
    """The memory of C clients and the graph of their step; reused in every round.

    A plain rule takes its step inside the fused kernels; other rules, and gradients with a shift, use the rule's own
    `step_` on the packed rows. Rates and shifts are read from memory, so a new value needs no new graph. If all clients
    take every step, rules need not mask clients that are done; this case has its own graph.
    """

    def __init__(
        self, problem: Problem, program: Program, packing: Packing, clients: int, precision: str, streams: int = 1,
        shifted: bool = False,
    ) -> None:  # fmt: skip
        # Nothing here may refer to the problem or its model: the engine keeps this for as long as the model exists.
        self.program, self.packing, self.local, self.loss = program, packing, problem.local, problem.loss
        self.clients, self.device, self.even = clients, problem.device, False
        self.compute = compute_type(problem, precision)
        self.block = Block.empty(packing, problem.buffer_layout, clients, problem.device, problem.dtype, self.compute)
        self.fused = problem.local.is_plain and not shifted
        self.lanes = self._split(min(streams, clients), precision, self.fused)
        self.slots = problem.local.init(self.block.values.detach())
        self.shift = torch.zeros_like(self.block.gradient) if shifted else None
        self.losses = torch.zeros(clients, device=problem.device, dtype=problem.dtype)
        self.inputs: Tensor | None = None
        self.replays: dict[bool, Callable[[], None]] = {}
        """Whether all clients take every step -> the step."""

    @torch.no_grad()
    def train(
        self, start: Tensor, buffers: Tensor | None, batches: Batches, rate: float, shift: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Train from rows `[C, d]`; return the changes `[C, d]`, the buffers `[C, b]` and the mean losses `[C]`."""
        self._begin(start, buffers, rate, shift)
        self.even = not self.fused and len(batches.steps) == self.clients and len(set(batches.steps)) == 1
        ahead = max(1, AHEAD // (4 * batches.example[0].numel() * batches.x[0].numel()))
        for first in range(0, len(batches), ahead):
            last = min(first + ahead, len(batches))
            inputs = channels_last(batches.inputs(first, last)).to(self.compute).contiguous()
            targets = batches.targets(first, last)
            for i in range(last - first):
                self._feed(inputs[i], targets[i], batches.weight[first + i], batches.sizes[first + i])
                self.replays[self.even]()
        seen = torch.tensor(batches.seen, device=self.device, dtype=self.losses.dtype)
        count = len(batches.seen)
        delta = torch.empty(count, self.packing.layout.d, device=self.device, dtype=start.dtype)
        self.packing.unpack(self.block.values[:count].detach(), delta)
        left = None if self.block.buffers is None else self.block.buffers[:count].clone()
        return delta.sub_(start[:count]), left, self.losses[:count] / seen

    def _begin(self, start: Tensor, buffers: Tensor | None, rate: float, shift: Tensor | None) -> None:
        self.block.load(start, buffers)
        self.block.rates.fill_(rate)
        self.losses.zero_()
        for name, fresh in self.local.init(self.block.values.detach()).items():
            self.slots[name].copy_(fresh)
        if self.shift is not None and shift is not None:
            self.packing.pack(shift, self.shift)

    def _feed(self, x: Tensor, y: Tensor, weight: Tensor, sizes: Tensor) -> None:
        """Put a step's examples where the graph reads them; the first ones set the shapes and are captured."""
        self.block.sizes.copy_(sizes)
        if self.inputs is None:
            self.inputs, self.targets = x.clone(), y.clone()
            self.weight = weight.clone().to(self.losses.dtype)
        else:
            self.inputs.copy_(x)
            self.targets.copy_(y)
            self.weight.copy_(weight)
        if self.even not in self.replays:
            self.replays[self.even] = self._captured() if self.device.type == "cuda" else self._step

    def _captured(self) -> Callable[[], None]:
        """Capture the step, after compiling kernels and loading them in a rehearsal; restore what that changed."""
        from fedcams.engines.graphs.kernels.entry import compiling

        state = [self.block.values, self.block.compute, self.losses, *self.slots.values()]
        state += [] if self.block.buffers is None else [self.block.buffers]
        kept = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            with compiling():
                self._step()
            self._step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        for tensor, before in zip(state, kept, strict=True):
            tensor.copy_(before)
        return graph.replay

    def _split(self, count: int, precision: str, descends: bool) -> list[Lane]:
        """Return lanes with about the same number of clients."""
        cuts = [self.clients * i // count for i in range(count + 1)]
        rows = [slice(*ends) for ends in pairwise(cuts)]
        alone = count == 1 or self.device.type != "cuda"
        streams = [None if alone else torch.cuda.Stream(self.device) for _ in rows]
        blocks = [self.block.lane(clients) for clients in rows]
        lanes = [operations_for(block, True, precision, descends) for block in blocks]
        return [Lane(*lane) for lane in zip(rows, blocks, lanes, streams, strict=True)]

    def _step(self) -> None:
        if self.lanes[0].stream is None:
            for lane in self.lanes:
                self._advance(lane)
            return
        here = torch.cuda.current_stream(self.device)
        for lane in self.lanes:
            assert lane.stream is not None
            lane.stream.wait_stream(here)
            with torch.cuda.stream(lane.stream):
                self._advance(lane)
        for lane in self.lanes:
            assert lane.stream is not None
            here.wait_stream(lane.stream)

    def _advance(self, lane: Lane) -> None:
        assert self.inputs is not None
        clients = lane.clients
        with torch.enable_grad():
            outputs = run(self.program, lane.operations, self.inputs[clients])
            each = per_example(self.loss, outputs, self.targets[clients])
            losses = weighted(each, self.weight[clients])
            lane.operations.backward(losses.sum())
        with torch.no_grad():
            self._descend_(lane)
            self.losses[clients] += losses.detach() * self.block.sizes[clients]

    def _descend_(self, lane: Lane) -> None:
        """Take the step of a lane's clients that have examples."""
        if lane.operations.descend_():
            return
        block = lane.block
        if self.shift is not None:
            block.gradient.add_(self.shift[lane.clients])
        slots = {name: slot[lane.clients] for name, slot in self.slots.items()}
        active = None if self.even else block.sizes > 0
        self.local.step_(block.values.detach(), block.gradient, slots, block.rates, active)
        block.refresh_()


def per_example(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return losses `[C, B]` in full precision; refuses a loss that is already a mean."""
    wide = outputs.float() if outputs.dtype == torch.bfloat16 else outputs
    each = loss(wide.flatten(0, 1), targets.flatten(0, 1))
    if each.dim() != 1:
        raise SpecError(f"engine=graphs needs the loss of each example, got shape {list(each.shape)}; use engine=loop")
    result: Tensor = each.unflatten(0, outputs.shape[:2])
    return result


def channels_last(x: Tensor) -> Tensor:
    """Return images `[S, C, B, k, h, w]` as `[S, C, B, h, w, k]`, without a copy; other tensors unchanged."""
    return x.movedim(-3, -1) if x.dim() == 6 else x
