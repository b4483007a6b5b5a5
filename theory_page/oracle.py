"""FedAMS and FedCAMS in float64 NumPy, as the paper writes them, without any code of fedcams.

All arrays have a leading axis of seeds, and all seeds advance at once: models are `[S, d]`, the rows of a cohort
`[S, n, d]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Compress = Callable[[Array], Array]


# -- the server: Δ is the mean of what clients sent, t counts from 1, moments start at zero ----------------------------


@dataclass
class Memory:
    """What a server remembers between steps; a scalar zero stands for the zero vector."""

    t: int = 0
    m: Array | float = 0.0
    v: Array | float = 0.0
    vhat: Array | float = 0.0


def fedams(
    s: Memory,
    x: Array,
    delta: Array,
    lr: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-3,
    bias_correction: bool = False,
) -> Array:
    """Return the model after a server step with max stabilisation, Option 1 of the paper."""
    s.t += 1
    s.m = beta1 * s.m + (1 - beta1) * delta
    s.v = beta2 * s.v + (1 - beta2) * delta**2
    s.vhat = np.maximum(np.maximum(s.vhat, s.v), eps)
    c1, c2 = corrections(s.t, beta1, beta2, bias_correction)
    return x + lr * (s.m / c1) / (np.sqrt(s.vhat) / c2)


def corrections(t: int, beta1: float, beta2: float, bias_correction: bool) -> tuple[float, float]:
    """Return what m and √v are divided by."""
    return (1 - beta1**t, float(np.sqrt(1 - beta2**t))) if bias_correction else (1.0, 1.0)


# -- compressors of rows `[..., d]` ------------------------------------------------------------------------------------


def scaled_sign(h: Array) -> Array:
    """Return `‖h‖₁/d · sign(h)` of every row, zero counting as positive."""
    scale: Array = np.abs(h).mean(-1, keepdims=True)
    return scale * np.where(h >= 0, 1.0, -1.0)


def topk(h: Array, ratio: Fraction | float | str) -> Array:
    """Return the `k = max(1, floor(ratio·d))` largest of every row, ties to the lower index.

    A float counts as the decimal number that it prints as.
    """
    k = max(1, int(Fraction(str(ratio)) * h.shape[-1]))
    kept = np.argsort(-np.abs(h), axis=-1, kind="stable")[..., :k]
    out = np.zeros_like(h)
    np.put_along_axis(out, kept, np.take_along_axis(h, kept, -1), -1)
    return out


# -- problems ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A sum over coordinates, with its minimum at 0; every client has a linear term of its own.

    In each coordinate f is ½ a s², or the nonconvex a s²/(2(1 + s²)), both with the curvature a at the minimum. The
    linear terms add up to zero, so clients differ by the same σ_g everywhere.
    """

    curvature: Array
    """`[d]`, the largest is L."""
    tilt: Array
    """∇F_i - ∇f of every client, `[S, m, d]`."""
    start: Array
    """x_1, `[S, d]`."""
    nonconvex: bool = False

    def value(self, x: Array) -> Array:
        """Return f at the rows of x."""
        squares = x**2 / (1 + x**2) if self.nonconvex else x**2
        total: Array = 0.5 * (self.curvature * squares).sum(-1)
        return total

    def gradient(self, x: Array) -> Array:
        """Return ∇f at the rows of x."""
        return self.curvature * x / (1 + x**2) ** 2 if self.nonconvex else self.curvature * x


def problem(
    generators: Sequence[np.random.Generator],
    d: int,
    m: int,
    s_g: float = 0.0,
    gap: float = 1.0,
    condition: float = 10.0,
    nonconvex: bool = False,
) -> Problem:
    """Draw a problem for every seed: a random start with f(x_1) = gap, and clients that differ by s_g.

    The curvature falls from 1 to 1/condition, as a geometric sequence.
    """
    tilts = np.stack([each.standard_normal((m, d)) for each in generators])
    tilts -= tilts.mean(1, keepdims=True)
    spread = np.sqrt((tilts**2).sum(-1).mean(-1))[:, None, None]
    tilts = s_g * np.divide(tilts, spread, out=np.zeros_like(tilts), where=spread > 0)
    ways = np.stack([each.standard_normal(d) for each in generators])
    drawn = Problem(np.geomspace(1, 1 / condition, d), tilts, ways, nonconvex)
    low, high = np.zeros((len(ways), 1)), np.full((len(ways), 1), 1e3)
    for _ in range(80):  # f grows along every ray, so halving finds where it is the gap
        middle = (low + high) / 2
        below = drawn.value(middle * ways)[:, None] < gap
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return Problem(drawn.curvature, tilts, low * ways, nonconvex)


def random_cohorts(generators: Sequence[np.random.Generator], m: int, n: int) -> Iterator[NDArray[np.intp]]:
    """Yield n of m clients for every seed, `[S, n]`, uniformly without replacement, round after round."""
    everyone = np.tile(np.arange(m), (len(generators), 1))
    while True:
        yield everyone if n == m else np.stack([each.permutation(m)[:n] for each in generators])


def random_signs(generators: Sequence[np.random.Generator], shape: Sequence[int], s_l: float) -> Iterator[Array]:
    """Yield bounded noise `[S, *shape]`, round after round: random signs, scaled to rows of length s_l."""
    size, scale = int(np.prod(shape)), s_l / np.sqrt(shape[-1])
    while True:
        drawn = [np.frombuffer(each.bytes((size + 7) // 8), np.uint8) for each in generators]
        bits = np.unpackbits(np.stack(drawn), axis=-1, count=size)
        yield (2 * scale * bits - scale).reshape(len(generators), *shape)


# -- the algorithm -----------------------------------------------------------------------------------------------------


def fedcams(
    problem: Problem,
    cohorts: Iterable[NDArray[np.intp]],
    noise: Iterable[Array],
    eta_l: float,
    server_step: Callable[[Array, Array], Array],
    compress: Compress | None = None,
) -> Iterator[Array]:
    """Yield x_1, x_2, ..., each `[S, d]`; without a compressor this is FedAMS.

    Arguments:
        problem: gradients and where to start.
        cohorts: the clients of each round, `[S, n]`.
        noise: what is added to the gradients of each round, `[S, K, n, d]`, for K local steps.
        eta_l: the local rate.
        server_step: returns the next model for a model and the mean of what clients sent, both `[S, d]`.
        compress: compresses the rows that clients send, with error feedback; None sends them as they are.
    """
    x, error = problem.start, np.zeros_like(problem.tilt)
    own = np.arange(len(x))[:, None]
    for cohort, xi in zip(cohorts, noise, strict=False):
        yield x
        tilt = problem.tilt[own, cohort]
        w = np.repeat(x[:, None], cohort.shape[1], axis=1)
        for k in range(xi.shape[1]):
            w -= eta_l * (problem.gradient(w) + tilt + xi[:, k])
        sent = w - x[:, None]
        if compress is not None:
            h = sent + error[own, cohort]
            sent = compress(h)
            error[own, cohort] = h - sent
        x = server_step(x, sent.mean(1))
