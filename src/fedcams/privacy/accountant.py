"""What rounds of noise cost: the Rényi accountant of the sampled Gaussian mechanism.

In each round every client takes part with probability p, the sum of rows of norm 1 gets Gaussian noise of standard
deviation z, and neighbours differ in one client, which is there or not. The Rényi divergences of the rounds add up
(Mironov 2017), even if a client's row depends on when it took part before, as it does with error feedback:
docs/privacy.md has the proof. Nothing here depends on data.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from fedcams.errors import SpecError

ORDERS = (*(1 + i / 10 for i in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)
"""The orders of divergence among which the best is taken; those of Google's accountant. Any set gives a valid ε."""
WIDTH, PER_WIDTH = 14, 16
"""How many standard deviations the integral reaches beyond its peaks, and its steps per width of its features."""
LEAST_NOISE, MOST_NOISE = 0.1, 1e6
"""What is accepted as noise, in units of the clipping bound; less would protect nothing."""
CLOSE = 1e-3
"""How close `noise_for` comes to the least noise that suffices; it errs on the side of more."""


def divergence(order: float, p: float, noise: float) -> float:
    """Return the Rényi divergence of this order, above 1, that one round costs.

    With r(s) = (1-p) + p·exp((2s-1)/(2z²)) it is log E[r(s)^order]/(order-1) over s ~ N(0, z²) (Mironov, Talwar, Zhang
    2019), the larger one of the two directions. For analytic integrands like this one, sums over a grid converge
    exponentially; every order is computed in the same way, in logarithms.
    """
    if p >= 1:
        return order / (2 * noise**2)
    step = min(noise, noise**2) / PER_WIDTH
    s = np.arange(-WIDTH * noise, order + WIDTH * noise, step)
    ratio = np.logaddexp(math.log1p(-p), math.log(p) + (2 * s - 1) / (2 * noise**2))
    terms = order * ratio - s**2 / (2 * noise**2)
    total = float(np.logaddexp.reduce(terms)) + math.log(step / (noise * math.sqrt(2 * math.pi)))
    return max(total, 0.0) / (order - 1)


def epsilon(p: float, noise: float, rounds: float, delta: float, orders: tuple[float, ...] = ORDERS) -> float:
    """Return the ε at this δ of this many rounds, in which each client takes part with probability p.

    `noise` is the standard deviation in units of the largest norm of a row, at least 0.1. ε is 0 for no rounds. Rounds
    in which several such noises are added count as fractions: 1/n for n of them, if p is 1.
    """
    if rounds == 0:
        return 0.0
    a, spent = np.array(orders), rounds * _divergences(p, noise, orders)
    # Canonne, Kamath, Steinke 2020, Proposition 12; Balle et al. 2020
    found = spent + np.log1p(-1 / a) - np.log(delta * a) / (a - 1)
    return max(0.0, float(found.min()))


@functools.lru_cache(maxsize=64)  # a run needs the same ones after every round
def _divergences(p: float, noise: float, orders: tuple[float, ...]) -> NDArray[np.float64]:
    return np.array([divergence(order, p, noise) for order in orders])


@functools.lru_cache(maxsize=64)
def noise_for(target: float, p: float, rounds: int, delta: float) -> float:
    """Return the least noise, to 1 in 1,000 and never too little, whose ε is at most `target` after these rounds.

    Refuses a target that no reasonable noise meets.
    """

    def suffices(noise: float) -> bool:
        return epsilon(p, noise, rounds, delta) <= target

    high = 1.0
    while not suffices(high):
        high *= 2
        if high > MOST_NOISE:
            raise SpecError(
                f"epsilon={target:g}: no noise reaches it in {rounds} rounds; raise epsilon, or lower rounds"
            )
    low = high / 2
    while low > LEAST_NOISE and suffices(low):
        low, high = low / 2, low
    while high / low > 1 + CLOSE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return max(high, LEAST_NOISE)
