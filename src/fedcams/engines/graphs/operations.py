"""Run a program: its operations in order on the images of a whole cohort, in PyTorch or with fused kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

from fedcams.engines.graphs.block import Block
from fedcams.engines.graphs.program import Conv, ConvNorm, Norm, Parameterless, Program, Unfused

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATE = {"none": lambda x: x, "relu": torch.relu, "gelu": F.gelu}


class Operations(Protocol):
    """What runs a program: PyTorch, or fused kernels."""

    def convolve(self, conv: Conv, x: Tensor) -> Tensor:
        """Return the convolution `[C, B, p, q, k']` of `x [C, B, h, w, k]`."""

    def convolve_and_normalize(self, op: ConvNorm, x: Tensor, residual: Tensor | None, other: Tensor | None) -> Tensor:
        """Return `post(norm(pre(conv(x))) + residual)`; `other` is the input of a normalised residual."""

    def backward(self, loss: Tensor) -> None:
        """Fill the gradients of the block."""

    def descend_(self) -> bool:
        """Take the step `x -= rate·gradient` of clients with examples; returns False to leave it to the rule."""


def run(program: Program, operations: Operations, x: Tensor) -> Tensor:
    """Run a program on inputs `[C, B, h, w, k]` or `[C, B, n]`; returns the outputs `[C, B, classes]`."""
    values = {program.entry: x}
    for name, operation in program.operations.items():
        if isinstance(operation, Parameterless):
            values[name] = operation.function(*(values[source] for source in operation.sources))
        elif isinstance(operation, Unfused):
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
    """Return a convolution, or a linear layer, which is a convolution of images of one pixel."""
    if x.dim() == 5:
        return operations.convolve(conv, x.contiguous())
    return operations.convolve(conv, x[:, :, None, None].contiguous()).flatten(2)


class TorchOperations:
    """The operations in PyTorch, on any device and in any precision; the fused kernels are tested against them.

    Convolutions have one group per client; gradients come from autograd with respect to the whole block.
    """

    def __init__(self, block: Block, training: bool) -> None:
        self.block, self.training = block, training
        if training:
            block.compute.requires_grad_()

    def convolve(self, conv: Conv, x: Tensor) -> Tensor:
        """Return the convolution `[C, B, p, q, k']` of `x [C, B, h, w, k]`."""
        clients = len(x)
        weight = self.block.weight(conv.weight)
        while weight.dim() < 5:  # a linear layer
            weight = weight.unsqueeze(2)
        kernel = weight.permute(0, 4, 3, 1, 2) if conv.depthwise else weight.permute(0, 1, 4, 2, 3)
        stacked = x.permute(1, 0, 4, 2, 3).flatten(1, 2)
        bias = None if conv.bias is None else self.block.weight(conv.bias).flatten()
        groups = clients * (x.shape[-1] if conv.depthwise else 1)
        y = F.conv2d(stacked, kernel.flatten(0, 1), bias, conv.stride, conv.padding, groups=groups)
        result: Tensor = y.unflatten(1, (clients, -1)).permute(1, 0, 3, 4, 2)
        return result

    def convolve_and_normalize(self, op: ConvNorm, x: Tensor, residual: Tensor | None, other: Tensor | None) -> Tensor:
        """Return `post(norm(pre(conv(x))) + residual)`; `other` is the input of a normalised residual."""
        y = self._normalize(op.norm, ACTIVATE[op.pre](self.convolve(op.conv, x)))
        if isinstance(op.residual, ConvNorm) and other is not None:
            residual = self._normalize(op.residual.norm, self.convolve(op.residual.conv, other))
        result: Tensor = ACTIVATE[op.post](y if residual is None else y + residual)
        return result

    def _normalize(self, norm: Norm, x: Tensor) -> Tensor:
        gamma, beta = (self.block.weight(f"{norm.name}.{end}")[:, None, None, None] for end in ("weight", "bias"))
        running = [self.block.buffer(f"{norm.name}.running_{end}") for end in ("mean", "var")]
        mean, var = running
        if self.training:
            mean, var = self._statistics(x, running, norm.momentum)
        scaled = (x - mean[:, None, None, None]) * torch.rsqrt(var[:, None, None, None] + norm.eps)
        return scaled * gamma + beta

    def _statistics(self, x: Tensor, running: list[Tensor], momentum: float) -> tuple[Tensor, Tensor]:
        sizes = self.block.sizes
        real = (torch.arange(x.shape[1], device=x.device) < sizes[:, None])[:, :, None, None, None]
        count = (sizes * x.shape[2] * x.shape[3]).clamp(min=1)[:, None].to(x.dtype)
        mean = (x * real).sum((1, 2, 3)) / count
        spread = ((x - mean[:, None, None, None]).square() * real).sum((1, 2, 3))
        active = (sizes > 0)[:, None]
        for held, new in zip(running, (mean, spread / (count - 1).clamp(min=1)), strict=True):
            held.copy_(torch.where(active, held + momentum * (new.detach() - held), held))
        return mean, spread / count

    def backward(self, loss: Tensor) -> None:
        """Fill the gradients of the block."""
        (gradient,) = torch.autograd.grad(loss, self.block.compute)
        self.block.gradient.copy_(gradient)

    def descend_(self) -> bool:
        """Return False: the rule takes the step."""
        return False
