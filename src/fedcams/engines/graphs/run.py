"""Running a program: its operations in order on the images of a whole cohort."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fedcams.engines.graphs.program import Conv, ConvNorm, Other, Plain, Program


class Operations(Protocol):
    """What carries a program out: plain PyTorch or fused kernels."""

    def convolve(self, conv: Conv, x: Tensor) -> Tensor:
        """`[C, B, h, w, k] -> [C, B, p, q, k']`."""

    def convolve_and_normalize(self, it: ConvNorm, x: Tensor, residual: Tensor | None, other: Tensor | None) -> Tensor:
        """`post(norm(pre(conv(x))) + residual)`; `other` is the input of a residual that is itself normalised."""

    def backward(self, loss: Tensor) -> None:
        """Fills the gradients of the block."""

    def descend(self, lr: float) -> None:
        """A step against the gradient for clients that have examples."""


def run(program: Program, operations: Operations, x: Tensor) -> Tensor:
    """Inputs `[C, B, h, w, k]` (or `[C, B, n]`) -> outputs `[C, B, classes]`."""
    values = {program.entry: x}
    for name, operation in program.operations.items():
        if isinstance(operation, Other):
            values[name] = operation.function(*(values[source] for source in operation.sources))
        elif isinstance(operation, Plain):
            values[name] = _convolve(operations, operation.conv, values[operation.source])
        else:
            residual, other = None, None
            if isinstance(operation.residual, ConvNorm):
                other = values[operation.residual.source]
            elif operation.residual is not None:
                residual = values[operation.residual]
            source = values[operation.source].contiguous()
            values[name] = operations.convolve_and_normalize(operation, source, residual, other)
    return values[program.result]


def _convolve(operations: Operations, conv: Conv, x: Tensor) -> Tensor:
    """A linear layer is a convolution of images of one pixel."""
    if x.dim() == 5:
        return operations.convolve(conv, x.contiguous())
    return operations.convolve(conv, x[:, :, None, None].contiguous()).flatten(2)
