"""A model's outputs for many examples: the forward pass as a CUDA graph, batch-norm folded into convolutions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedcams.engines.graphs.block import Block
from fedcams.engines.graphs.cohort import compute_type, operations
from fedcams.engines.graphs.packing import Packing
from fedcams.engines.graphs.program import Program
from fedcams.engines.graphs.run import run
from fedcams.engines.problem import Problem


class Predictor:
    """The memory of one model and a graph for each shape of batch; used again in every round."""

    def __init__(self, problem: Problem, program: Program, packing: Packing, precision: str) -> None:
        self.program, self.compute = program, compute_type(problem, precision)
        self.block = Block.empty(
            packing, problem.buffer_layout, 1, problem.device, problem.dtype, self.compute, train=False
        )
        self.operations = operations(self.block, False, precision)
        self.graphs: dict[torch.Size, tuple[Callable[[], None], Tensor, Tensor]] = {}

    def of(self, x: Tensor, buffers: Tensor | None, prepare: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """The function raw inputs `[n, ...]` -> outputs `[n, classes]` of the model `x [d]`."""
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
