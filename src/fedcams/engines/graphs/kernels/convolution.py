"""Convolutions of all clients at once as implicit matrix products on the tensor cores.

Activations are `[C, B, h, w, k]`, weights `[C, k_out, r, s, k_in]`; every client has its own weights. A row of the
product is a pixel of the output; the reduction is over the taps of the kernel and the input channels. Sums are taken in
float32, in an order that does not depend on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedcams.engines.graphs.kernels.descent import descend_at
from fedcams.engines.graphs.kernels.entry import Entry


@triton.constexpr_function
def reciprocal(divisor):
    """Return the 32-bit number r for which n // divisor is n r >> 31 + bits(divisor - 1), for all n below 2**31."""
    return -(-(1 << 31 + (divisor - 1).bit_length()) // divisor)


@triton.constexpr_function
def exponent(divisor):
    """Return 31 + bits(divisor - 1)."""
    return 31 + (divisor - 1).bit_length()


@triton.jit
def divide(n, DIVISOR: tl.constexpr):
    """Return the quotient and remainder of unsigned numbers, by shifts or by a product, never by a division.

    The compiler knows how small the remainder of a division is, so it narrows what follows to 16 bits and packs two
    values into a register. With Triton 3.6 and ptxas 12.8, this made convolutions wrong.
    """
    if DIVISOR & (DIVISOR - 1) == 0:
        return n // DIVISOR, n % DIVISOR
    quotient = (n.to(tl.uint64) * reciprocal(DIVISOR) >> exponent(DIVISOR)).to(tl.uint32)
    return quotient, n - quotient * DIVISOR


@triton.jit
def pixel(rows, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return the image, row and column of pixels given by number."""
    image, rest = divide(rows.to(tl.uint32), HEIGHT * WIDTH)
    row, column = divide(rest, WIDTH)
    return image.to(tl.int32), row.to(tl.int32), column.to(tl.int32)


@triton.jit
def normal_tail(x, density):
    """Return 1 - Φ(|x|) to 1e-7, by Abramowitz and Stegun 7.1.26; `density` is exp(-x²/2). No branch, one division."""
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))
    poly = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    return poly * density


@triton.jit
def activate(x, ACT: tl.constexpr):
    """Apply an activation. ACT: 0 none, 1 ReLU, 2 GELU, 3 GELU to 1e-7, which is faster."""
    if ACT == 1:
        x = tl.maximum(x, 0.0)
    elif ACT == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == 3:
        tail = normal_tail(x, tl.exp(-0.5 * x * x))
        x = x * tl.where(x > 0, 1.0 - tail, tail)
    return x


@triton.jit
def slope(x, ACT: tl.constexpr):
    """Return the derivative of `activate`; not for ACT = 0."""
    if ACT == 1:
        d = tl.where(x > 0, 1.0, 0.0)
    else:
        bell = tl.exp(-0.5 * x * x)
        if ACT == 2:
            below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        else:
            tail = normal_tail(x, bell)
            below = tl.where(x > 0, 1.0 - tail, tail)
        d = below + x * bell * 0.3989422804014327
    return d


@triton.jit
def write_statistics(values, stats, rows, real, tile, tiles, client, columns, WIDTH: tl.constexpr, BM: tl.constexpr):
    """Write the mean and sum of squared deviations of a tile's real rows, per column: `stats [C, tiles, 2, WIDTH]`."""
    inside = (rows < real)[:, None]
    count = tl.minimum(tl.maximum(real - tile * BM, 0), BM)
    mean = tl.sum(tl.where(inside, values, 0.0), 0) / tl.maximum(count, 1)
    off = tl.where(inside, values - mean[None, :], 0.0)
    at = stats + ((client * tiles + tile) * 2) * WIDTH + columns
    tl.store(at, mean, columns < WIDTH)
    tl.store(at + WIDTH, tl.sum(off * off, 0), columns < WIDTH)


@Entry
def forward(
    x, w, bias, y, stats, sizes, scale, shift, residual, rows_total, tiles_m, x_client, w_client,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, CO: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr,
    BIAS: tl.constexpr, STATS: tl.constexpr, AFFINE: tl.constexpr, RES: tl.constexpr,
    PRE: tl.constexpr, POST: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute y = conv(x) (+ bias); with STATS also statistics of PRE(y).

    With AFFINE, y = POST(PRE(conv) scale + shift (+ residual)).
    """
    pid = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    TILES_N: tl.constexpr = (CO + BN - 1) // BN
    DEPTH: tl.constexpr = R * S * CI
    tile = pid // TILES_N
    rows = tile * BM + tl.arange(0, BM)
    image, p, q = pixel(rows, P, Q)
    top, left = p * STEP - PAD, q * STEP - PAD
    start = ((image * H + top) * W + left) * CI
    exists = rows < rows_total
    columns = pid % TILES_N * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    x += client * x_client
    w += client * w_client
    total = tl.zeros((BM, BN), tl.float32)
    if FLAT:  # few input channels: taps and channels are one axis
        for k0 in range(0, DEPTH, BK):
            k = k0 + ks
            r, s = k // (S * CI), k // CI % S
            h, v = top[:, None] + r[None, :], left[:, None] + s[None, :]
            good = exists[:, None] & (h >= 0) & (h < H) & (v >= 0) & (v < W) & (k < DEPTH)[None, :]
            a = tl.load(x + start[:, None] + ((r * W + s) * CI + k % CI)[None, :], good, other=0.0)
            wide = (k < DEPTH)[:, None] & (columns < CO)[None, :]
            b = tl.load(w + columns[None, :] * DEPTH + k[:, None], wide, other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    else:
        BLOCKS: tl.constexpr = CI // BK
        for step in range(R * S * BLOCKS):
            tap, c0 = step // BLOCKS, step % BLOCKS * BK
            r, s = tap // S, tap % S
            h, v = top + r, left + s
            good = exists & (h >= 0) & (h < H) & (v >= 0) & (v < W)
            a = tl.load(x + (start + (r * W + s) * CI + c0)[:, None] + ks[None, :], good[:, None], other=0.0)
            at = w + columns[None, :] * DEPTH + (tap * CI + c0 + ks)[:, None]
            b = tl.load(at) if CO % BN == 0 else tl.load(at, (columns < CO)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + client * w_client + columns, columns < CO, other=0.0).to(tl.float32)[None, :]
    here = (client * rows_total + rows)[:, None] * CO + columns[None, :]
    wide = exists[:, None] & (columns < CO)[None, :]
    if AFFINE:
        total = activate(total, PRE) * tl.load(scale + client * CO + columns, columns < CO)[None, :]
        total += tl.load(shift + client * CO + columns, columns < CO)[None, :]
    if RES:
        total += tl.load(residual + here, wide, other=0.0).to(tl.float32)
    if AFFINE:
        total = activate(total, POST)
    rounded = total.to(y.dtype.element_ty)
    tl.store(y + here, rounded, wide)
    if STATS:
        values = activate(rounded.to(tl.float32), PRE)
        real = tl.load(sizes + client) * (P * Q)
        write_statistics(values, stats, rows, real, tile, tiles_m, client, columns, CO, BM)


@Entry
def backward_input(
    dy, w, dx, added, images, dy_client, w_client, dx_client,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, CO: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr,
    ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient dx of `forward`; with ADD, add what other uses of x contribute.

    With a stride, pixels of one phase (h and w mod STEP) see the same taps and are computed together.
    """
    pid = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    phase_h, phase_w = tl.program_id(2) // STEP, tl.program_id(2) % STEP
    TILES_N: tl.constexpr = (CI + BN - 1) // BN
    HEIGHT: tl.constexpr = (H + STEP - 1) // STEP
    WIDTH: tl.constexpr = (W + STEP - 1) // STEP
    DEPTH: tl.constexpr = R * S * CI
    BLOCKS: tl.constexpr = (CO + BK - 1) // BK
    rows = pid // TILES_N * BM + tl.arange(0, BM)
    image, i, j = pixel(rows, HEIGHT, WIDTH)
    h, v = i * STEP + phase_h, j * STEP + phase_w
    exists = (image < images) & (h < H) & (v < W)
    r0, s0 = (phase_h + PAD) % STEP, (phase_w + PAD) % STEP
    taps_h, taps_w = (R - r0 + STEP - 1) // STEP, (S - s0 + STEP - 1) // STEP
    p0, q0 = i + (phase_h + PAD - r0) // STEP, j + (phase_w + PAD - s0) // STEP
    start = ((image * P + p0) * Q + q0) * CO
    columns = pid % TILES_N * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    dy += client * dy_client
    w += client * w_client
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(taps_h * taps_w * BLOCKS):
        tap, k0 = step // BLOCKS, step % BLOCKS * BK
        # A phase may have no taps at all; a division by zero breaks the compiled code, even if its result is not used.
        a, b = tap // tl.maximum(taps_w, 1), tap % tl.maximum(taps_w, 1)
        p, q = p0 - a, q0 - b
        good = exists & (p >= 0) & (p < P) & (q >= 0) & (q < Q)
        tap_at = ((r0 + a * STEP) * S + s0 + b * STEP) * CI
        at = dy + (start - (a * Q + b) * CO + k0)[:, None] + ks[None, :]
        at_w = w + (k0 + ks)[:, None] * DEPTH + tap_at + columns[None, :]
        if CO % BK == 0:
            g = tl.load(at, good[:, None], other=0.0)
            kernel = tl.load(at_w) if CI % BN == 0 else tl.load(at_w, (columns < CI)[None, :], other=0.0)
        else:
            g = tl.load(at, good[:, None] & (k0 + ks < CO)[None, :], other=0.0)
            kernel = tl.load(at_w, (k0 + ks < CO)[:, None] & (columns < CI)[None, :], other=0.0)
        total = tl.dot(g, kernel, total, input_precision=PRECISION)
    here = client * dx_client + ((image * H + h) * W + v)[:, None] * CI + columns[None, :]
    wide = exists[:, None] & (columns < CI)[None, :]
    if ADD:
        total += tl.load(added + here, wide, other=0.0).to(tl.float32)
    tl.store(dx + here, total.to(dx.dtype.element_ty), wide)


@Entry
def backward_weight(
    x, dy, out, copy, sizes, rates, rows_total, chunk, x_client, dy_client, out_client, out_split,
    H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, CO: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr,
    DESCEND: tl.constexpr, COPY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the weights, from `chunk` rows per program along the third axis of the grid.

    With DESCEND, it is not written: `out` holds the weights themselves, which take a step against it.
    """
    pid = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    DEPTH: tl.constexpr = R * S * CI
    TILES_N: tl.constexpr = (DEPTH + BN - 1) // BN
    outputs = pid // TILES_N * BM + tl.arange(0, BM)
    columns = pid % TILES_N * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    x += client * x_client
    dy += client * dy_client
    end = tl.minimum(split * chunk + chunk, rows_total)
    total = tl.zeros((BM, BN), tl.float32)
    for m0 in range(split * chunk, end, BK):
        rows = m0 + ks
        image, p, q = pixel(rows, P, Q)
        top, left = p * STEP - PAD, q * STEP - PAD
        at = dy + rows[:, None] * CO + outputs[None, :]
        g = tl.load(at, (rows < end)[:, None] & (outputs < CO)[None, :], other=0.0)
        if CI % BN == 0:  # one tap per tile
            tap = pid % TILES_N * BN // CI
            h, v = top + tap // S, left + tap % S
            good = (rows < end) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
            c0 = pid % TILES_N % (CI // BN) * BN
            at_x = x + (((image * H + h) * W + v) * CI + c0)[:, None] + tl.arange(0, BN)[None, :]
            a = tl.load(at_x, good[:, None], other=0.0)
        else:
            h, v = top[:, None] + (columns // (S * CI))[None, :], left[:, None] + (columns // CI % S)[None, :]
            good = (rows < end)[:, None] & (h >= 0) & (h < H) & (v >= 0) & (v < W) & (columns < DEPTH)[None, :]
            a = tl.load(x + ((image[:, None] * H + h) * W + v) * CI + (columns % CI)[None, :], good, other=0.0)
        total = tl.dot(tl.trans(g), a, total, input_precision=PRECISION)
    out += client * out_client + split * out_split
    if DESCEND:
        copy += client * out_client
        active = (outputs < CO) & (tl.load(sizes + client) > 0)
        rate = tl.load(rates + client)
        HALF: tl.constexpr = BN // 2  # weights and a whole tile of sums would not fit into the registers together
        halves = tl.split(tl.permute(tl.reshape(total, (BM, 2, HALF)), (0, 2, 1)))
        for half in tl.static_range(2):
            column = pid % TILES_N * BN + half * HALF + tl.arange(0, HALF)
            here = outputs[:, None] * DEPTH + column[None, :]
            descend_at(out, copy, here, active[:, None] & (column < DEPTH)[None, :], halves[half], rate, COPY)
    else:
        here = outputs[:, None] * DEPTH + columns[None, :]
        tl.store(out + here, total, (outputs < CO)[:, None] & (columns < DEPTH)[None, :])
