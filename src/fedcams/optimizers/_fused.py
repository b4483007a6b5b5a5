"""The server step on a CUDA device: one Triton kernel for all seven formulas, which reads and writes each vector once.

The formulas are those of the optimizers' `update_`, and tests compare the two. Optimizers without a formula here,
float64 vectors and a torch without Triton run `update_` over pieces instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from fedcams.optimizers.base import ServerOptimizer

RULES = frozenset({"fedavg", "fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedamsgrad", "fedams"})
BLOCK = 512  # fedams at d = 11,173,962: 0.10 ms on an H200, 3.8 copies (benchmarks/records/server-step-cuda.json)


def fused_step_(optimizer: ServerOptimizer, t: int, x: Tensor, delta: Tensor, state: Mapping[str, Tensor]) -> None:
    """Take step t of the optimizer with the mean update `delta [d]`, in place on `x [d]` and on the state's vectors."""
    m, v, vhat = (state.get(name, x) for name in ("m", "v", "vhat"))
    with torch.cuda.device_of(x):
        grid = (triton.cdiv(x.numel(), BLOCK),)
        _kernel[grid](x, delta, m, v, vhat, x.numel(), *_scalars(optimizer, t), rule=optimizer.name, BLOCK=BLOCK)


def _scalars(optimizer: Any, t: int) -> tuple[float, float, float, float]:
    """Return lr, ε, and the weights of the new value in both moments (`fedavgm`: of the old value in the first)."""
    corrected = hasattr(optimizer, "rates")
    lr, eps = optimizer.rates(t) if corrected else (float(optimizer.lr), float(getattr(optimizer, "eps", 0)))
    eps = float(optimizer.eps) if optimizer.name == "fedams" else eps  # bounds v̂ itself, uncorrected
    first = optimizer.momentum if optimizer.name == "fedavgm" else 1 - getattr(optimizer, "beta1", 0)
    return lr, eps, float(first), float(1 - getattr(optimizer, "beta2", 0))


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    x_at, delta_at, m_at, v_at, vhat_at, n, lr, eps, first, second, rule: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    delta = tl.load(delta_at + at, inside)
    step = delta
    if rule != "fedavg":
        m = tl.load(m_at + at, inside)
        m = first * m + delta if rule == "fedavgm" else m + first * (delta - m)
        tl.store(m_at + at, m, inside)
        step = m
    if rule != "fedavg" and rule != "fedavgm":
        square = delta * delta
        v = tl.load(v_at + at, inside)
        if rule == "fedadagrad":
            v += square
        elif rule == "fedyogi":
            v -= second * tl.where(v > square, square, tl.where(v < square, -square, 0.0))
        else:
            v += second * (square - v)
        tl.store(v_at + at, v, inside)
        if rule == "fedamsgrad" or rule == "fedams":
            v = tl.maximum(tl.load(vhat_at + at, inside), v)
            if rule == "fedams":
                v = tl.maximum(v, eps)
            tl.store(vhat_at + at, v, inside)
        root = tl.sqrt_rn(v)
        step = tl.div_rn(m, root if rule == "fedams" else root + eps)
    x = tl.load(x_at + at, inside)
    tl.store(x_at + at, x + lr * step, inside)
