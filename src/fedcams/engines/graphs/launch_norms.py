"""Batch-norm as functions of tensors: this module computes the grids and tile sizes of its kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from fedcams.engines.graphs import tiles
from fedcams.engines.graphs.kernels import normalization
from fedcams.engines.graphs.launch import Slot, Statistics, act, add_parts, pointer_or

if TYPE_CHECKING:
    from torch import Tensor


def finalize(
    stats: Statistics, sizes: Tensor, weights: tuple[Tensor, Tensor], running: tuple[Tensor, Tensor],
    momentum: float, eps: float, pixels: int,
) -> Tensor:  # fmt: skip
    """Return mean, 1/std, scale and shift of a batch as `[C, 4, K]`, and update the running statistics."""
    clients, count, _, channels = stats.parts.shape
    moments = torch.empty(clients, 4, channels, device=stats.parts.device, dtype=torch.float32)
    BN = 16
    normalization.finalize[(triton.cdiv(channels, BN), clients)](
        stats.parts, sizes, *weights, *running, moments, count, weights[0].stride(0), running[0].stride(0),
        momentum, eps, PIXELS=pixels, K=channels, BM=stats.rows, BT=tiles.power(count, 16, 256), BN=BN, num_warps=4,
    )  # fmt: skip
    return moments


@dataclass(frozen=True)
class Normalized:
    """What a normalisation read, kept for its gradient; `residual` has moments if it is normalised too."""

    x: Tensor
    moments: Tensor
    residual: Tensor | None
    residual_moments: Tensor | None
    pre: str
    post: str

    def flags(self) -> dict[str, int]:
        """Return the flags PRE, POST and RES."""
        kind = 0 if self.residual is None else 1 if self.residual_moments is None else 2
        return {"K": self.x.shape[-1], "PRE": act(self.pre, self.x), "POST": act(self.post, self.x), "RES": kind}

    @property
    def rows(self) -> int:
        """The number of rows of one client."""
        return self.x.shape[1] * self.x.shape[2] * self.x.shape[3]


def normalize(op: Normalized) -> Tensor:
    """Return `post(pre(x) scale + shift + residual)`."""
    y, channels = torch.empty_like(op.x), op.x.shape[-1]
    BN = tiles.power(channels, 16, 128)
    BM = max(1, 4096 // BN)
    normalization.apply[(triton.cdiv(op.rows, BM), triton.cdiv(channels, BN), len(y))](
        op.x, op.moments, pointer_or(op.residual, y), pointer_or(op.residual_moments, y), y, op.rows, **op.flags(),
        BM=BM, BN=BN, num_warps=4,
    )  # fmt: skip
    return y


def normalize_backward(
    op: Normalized, dy: Tensor, y: Tensor, sizes: Tensor, gradients: tuple[Tensor, ...], bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of the residual; write those of scale and shift (and bias) into their slots."""
    flags, channels, clients = op.flags(), op.x.shape[-1], len(y)
    BN = tiles.power(channels, 16, 64)
    BM = 2048 // BN
    chunk = BM * max(1, min(8, op.rows * triton.cdiv(channels, BN) * clients // (BM * 1056)))
    chunks = triton.cdiv(op.rows, chunk)
    shared = (pointer_or(op.residual, y), pointer_or(op.residual_moments, y))
    parts = torch.empty(clients, chunks, 3, channels, device=y.device, dtype=torch.float32)
    normalization.backward_sums[(chunks, triton.cdiv(channels, BN), clients)](
        dy, op.x, y, op.moments, *shared, parts, op.rows, chunk, **flags, BM=BM, BN=BN, num_warps=4
    )
    sums = torch.empty(clients, 3, channels, device=y.device, dtype=torch.float32)
    narrow = 16
    gamma, beta, *other = gradients
    normalization.backward_finalize[(triton.cdiv(channels, narrow), clients)](
        parts, sums, gamma, beta, *(other or (gamma, beta)), chunks, gamma.stride(0), K=channels, RES=flags["RES"],
        BT=tiles.power(chunks, 16, 128), BN=narrow, num_warps=4,
    )  # fmt: skip
    dx, dresidual = torch.empty_like(op.x), None if op.residual is None else torch.empty_like(op.residual)
    count = triton.cdiv(op.rows, BM)
    bias_parts = (
        torch.empty(clients, count, channels, device=y.device, dtype=torch.float32) if bias is not None else None
    )
    normalization.backward_apply[(count, triton.cdiv(channels, BN), clients)](
        dy, op.x, y, op.moments, sums, *shared, dx, pointer_or(dresidual, y), pointer_or(bias_parts, y), sizes, op.rows,
        **flags, PIXELS=op.x.shape[2] * op.x.shape[3], BIAS=bias is not None, BM=BM, BN=BN, num_warps=4,
    )  # fmt: skip
    if bias is not None and bias_parts is not None:
        add_parts(bias_parts, Slot(bias))
    return dx, dresidual
