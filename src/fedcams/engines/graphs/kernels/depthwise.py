"""Depthwise convolutions of all clients at once: every channel has its own small kernel; stride 1, same size.

Weights are `[C, r, s, 1, k]`, so that all loads go along the channels.
"""

from __future__ import annotations

import triton.language as tl

from fedcams.engines.graphs.kernels.convolution import activate, pixel, write_statistics
from fedcams.engines.graphs.kernels.entry import Entry


@Entry
def forward(
    x, w, bias, y, stats, sizes, scale, shift, residual, rows_total, tiles_m, w_client,
    H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BIAS: tl.constexpr, STATS: tl.constexpr, AFFINE: tl.constexpr, RES: tl.constexpr,
    PRE: tl.constexpr, POST: tl.constexpr, FLIP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute like the dense `forward`; with FLIP, the kernel is rotated by 180°, which gives the input's gradient.

    RES without AFFINE adds the part of the gradient from other uses of the input.
    """
    tile = tl.program_id(0)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    client = tl.program_id(2).to(tl.int64)
    rows = tile * BM + tl.arange(0, BM)
    _, p, q = pixel(rows, H, W)
    top, left = p - R // 2, q - S // 2
    exists = rows < rows_total
    start = (rows - (R // 2 * W + S // 2)) * K
    x += client * rows_total * K
    w += client * w_client
    inside = columns < K
    total = tl.zeros((BM, BN), tl.float32)
    for r in tl.static_range(R):
        for s in tl.static_range(S):
            tap = (R - 1 - r) * S + S - 1 - s if FLIP else r * S + s
            h, v = top + r, left + s
            good = exists & (h >= 0) & (h < H) & (v >= 0) & (v < W)
            at = x + (start + (r * W + s) * K)[:, None] + columns[None, :]
            a = tl.load(at, good[:, None] & inside[None, :], other=0.0).to(tl.float32)
            total += a * tl.load(w + tap * K + columns, inside, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        total += tl.load(bias + client * w_client + columns, inside, other=0.0).to(tl.float32)[None, :]
    here = (client * rows_total + rows)[:, None] * K + columns[None, :]
    wide = exists[:, None] & inside[None, :]
    if AFFINE:
        total = activate(total, PRE) * tl.load(scale + client * K + columns, inside, other=0.0)[None, :]
        total += tl.load(shift + client * K + columns, inside, other=0.0)[None, :]
    if RES:
        total += tl.load(residual + here, wide, other=0.0).to(tl.float32)
    if AFFINE:
        total = activate(total, POST)
    rounded = total.to(y.dtype.element_ty)
    tl.store(y + here, rounded, wide)
    if STATS:
        values = activate(rounded.to(tl.float32), PRE)
        real = tl.load(sizes + client) * (H * W)
        write_statistics(values, stats, rows, real, tile, tiles_m, client, columns, K, BM)


@Entry
def backward_weight(
    x, dy, out, rows_total, chunk, out_client, out_split,
    H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, R: tl.constexpr, S: tl.constexpr, TAPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the weights, from `chunk` rows per program along the first axis of the grid."""
    split = tl.program_id(0)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    client = tl.program_id(2).to(tl.int64)
    x += client * rows_total * K
    dy += client * rows_total * K
    inside = columns < K
    taps = tl.arange(0, TAPS)[:, None]  # at least R S, a power of two
    total = tl.zeros((TAPS, BN), tl.float32)
    end = tl.minimum(split * chunk + chunk, rows_total)
    for m0 in range(split * chunk, end, BM):
        rows = m0 + tl.arange(0, BM)
        _, p, q = pixel(rows, H, W)
        top, left = p - R // 2, q - S // 2
        start = (rows - (R // 2 * W + S // 2)) * K
        exists = rows < end
        g = tl.load(dy + rows[:, None] * K + columns[None, :], exists[:, None] & inside[None, :], other=0.0)
        g = g.to(tl.float32)
        for r in tl.static_range(R):
            for s in tl.static_range(S):
                h, v = top + r, left + s
                good = exists & (h >= 0) & (h < H) & (v >= 0) & (v < W)
                at = x + (start + (r * W + s) * K)[:, None] + columns[None, :]
                a = tl.load(at, good[:, None] & inside[None, :], other=0.0).to(tl.float32)
                total += tl.where(taps == r * S + s, tl.sum(a * g, 0)[None, :], 0.0)
    here = client * out_client + split * out_split + taps * K + columns[None, :]
    tl.store(out + here, total, (taps < R * S) & inside[None, :])
