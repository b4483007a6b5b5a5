"""The step of gradient descent, and sums of parts in a fixed order."""

from __future__ import annotations

import triton.language as tl

from fedcams.engines.graphs.kernels.entry import Entry


@Entry
def descend(weights, gradient, copy, sizes, lr, width, COPY: tl.constexpr, BLOCK: tl.constexpr):
    """`weights [C, width] -= lr gradient` for clients that have examples; a copy in the precision of the kernels."""
    client = tl.program_id(1).to(tl.int64)
    if tl.load(sizes + client) > 0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        here = client * width + at
        value = tl.load(weights + here, inside) - lr * tl.load(gradient + here, inside)
        tl.store(weights + here, value, inside)
        if COPY:
            tl.store(copy + here, value.to(copy.dtype.element_ty), inside)


@Entry
def sum_parts(parts, out, count, length, part_client, part_step, out_client, BLOCK: tl.constexpr, BT: tl.constexpr):
    """`out [C, length]` = the sum over `count` parts, BT of them at a time, always in the same order."""
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    parts += client * part_client
    total = tl.zeros((BLOCK,), tl.float32)
    for t0 in range(0, count, BT):
        part = t0 + tl.arange(0, BT)
        wide = (part < count)[:, None] & inside[None, :]
        total += tl.sum(tl.load(parts + part[:, None].to(tl.int64) * part_step + at[None, :], wide, other=0.0), 0)
    tl.store(out + client * out_client + at, total, inside)
