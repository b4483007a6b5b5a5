"""The step of gradient descent, and sums of parts in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from fedcams.engines.graphs.kernels.entry import Entry


@triton.jit
def descend_at(weights, copy, at, wide, gradient, rate, COPY: tl.constexpr):
    """Compute `weights -= rate gradient`, and store a copy in the precision of the kernels."""
    value = tl.load(weights + at, wide) - rate * gradient
    tl.store(weights + at, value, wide)
    if COPY:
        tl.store(copy + at, value.to(copy.dtype.element_ty), wide)


@Entry
def descend(weights, gradient, copy, sizes, rates, width, row, COPY: tl.constexpr, BLOCK: tl.constexpr):
    """Compute `weights [C, width] -= rates gradient` for clients that have examples; their rows are `row` apart."""
    client = tl.program_id(1).to(tl.int64)
    if tl.load(sizes + client) > 0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < width
        here = client * row + at
        descend_at(weights, copy, here, inside, tl.load(gradient + here, inside), tl.load(rates + client), COPY)


@Entry
def sum_parts(
    parts, out, copy, sizes, rates, count, length, part_client, part_step, out_client,
    DESCEND: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Compute `out [C, length]`, the sum over `count` parts, BT of them at a time and always in the same order.

    With DESCEND, the sum is a gradient, and `out` holds the weights, which take a step against it.
    """
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    parts += client * part_client
    total = tl.zeros((BLOCK,), tl.float32)
    for t0 in range(0, count, BT):
        part = t0 + tl.arange(0, BT)
        wide = (part < count)[:, None] & inside[None, :]
        total += tl.sum(tl.load(parts + part[:, None].to(tl.int64) * part_step + at[None, :], wide, other=0.0), 0)
    if DESCEND:
        inside &= tl.load(sizes + client) > 0
        descend_at(out, copy, client * out_client + at, inside, total, tl.load(rates + client), COPY)
    else:
        tl.store(out + client * out_client + at, total, inside)
