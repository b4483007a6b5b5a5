"""Batch-norm as functions of tensors: grids and tile sizes of its kernels are worked out here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from fedcams.engines.graphs import tiles
from fedcams.engines.graphs.kernels import normalization
from fedcams.engines.graphs.launch import Slot, Statistics, act, add_parts, pointer_or


def finalize(
    stats: Statistics, sizes: Tensor, weights: tuple[Tensor, Tensor], running: tuple[Tensor, Tensor],
    momentum: float, eps: float, pixels: int,
) -> Tensor:  # fmt: skip
    """`[C, 4, K]`: mean, 1/std, scale, shift of a batch; the running statistics move on."""
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
    """What a normalisation read, kept for its gradient; `residual` with its moments where it is normalised too."""

    x: Tensor
    moments: Tensor
    residual: Tensor | None
    residual_moments: Tensor | None
    pre: str
    post: str

    def flags(self) -> dict[str, int]:
        """PRE, POST and RES."""
        kind = 0 if self.residual is None else 1 if self.residual_moments is None else 2
        return {"K": self.x.shape[-1], "PRE": act(self.pre, self.x), "POST": act(self.post, self.x), "RES": kind}

    @property
    def rows(self) -> int:
        """Rows of one client."""
        return self.x.shape[1] * self.x.shape[2] * self.x.shape[3]


def normalize(it: Normalized) -> Tensor:
    """`post(pre(x) scale + shift + residual)`."""
    y, channels = torch.empty_like(it.x), it.x.shape[-1]
    BN = tiles.power(channels, 16, 128)
    BM = max(1, 4096 // BN)
    normalization.apply[(triton.cdiv(it.rows, BM), triton.cdiv(channels, BN), len(y))](
        it.x, it.moments, pointer_or(it.residual, y), pointer_or(it.residual_moments, y), y, it.rows, **it.flags(),
        BM=BM, BN=BN, num_warps=4,
    )  # fmt: skip
    return y


def normalize_backward(
    it: Normalized, dy: Tensor, y: Tensor, sizes: Tensor, gradients: tuple[Tensor, ...], bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the residual; those of scale and shift (and bias) are written where they belong."""
    flags, channels, clients = it.flags(), it.x.shape[-1], len(y)
    BN = tiles.power(channels, 16, 64)
    BM = 2048 // BN
    chunk = BM * max(1, min(8, it.rows * triton.cdiv(channels, BN) * clients // (BM * 1056)))
    chunks = triton.cdiv(it.rows, chunk)
    shared = (pointer_or(it.residual, y), pointer_or(it.residual_moments, y))
    parts = torch.empty(clients, chunks, 3, channels, device=y.device, dtype=torch.float32)
    normalization.backward_sums[(chunks, triton.cdiv(channels, BN), clients)](
        dy, it.x, y, it.moments, *shared, parts, it.rows, chunk, **flags, BM=BM, BN=BN, num_warps=4
    )
    sums = torch.empty(clients, 3, channels, device=y.device, dtype=torch.float32)
    narrow = 16
    gamma, beta, *other = gradients
    normalization.backward_finalize[(triton.cdiv(channels, narrow), clients)](
        parts, sums, gamma, beta, *(other or (gamma, beta)), chunks, gamma.stride(0), K=channels, RES=flags["RES"],
        BT=tiles.power(chunks, 16, 128), BN=narrow, num_warps=4,
    )  # fmt: skip
    dx, dresidual = torch.empty_like(it.x), None if it.residual is None else torch.empty_like(it.residual)
    count = triton.cdiv(it.rows, BM)
    bias_parts = (
        torch.empty(clients, count, channels, device=y.device, dtype=torch.float32) if bias is not None else None
    )
    normalization.backward_apply[(count, triton.cdiv(channels, BN), clients)](
        dy, it.x, y, it.moments, sums, *shared, dx, pointer_or(dresidual, y), pointer_or(bias_parts, y), sizes, it.rows,
        **flags, PIXELS=it.x.shape[2] * it.x.shape[3], BIAS=bias is not None, BM=BM, BN=BN, num_warps=4,
    )  # fmt: skip
    if bias is not None and bias_parts is not None:
        add_parts(bias_parts, Slot(bias))
    return dx, dresidual
