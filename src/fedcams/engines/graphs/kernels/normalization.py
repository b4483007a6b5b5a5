"""Batch-norm for each client separately, with activation and residual sum in the same pass; `x [C, rows, K]`.

Rows of padding examples come last and do not count in any statistic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedcams.engines.graphs.kernels.convolution import activate, slope
from fedcams.engines.graphs.kernels.entry import Entry


@Entry
def finalize(
    stats, sizes, gamma, beta, running_mean, running_var, moments, tiles, w_client, b_client, momentum, eps,
    PIXELS: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Turn statistics of tiles into `moments [C, 4, K]`: mean, 1/std, scale, shift; update the running statistics."""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    client = tl.program_id(1).to(tl.int64)
    inside = columns < K
    real = tl.load(sizes + client) * PIXELS
    count = tl.maximum(real, 1).to(tl.float32)
    stats += client * tiles * 2 * K
    mean = tl.zeros((BN,), tl.float32)
    for t0 in range(0, tiles, BT):
        tile = t0 + tl.arange(0, BT)
        part = tl.minimum(tl.maximum(real - tile * BM, 0), BM).to(tl.float32)
        wide = (tile < tiles)[:, None] & inside[None, :]
        mean += tl.sum(tl.load(stats + tile[:, None] * 2 * K + columns[None, :], wide, other=0.0) * part[:, None], 0)
    mean = tl.div_rn(mean, count)
    spread = tl.zeros((BN,), tl.float32)
    for t0 in range(0, tiles, BT):
        tile = t0 + tl.arange(0, BT)
        part = tl.minimum(tl.maximum(real - tile * BM, 0), BM).to(tl.float32)
        wide = (tile < tiles)[:, None] & inside[None, :]
        at = stats + tile[:, None] * 2 * K + columns[None, :]
        off = tl.load(at, wide, other=0.0) - mean[None, :]
        spread += tl.sum(tl.load(at + K, wide, other=0.0) + off * off * part[:, None], 0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(spread, count) + eps))
    scale = tl.load(gamma + client * w_client + columns, inside, other=0.0) * rstd
    out = moments + client * 4 * K + columns
    tl.store(out, mean, inside)
    tl.store(out + K, rstd, inside)
    tl.store(out + 2 * K, scale, inside)
    tl.store(out + 3 * K, tl.load(beta + client * w_client + columns, inside, other=0.0) - mean * scale, inside)
    active = inside & (real > 0)
    at_mean, at_var = running_mean + client * b_client + columns, running_var + client * b_client + columns
    old_mean, old_var = tl.load(at_mean, active, other=0.0), tl.load(at_var, active, other=0.0)
    tl.store(at_mean, (1 - momentum) * old_mean + momentum * mean, active)
    unbiased = tl.div_rn(spread, tl.maximum(count - 1, 1.0))
    tl.store(at_var, (1 - momentum) * old_var + momentum * unbiased, active)


@Entry
def apply(
    x, moments, residual, residual_moments, y, rows_total,
    K: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr, RES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute y = POST(PRE(x) scale + shift + residual). RES: 0 none, 1 unchanged, 2 normalised by its own moments."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    client = tl.program_id(2).to(tl.int64)
    inside = columns < K
    wide = (rows < rows_total)[:, None] & inside[None, :]
    here = (client * rows_total + rows)[:, None] * K + columns[None, :]
    scale = tl.load(moments + (client * 4 + 2) * K + columns, inside, other=0.0)
    shift = tl.load(moments + (client * 4 + 3) * K + columns, inside, other=0.0)
    value = activate(tl.load(x + here, wide, other=0.0).to(tl.float32), PRE) * scale[None, :] + shift[None, :]
    if RES:
        other = tl.load(residual + here, wide, other=0.0).to(tl.float32)
        if RES == 2:
            scale = tl.load(residual_moments + (client * 4 + 2) * K + columns, inside, other=0.0)
            shift = tl.load(residual_moments + (client * 4 + 3) * K + columns, inside, other=0.0)
            other = other * scale[None, :] + shift[None, :]
        value += other
    tl.store(y + here, activate(value, POST).to(y.dtype.element_ty), wide)


@triton.jit
def incoming(dy, y, u, moments, here, wide, columns, client, K: tl.constexpr, POST: tl.constexpr, RES: tl.constexpr):
    """Return the gradient at the normalised value: dy where the ReLU was active."""
    g = tl.load(dy + here, wide, other=0.0).to(tl.float32)
    if POST == 1:
        if RES:
            passed = tl.load(y + here, wide, other=0.0).to(tl.float32) > 0
        else:
            scale = tl.load(moments + (client * 4 + 2) * K + columns, columns < K, other=0.0)
            shift = tl.load(moments + (client * 4 + 3) * K + columns, columns < K, other=0.0)
            passed = u * scale[None, :] + shift[None, :] > 0
        g = tl.where(passed, g, 0.0)
    return g


@Entry
def backward_sums(
    dy, x, y, moments, residual, residual_moments, parts, rows_total, chunk,
    K: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr, RES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute `parts [C, chunks, 3, K]`: sums over a chunk of rows of g, of g x̂ and of g times the residual's x̂."""
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    client = tl.program_id(2).to(tl.int64)
    inside = columns < K
    mean = tl.load(moments + client * 4 * K + columns, inside, other=0.0)[None, :]
    rstd = tl.load(moments + (client * 4 + 1) * K + columns, inside, other=0.0)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    times = tl.zeros((BM, BN), tl.float32)
    others = tl.zeros((BM, BN), tl.float32)
    first = tl.program_id(0) * chunk
    for m0 in range(first, tl.minimum(first + chunk, rows_total), BM):
        rows = m0 + tl.arange(0, BM)
        wide = (rows < tl.minimum(first + chunk, rows_total))[:, None] & inside[None, :]
        here = (client * rows_total + rows)[:, None] * K + columns[None, :]
        u = activate(tl.load(x + here, wide, other=0.0).to(tl.float32), PRE)
        g = incoming(dy, y, u, moments, here, wide, columns, client, K, POST, RES)
        total += g
        times += g * (u - mean) * rstd
        if RES == 2:
            r_mean = tl.load(residual_moments + client * 4 * K + columns, inside, other=0.0)[None, :]
            r_rstd = tl.load(residual_moments + (client * 4 + 1) * K + columns, inside, other=0.0)[None, :]
            others += g * (tl.load(residual + here, wide, other=0.0).to(tl.float32) - r_mean) * r_rstd
    at = parts + ((client * tl.num_programs(0) + tl.program_id(0)) * 3) * K + columns
    tl.store(at, tl.sum(total, 0), inside)
    tl.store(at + K, tl.sum(times, 0), inside)
    if RES == 2:
        tl.store(at + 2 * K, tl.sum(others, 0), inside)


@Entry
def backward_finalize(
    parts, sums, dgamma, dbeta, residual_dgamma, residual_dbeta, chunks, g_client,
    K: tl.constexpr, RES: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sum the parts in a fixed order: `sums [C, 3, K]`, which are the gradients of scale and shift."""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    client = tl.program_id(1).to(tl.int64)
    inside = columns < K
    for which in tl.static_range(3 if RES == 2 else 2):
        total = tl.zeros((BN,), tl.float32)
        for t0 in range(0, chunks, BT):
            part = t0 + tl.arange(0, BT)
            wide = (part < chunks)[:, None] & inside[None, :]
            at = parts + ((client * chunks + part[:, None]) * 3 + which) * K + columns[None, :]
            total += tl.sum(tl.load(at, wide, other=0.0), 0)
        tl.store(sums + (client * 3 + which) * K + columns, total, inside)
        here = client * g_client + columns
        if which == 0:
            tl.store(dbeta + here, total, inside)
            if RES == 2:
                tl.store(residual_dbeta + here, total, inside)
        elif which == 1:
            tl.store(dgamma + here, total, inside)
        else:
            tl.store(residual_dgamma + here, total, inside)


@Entry
def backward_apply(
    dy, x, y, moments, sums, residual, residual_moments, dx, dresidual, bias_parts, sizes, rows_total,
    K: tl.constexpr, PIXELS: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr, RES: tl.constexpr,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute dx and the residual's gradient; with BIAS also column sums of dx per tile, `bias_parts [C, tiles, K]`."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    client = tl.program_id(2).to(tl.int64)
    inside = columns < K
    wide = (rows < rows_total)[:, None] & inside[None, :]
    here = (client * rows_total + rows)[:, None] * K + columns[None, :]
    real = tl.load(sizes + client) * PIXELS
    share = 1.0 / tl.maximum(real, 1).to(tl.float32)
    raw = tl.load(x + here, wide, other=0.0).to(tl.float32)
    u = activate(raw, PRE)
    g = incoming(dy, y, u, moments, here, wide, columns, client, K, POST, RES)
    total = tl.load(sums + client * 3 * K + columns, inside, other=0.0)[None, :] * share
    at = moments + client * 4 * K + columns
    mean, rstd = tl.load(at, inside, other=0.0)[None, :], tl.load(at + K, inside, other=0.0)[None, :]
    times = tl.load(sums + (client * 3 + 1) * K + columns, inside, other=0.0)[None, :] * share
    d = tl.load(at + 2 * K, inside, other=0.0)[None, :] * (g - total - (u - mean) * rstd * times)
    if PRE:
        d *= slope(raw, PRE)
    counts = (rows < real)[:, None]  # padding has no gradient
    d = tl.where(counts, d, 0.0)
    tl.store(dx + here, d.to(dx.dtype.element_ty), wide)
    if BIAS:
        tile = client * tl.num_programs(0) + tl.program_id(0)
        tl.store(bias_parts + tile * K + columns, tl.sum(d, 0), inside)
    if RES == 1:
        tl.store(dresidual + here, g.to(dresidual.dtype.element_ty), wide)
    elif RES == 2:
        at = residual_moments + client * 4 * K + columns
        mean, rstd = tl.load(at, inside, other=0.0)[None, :], tl.load(at + K, inside, other=0.0)[None, :]
        times = tl.load(sums + (client * 3 + 2) * K + columns, inside, other=0.0)[None, :] * share
        hat = (tl.load(residual + here, wide, other=0.0).to(tl.float32) - mean) * rstd
        d = tl.where(counts, tl.load(at + 2 * K, inside, other=0.0)[None, :] * (g - total - hat * times), 0.0)
        tl.store(dresidual + here, d.to(dresidual.dtype.element_ty), wide)
