"""Depthwise convolutions that read every pixel once per column of the kernel instead of once per tap.

A program takes one or more images and a block of channels, and goes down the rows. What a row of input adds to the R
rows of the output around it stays in registers, in tuples. This leaves room for only a few programs per processor, so
`forward` requests the next row before it works on the current one; `backward_weight` has no registers left for that.
Statistics are plain sums here, exact enough for bfloat16; `depthwise` handles other precisions and larger kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedcams.engines.graphs.kernels.convolution import activate
from fedcams.engines.graphs.kernels.entry import Entry


@triton.jit
def tap_weights(w, columns, inside, K: tl.constexpr, TAPS: tl.constexpr, FLIP: tl.constexpr):
    """Return all taps of a block of channels, a tuple of `[BN]`."""
    taps = ()
    for tap in tl.static_range(TAPS):
        at = (TAPS - 1 - tap if FLIP else tap) * K
        taps = taps + (tl.load(w + at + columns, inside, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def load_row(x, h, across, columns, inside, H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, S: tl.constexpr):
    """Return row h of an image, shifted for each of the S columns of the kernel: a tuple of `[BW, BN]`."""
    shifted = ()
    for s in tl.static_range(S):
        v = across + (s - S // 2)
        good = ((v >= 0) & (v < W) & (h >= 0) & (h < H))[:, None] & inside[None, :]
        shifted = shifted + (tl.load(x + ((h * W + v) * K)[:, None] + columns[None, :], good, other=0.0),)
    return shifted


@Entry
def forward(
    x, w, bias, y, stats, sizes, scale, shift, residual, images, w_client,
    H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BIAS: tl.constexpr, STATS: tl.constexpr, AFFINE: tl.constexpr, RES: tl.constexpr,
    PRE: tl.constexpr, POST: tl.constexpr, FLIP: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute like `depthwise.forward`; a program computes one image."""
    image = tl.program_id(0)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    client = tl.program_id(2).to(tl.int64)
    inside = columns < K
    across = tl.arange(0, BW)
    start = (client * images + image) * (H * W * K)
    taps = tap_weights(w + client * w_client, columns, inside, K, R * S, FLIP)
    offset = tl.zeros((BN,), tl.float32)
    if BIAS:
        offset += tl.load(bias + client * w_client + columns, inside, other=0.0).to(tl.float32)
    open_rows = ()  # the rows of the output that this row of the input adds to, from the one that it completes
    for _ in tl.static_range(R):
        open_rows = open_rows + (tl.zeros((BW, BN), tl.float32),)
    total, squares = tl.zeros((BW, BN), tl.float32), tl.zeros((BW, BN), tl.float32)
    coming = load_row(x + start, 0, across, columns, inside, H, W, K, S)
    for h in range(H + R // 2):
        present = coming
        coming = load_row(x + start, h + 1, across, columns, inside, H, W, K, S)
        for s in tl.static_range(S):
            a = present[s].to(tl.float32)
            grown = ()
            for i in tl.static_range(R):
                grown = grown + (open_rows[i] + a * taps[(R - 1 - i) * S + s][None, :],)
            open_rows = grown
        p = h - R // 2
        wide = ((across < W) & (p >= 0))[:, None] & inside[None, :]
        here = start + ((p * W + across) * K)[:, None] + columns[None, :]
        value = open_rows[0] + offset[None, :]
        if AFFINE:
            value = activate(value, PRE) * tl.load(scale + client * K + columns, inside, other=0.0)[None, :]
            value += tl.load(shift + client * K + columns, inside, other=0.0)[None, :]
        if RES:
            value += tl.load(residual + here, wide, other=0.0).to(tl.float32)
        if AFFINE:
            value = activate(value, POST)
        rounded = value.to(y.dtype.element_ty)
        tl.store(y + here, rounded, wide)
        if STATS:
            counted = tl.where(wide, activate(rounded.to(tl.float32), PRE), 0.0)
            total += counted
            squares += counted * counted
        open_rows = open_rows[1:] + (tl.zeros((BW, BN), tl.float32),)
    if STATS:
        real = tl.load(sizes + client) > image
        mean = tl.sum(total, 0) / (H * W)
        spread = tl.maximum(tl.sum(squares, 0) - mean * mean * (H * W), 0.0)
        at = stats + ((client * images + image) * 2) * K + columns
        tl.store(at, tl.where(real, mean, 0.0), inside)
        tl.store(at + K, tl.where(real, spread, 0.0), inside)


@Entry
def backward_weight(
    x, dy, out, images, group, out_client, out_split,
    H: tl.constexpr, W: tl.constexpr, K: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    BW: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the weights, from a group of images per program along the first axis of the grid."""
    split = tl.program_id(0)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    client = tl.program_id(2).to(tl.int64)
    inside = columns < K
    across = tl.arange(0, BW)
    sums = ()
    for _ in tl.static_range(R * S):
        sums = sums + (tl.zeros((BW, BN), tl.float32),)
    for image in range(split * group, tl.minimum(split * group + group, images)):
        start = (client * images + image) * (H * W * K)
        around = ()  # rows h - R//2 to h + R//2 of dy
        for i in tl.static_range(R):
            (row,) = load_row(dy + start, i - R // 2 - 1, across, columns, inside, H, W, K, 1)
            around = around + (row.to(tl.float32),)
        for h in range(H):
            (row,) = load_row(dy + start, h + R // 2, across, columns, inside, H, W, K, 1)
            around = around[1:] + (row.to(tl.float32),)
            present = load_row(x + start, h, across, columns, inside, H, W, K, S)
            for s in tl.static_range(S):
                a = present[s].to(tl.float32)
                grown = ()
                for tap in tl.static_range(R * S):
                    if tap % S == s:  # dy in row h - R//2 + i met x in row h by tap R - 1 - i
                        grown = grown + (sums[tap] + a * around[R - 1 - tap // S],)
                    else:
                        grown = grown + (sums[tap],)
                sums = grown
    here = out + client * out_client + split * out_split + columns
    for tap in tl.static_range(R * S):
        tl.store(here + tap * K, tl.sum(sums[tap], 0), inside)
