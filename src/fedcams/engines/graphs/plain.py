"""The operations of a program in plain PyTorch, on any device and in any precision: what kernels are tested by."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcams.engines.graphs.block import Block
from fedcams.engines.graphs.program import Conv, ConvNorm, Norm

ACTIVATE = {"none": lambda x: x, "relu": torch.relu, "gelu": F.gelu}


class PlainOperations:
    """Convolutions with a group for each client; gradients come from autograd with respect to the whole block."""

    def __init__(self, block: Block, training: bool) -> None:
        self.block, self.training = block, training
        if training:
            block.compute.requires_grad_()

    def convolve(self, conv: Conv, x: Tensor) -> Tensor:
        """`[C, B, h, w, k] -> [C, B, p, q, k']`."""
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

    def convolve_and_normalize(self, it: ConvNorm, x: Tensor, residual: Tensor | None, other: Tensor | None) -> Tensor:
        """`post(norm(pre(conv(x))) + residual)`; `other` is the input of a residual that is itself normalised."""
        y = self._normalize(it.norm, ACTIVATE[it.pre](self.convolve(it.conv, x)))
        if isinstance(it.residual, ConvNorm) and other is not None:
            residual = self._normalize(it.residual.norm, self.convolve(it.residual.conv, other))
        result: Tensor = ACTIVATE[it.post](y if residual is None else y + residual)
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
        share = momentum * (sizes > 0)[:, None].to(x.dtype)
        for held, new in zip(running, (mean, spread / (count - 1).clamp(min=1)), strict=True):
            held.add_(share * (new.detach() - held))
        return mean, spread / count

    def backward(self, loss: Tensor) -> None:
        """Fills the gradients of the block."""
        (gradient,) = torch.autograd.grad(loss, self.block.compute)
        self.block.gradient.copy_(gradient)

    def descend(self, lr: float) -> None:
        """A step against the gradient for clients that have examples."""
        with torch.no_grad():
            active = (self.block.sizes > 0).to(self.block.values.dtype)[:, None]
            self.block.values.sub_(self.block.gradient * active, alpha=lr)
            if self.block.compute is not self.block.values:
                self.block.compute.copy_(self.block.values)
