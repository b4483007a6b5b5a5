"""The algorithms in float64 NumPy, as the paper writes them: slow, plain, and without a line of fedcams.

    grad = quadratic(clients=20, d=50)
    cohorts = [[0, 3, 7], [1, 3, 9], ...]
    xs = run(np.zeros(50), grad, cohorts, local_steps=5, local_lr=0.1, server_step=fedams, compress=scaled_sign)

A server step is `step(memory, x, delta, **hyperparameters) -> x`; `functools.partial` fixes its hyperparameters.
FedAMS, the scaled sign and top-k are those with which `theory_page.oracle` measures rates.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# The formulas read better without types.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from theory_page.oracle import Memory as Memory
from theory_page.oracle import corrections
from theory_page.oracle import fedams as fedams
from theory_page.oracle import scaled_sign as scaled_sign
from theory_page.oracle import topk as topk

Vector = NDArray[np.float64]


# -- server optimizers: Δ is the mean of the clients' updates, t counts from 1, moments start at zero -----------------


def fedavg(s, x, delta, lr=1.0):
    s.t += 1
    return x + lr * delta


def fedavgm(s, x, delta, lr=1.0, momentum=0.9):
    s.t += 1
    s.m = momentum * s.m + delta
    return x + lr * s.m


def fedadagrad(s, x, delta, lr=0.1, beta1=0.0, eps=0.1):
    s.t += 1
    s.m = beta1 * s.m + (1 - beta1) * delta
    s.v = s.v + delta**2
    return x + lr * s.m / (np.sqrt(s.v) + eps)


def fedadam(s, x, delta, lr=0.1, beta1=0.9, beta2=0.99, eps=0.1, bias_correction=False):
    s.t += 1
    s.m = beta1 * s.m + (1 - beta1) * delta
    s.v = beta2 * s.v + (1 - beta2) * delta**2
    c1, c2 = corrections(s.t, beta1, beta2, bias_correction)
    return x + lr * (s.m / c1) / (np.sqrt(s.v) / c2 + eps)


def fedyogi(s, x, delta, lr=1.0, beta1=0.9, beta2=0.99, eps=0.1, bias_correction=False):
    s.t += 1
    s.m = beta1 * s.m + (1 - beta1) * delta
    s.v = s.v - (1 - beta2) * np.sign(s.v - delta**2) * delta**2
    c1, c2 = corrections(s.t, beta1, beta2, bias_correction)
    return x + lr * c2 / c1 * s.m / (np.sqrt(s.v) + eps)


def fedamsgrad(s, x, delta, lr=0.1, beta1=0.9, beta2=0.99, eps=0.1, bias_correction=False):
    s.t += 1
    s.m = beta1 * s.m + (1 - beta1) * delta
    s.v = beta2 * s.v + (1 - beta2) * delta**2
    s.vhat = np.maximum(s.vhat, s.v)
    c1, c2 = corrections(s.t, beta1, beta2, bias_correction)
    return x + lr * (s.m / c1) / (np.sqrt(s.vhat) / c2 + eps)


# -- local rules: a step from w along the gradient g; moments start at zero in every round ----------------------------


def adamw(
    s: Memory,
    w: Vector,
    g: Vector,
    lr: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Vector:
    s.t += 1
    s.m = beta1 * s.m + (1 - beta1) * g
    s.v = beta2 * s.v + (1 - beta2) * g**2
    return w - lr * weight_decay * w - lr * (s.m / (1 - beta1**s.t)) / (np.sqrt(s.v / (1 - beta2**s.t)) + eps)


# -- compressors -------------------------------------------------------------------------------------------------------


def classes(h: Vector, ratio: Fraction | float | str, depth: int) -> Vector:
    """Of top-k the signs times the mean magnitude of a class: what is kept is split at its mean, `depth` times over."""
    kept = np.flatnonzero(topk(np.where(h == 0, 1e-300, h), ratio))
    parts = [kept]
    for _ in range(depth):
        above = [np.abs(h[part]) >= np.abs(h[part]).mean() if len(part) else part > 0 for part in parts]
        parts = [half for part, up in zip(parts, above, strict=True) for half in (part[~up], part[up])]
    out = np.zeros_like(h)
    for part in parts:
        out[part] = np.where(h[part] >= 0, 1, -1) * (np.abs(h[part]).mean() if len(part) else 0)
    return out


def ternary(h: Vector, ratio: Fraction | float | str, sizes: Sequence[int] = (), scope="global", magnitudes="tensor"):
    """Of top-k the signs times the mean magnitude kept, of each tensor or of all; `sizes` are those of the tensors."""
    tensors = np.split(np.arange(len(h)), np.cumsum(sizes)[:-1]) if len(sizes) else [np.arange(len(h))]
    everything = [np.arange(len(h))]
    kept = np.zeros_like(h)
    for part in everything if scope == "global" else tensors:
        kept[part] = topk(np.where(h[part] == 0, 1e-300, h[part]), ratio)  # a zero that is kept counts as positive
    out = np.zeros_like(h)
    for part in everything if magnitudes == "global" else tensors:
        chosen = part[kept[part] != 0]
        out[chosen] = np.sign(kept[chosen]) * np.abs(h[chosen]).sum() / max(1, len(chosen))
    return out


# -- FedCAMS -----------------------------------------------------------------------------------------------------------

Compress = Callable[[Vector], Vector]
Gradient = Callable[[int, Vector], Vector]
ServerStep = Callable[[Memory, Vector, Vector], Vector]


def fedcams(
    x0: Vector,
    update: Callable[[int, int, Vector], Vector],
    cohorts: Iterable[Sequence[int]],
    server_step: ServerStep = fedams,
    compress: Compress | None = None,
    combine: Callable[[NDArray[np.float64]], Vector] = lambda rows: np.mean(rows, axis=0),
    seen: list[tuple[NDArray[np.float64], Vector]] | None = None,
) -> list[Vector]:
    """The model after each round; without a compressor it is FedAMS.

    `update(t, i, x)` is client i's local update in round t = 1, 2, ... from the model x. `cohorts` lists, round by
    round, the clients whose updates the server accepts; the others' errors e_i stay as they are. `seen` collects what
    the server received in each round and what it combined that to.
    """
    x, memory = np.array(x0, dtype=np.float64), Memory()
    errors: dict[int, Vector] = {}
    xs = []
    for t, cohort in enumerate(cohorts, start=1):
        received = []
        for i in sorted(cohort):
            h = update(t, i, x) + errors.get(i, 0.0)
            sent = h if compress is None else compress(h)
            errors[i] = h - sent
            received.append(sent)
        mean = combine(np.array(received))
        x = server_step(memory, x, mean)
        xs.append(x)
        if seen is not None:
            seen.append((np.array(received), mean))
    return xs


def descent(grad: Gradient, steps: int, lr: float) -> Callable[[int, int, Vector], Vector]:
    """Local gradient descent, as `fedcams` takes it: `grad(i, x)` is the gradient of client i's loss."""

    def update(t: int, i: int, x: Vector) -> Vector:
        w = x
        for _ in range(steps):
            w = w - lr * grad(i, w)
        return w - x

    return update


def local_adamw(grad: Gradient, steps: int, **hyperparameters: float) -> Callable[[int, int, Vector], Vector]:
    """Local AdamW, as `fedcams` takes it; its moments start again in every round."""
    step: Callable[..., Vector] = adamw

    def update(t: int, i: int, x: Vector) -> Vector:
        w, memory = x, Memory()
        for _ in range(steps):
            w = step(memory, w, grad(i, w), **hyperparameters)
        return w - x

    return update


def run(
    x0: Vector,
    grad: Gradient,
    cohorts: Iterable[Sequence[int]],
    local_steps: int,
    local_lr: float,
    server_step: ServerStep = fedams,
    compress: Compress | None = None,
) -> list[Vector]:
    """FedCAMS with local gradient descent: `grad(i, x)` is the gradient of client i's loss."""
    return fedcams(x0, descent(grad, local_steps, local_lr), cohorts, server_step, compress)


# -- transforms --------------------------------------------------------------------------------------------------------


def clip(delta: Vector, norm: float) -> Vector:
    """The update, or the vector of length `norm` in its direction where it is longer."""
    length = float(np.sqrt(np.sum(delta**2)))
    return delta if length <= norm else delta * (norm / length)


def noisy(
    update: Callable[[int, int, Vector], Vector], norm: float, deviation: float, noise: Callable[[int, int], Vector]
) -> Callable[[int, int, Vector], Vector]:
    """Updates, as `fedcams` takes them, clipped and with noise before anything else; `noise(t, i)` is standard."""

    def noised(t: int, i: int, x: Vector) -> Vector:
        return clip(update(t, i, x), norm) + deviation * norm * noise(t, i)

    return noised


def fednova(
    x0: Vector,
    grad: Gradient,
    cohorts: Iterable[Sequence[int]],
    local_steps: Sequence[int],
    local_lr: float,
    weights: Sequence[float] | None = None,
) -> list[Vector]:
    """FedNova with local gradient descent: client i takes `local_steps[i]` steps and counts `weights[i]`.

    `x -= τ_eff Σ p_i lr d_i`, where d_i is the mean of client i's gradients and `τ_eff = Σ p_i τ_i`.
    """
    x, xs = np.array(x0, dtype=np.float64), []
    for cohort in cohorts:
        p = np.array([1.0 if weights is None else weights[i] for i in cohort])
        p = p / p.sum()
        tau = np.array([local_steps[i] for i in cohort])
        d = []
        for i in cohort:
            w, gradients = x, []
            for _ in range(local_steps[i]):
                gradients.append(grad(i, w))
                w = w - local_lr * gradients[-1]
            d.append(np.mean(gradients, axis=0))
        x = x - (p @ tau) * local_lr * (p @ np.array(d))
        xs.append(x)
    return xs


# -- SCAFFOLD ----------------------------------------------------------------------------------------------------------


def scaffold(
    x0: Vector,
    grad: Gradient,
    cohorts: Iterable[Sequence[int]],
    clients: int,
    local_steps: int,
    local_lr: float | Sequence[float],
    server_lr: float = 1.0,
) -> tuple[list[Vector], Vector, NDArray[np.float64]]:
    """Algorithm 1 with Option II: the model after each round, and at the end c and every c_i.

    `local_lr` is one rate, or one for each round.
    """
    x = np.array(x0, dtype=np.float64)
    c, c_i = np.zeros_like(x), np.zeros((clients, len(x)))
    xs = []
    for t, cohort in enumerate(cohorts):
        lr = local_lr[t] if isinstance(local_lr, Sequence) else local_lr
        dy, dc = np.zeros_like(x), np.zeros_like(x)
        for i in cohort:
            y = x
            for _ in range(local_steps):
                y = y - lr * (grad(i, y) - c_i[i] + c)
            c_plus = c_i[i] - c + (x - y) / (local_steps * lr)
            dy, dc = dy + (y - x) / len(cohort), dc + (c_plus - c_i[i]) / len(cohort)
            c_i[i] = c_plus
        x, c = x + server_lr * dy, c + len(cohort) / clients * dc
        xs.append(x)
    return xs, c, c_i


# -- what is combined, averaged and measured ---------------------------------------------------------------------------


def trimmed_mean(rows: NDArray[np.float64], fraction: Fraction | float | str) -> Vector:
    """In every coordinate, the mean without the floor(fraction·C) smallest and largest values."""
    trim = int(Fraction(str(fraction)) * len(rows))
    return np.array([np.sort(column)[trim : len(rows) - trim].mean() for column in rows.T])


def krum(rows: NDArray[np.float64], weights: Sequence[float], fraction: Fraction | float | str) -> Vector:
    """The weighted mean without the floor(fraction·C) rows that lie farthest from their C - f - 2 nearest others."""
    count = len(rows)
    out = int(Fraction(str(fraction)) * count)

    def score(i: int) -> float:
        others = sorted(float(((rows[i] - rows[j]) ** 2).sum()) for j in range(count) if j != i)
        return sum(others[: max(1, count - out - 2)])

    kept = sorted(range(count), key=score)[: count - out]
    return np.average(rows[kept], axis=0, weights=np.array(weights)[kept])


def ema(xs: Iterable[Vector], decay: float) -> list[Vector]:
    """The average after each step: `a += w (x - a)`, `w = max(1 - decay, 1/t)`."""
    a, averages = np.zeros(1), []
    for t, x in enumerate(xs, start=1):
        a = a + max(1 - decay, 1 / t) * (x - a)
        averages.append(a)
    return averages


def cosines(rows: NDArray[np.float64], mean: Vector) -> Vector:
    """The cosine of each row with the mean."""
    return np.array([row @ mean / np.sqrt((row @ row) * (mean @ mean)) for row in rows])


def quadratic(clients: int, d: int, seed: int = 0) -> Callable[[int, Vector], Vector]:
    """Gradients of `f_i(x) = ½ (x - b_i)ᵀ diag(a_i) (x - b_i)`: every client pulls to a place of its own."""
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(0.5, 1.5, (clients, d)), 1 + rng.standard_normal((clients, d))
    return lambda i, x: a[i] * (x - b[i])
