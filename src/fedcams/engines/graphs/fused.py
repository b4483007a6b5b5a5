"""The operations of a program as fused Triton kernels; gradients are written directly into the block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fedcams.engines.graphs import launch, launch_norms
from fedcams.engines.graphs.block import Block
from fedcams.engines.graphs.launch import Epilogue, Slot, Statistics
from fedcams.engines.graphs.launch_norms import Normalized
from fedcams.engines.graphs.program import Conv, ConvNorm, Norm

if TYPE_CHECKING:
    from torch import Tensor


class FusedOperations:
    """As `TorchOperations`, on a CUDA device. Precision: `bf16`, `tf32` or `float32`.

    With `descends`, the kernel that computes the gradient of a convolution's weights also takes the step
    `x -= rate·gradient`, and the gradient itself is never written.
    """

    def __init__(self, block: Block, training: bool, precision: str, descends: bool = False) -> None:
        self.block, self.training, self.precision, self.descends = block, training, precision, descends
        self.token = torch.zeros((), device=block.values.device, requires_grad=training)
        """An input of every operation, so that autograd goes through those whose other inputs need no gradient."""
        self.gathering: set[int] = set()
        """Address of a value -> the gradients of its other uses, which its first convolution adds to its own."""
        self.left: dict[int, Tensor] = {}

    def convolve(self, conv: Conv, x: Tensor) -> Tensor:
        """Return the convolution `[C, B, p, q, k']` of `x [C, B, h, w, k]`."""
        if not self.training:
            return launch.convolve(conv, x, *self._weights(conv), self.precision)[0]
        y: Tensor = _Convolution.apply(x, self.token, self, conv, None, [])  # type: ignore[no-untyped-call]
        return y

    def convolve_and_normalize(self, op: ConvNorm, x: Tensor, residual: Tensor | None, other: Tensor | None) -> Tensor:
        """Return `post(norm(pre(conv(x))) + residual)`; `other` is the input of a normalised residual."""
        second = op.residual if isinstance(op.residual, ConvNorm) else None
        if not self.training:
            if second is not None and other is not None:
                residual = self._evaluate(second, other, None)
            return self._evaluate(op, x, residual)
        raw, moments = self._moments(op, x)
        residual_moments = None
        if second is not None and other is not None:
            residual, residual_moments = self._moments(second, other)
        y: Tensor = _Normalization.apply(raw, residual, self.token, self, op, moments, residual_moments)  # type: ignore[no-untyped-call]
        return y

    def backward(self, loss: Tensor) -> None:
        """Fill the gradients of the block."""
        torch.autograd.grad(loss, self.token, allow_unused=True)
        assert not self.left, "a gradient was left that no convolution gathered"

    def descend_(self) -> bool:
        """Take the step of those parameters that have not taken it yet; returns False without `descends`."""
        if not self.descends:
            return False
        block, left = self.block, slice(self.block.packing.rest, None)
        copy = None if block.compute is block.values else block.compute[:, left]
        launch.descend_(block.values[:, left], block.gradient[:, left], copy, block.sizes, block.rates)
        return True

    # -- parts -----------------------------------------------------------------------------------------------------

    def _weights(self, conv: Conv) -> tuple[Tensor, Tensor | None]:
        return self.block.weight(conv.weight), None if conv.bias is None else self.block.weight(conv.bias)

    def _leave(self, value: int, gradient: Tensor) -> Tensor | None:
        """Leave a gradient to the convolution that gathers it; returns it if there is none, or it is already done."""
        if value not in self.gathering:
            return gradient
        self.left[value] = self.left[value] + gradient if value in self.left else gradient
        return None

    def _slot(self, name: str) -> Slot:
        block = self.block
        if not self.descends:
            return Slot(block.slot(name))
        copy = None if block.compute is block.values else block.weight(name)
        return Slot(block.master(name), copy, block.sizes, block.rates)

    def _moments(self, op: ConvNorm, x: Tensor) -> tuple[Tensor, Tensor]:
        found: list[Statistics] = []
        raw: Tensor = _Convolution.apply(x, self.token, self, op.conv, op.pre, found)  # type: ignore[no-untyped-call]
        master = self.block.master(f"{op.norm.name}.weight"), self.block.master(f"{op.norm.name}.bias")
        pixels = raw.shape[2] * raw.shape[3]
        return raw, launch_norms.finalize(
            found[0], self.block.sizes, master, self._running(op.norm), op.norm.momentum, op.norm.eps, pixels
        )

    def _running(self, norm: Norm) -> tuple[Tensor, Tensor]:
        return self.block.buffer(f"{norm.name}.running_mean"), self.block.buffer(f"{norm.name}.running_var")

    def _evaluate(self, op: ConvNorm, x: Tensor, residual: Tensor | None) -> Tensor:
        """Evaluate with the running statistics, which turns everything after the convolution into its epilogue."""
        mean, var = self._running(op.norm)
        scale = self.block.master(f"{op.norm.name}.weight") * torch.rsqrt(var + op.norm.eps)
        shift = self.block.master(f"{op.norm.name}.bias") - mean * scale
        epilogue = Epilogue(residual, scale, shift, op.pre, op.post)
        return launch.convolve(op.conv, x, *self._weights(op.conv), self.precision, epilogue=epilogue)[0]


class _Convolution(torch.autograd.Function):
    """`found` receives the statistics of the result if a normalisation follows (`pre` is then its activation)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, token: Tensor, ops: FusedOperations, conv: Conv, pre: str | None, found: list[Statistics]
    ) -> Tensor:
        weight, bias = ops._weights(conv)
        sizes = None if pre is None else ops.block.sizes
        y, stats = launch.convolve(conv, x, weight, bias, ops.precision, sizes, pre or "none")
        if stats is not None:
            found.append(stats)
        ctx.save_for_backward(x)
        ctx.ops, ctx.conv, ctx.normalized = ops, conv, pre is not None
        ctx.gathers = ctx.needs_input_grad[0] and x.data_ptr() not in ops.gathering
        if ctx.gathers:
            ops.gathering.add(x.data_ptr())
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        ops, conv, (x,) = ctx.ops, ctx.conv, ctx.saved_tensors
        dy = dy.contiguous()
        dx = None
        if ctx.needs_input_grad[0]:  # before the weights may change
            added = ops.left.pop(x.data_ptr(), None)
            dx = launch.gradient_input(conv, dy, x, ops.block.weight(conv.weight), ops.precision, added)
            if ctx.gathers:
                ops.gathering.discard(x.data_ptr())
            dx = ops._leave(x.data_ptr(), dx)
        launch.gradient_weight(conv, dy, x, ops._slot(conv.weight), ops.precision)
        if conv.bias is not None and not ctx.normalized:  # otherwise the normalisation sums it
            ops.block.slot(conv.bias).copy_(dy.sum((1, 2, 3), dtype=torch.float32))
        return dx, None, None, None, None, None


class _Normalization(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, token: Tensor, ops: FusedOperations, op: ConvNorm,
        moments: Tensor, residual_moments: Tensor | None,
    ) -> Tensor:  # fmt: skip
        y = launch_norms.normalize(Normalized(x, moments, residual, residual_moments, op.pre, op.post))
        ctx.save_for_backward(x, residual, moments, residual_moments, y)
        ctx.ops, ctx.op = ops, op
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, residual, moments, residual_moments, y = ctx.saved_tensors
        block, op = ctx.ops.block, ctx.op
        names = [op.norm.name, *([op.residual.norm.name] if isinstance(op.residual, ConvNorm) else [])]
        gradients = tuple(block.slot(f"{name}.{end}") for name in names for end in ("weight", "bias"))
        bias = None if op.conv.bias is None else block.slot(op.conv.bias)
        normalized = Normalized(x, moments, residual, residual_moments, op.pre, op.post)
        dx, dresidual = launch_norms.normalize_backward(normalized, dy.contiguous(), y, block.sizes, gradients, bias)
        if isinstance(op.residual, ConvNorm) and op.residual.conv.bias is not None and dresidual is not None:
            block.slot(op.residual.conv.bias).copy_(dresidual.sum((1, 2, 3), dtype=torch.float32))
        if dresidual is not None and residual_moments is None:
            dresidual = ctx.ops._leave(residual.data_ptr(), dresidual)
        return dx, dresidual, None, None, None, None, None
