"""The accountant: equal to closed forms, to integrals of many digits, to other accountants and to published numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from fedcams import SpecError
from fedcams.privacy.accountant import ORDERS, divergence, epsilon, noise_for
from together import together

Array = NDArray[np.float64]
INTEGERS = (*range(2, 64), 128, 256, 512, 1024)
GOLDEN = {
    (1.1, 0.01, 1000, 1e-05): (1.72529082, 1.51537025),
    (1.1, 256 / 60_000, 14062, 1e-05): (2.59698118, 2.38168600),
    (1.0, 0.1, 100, 1e-05): (7.97292151, 7.04660288),
    (0.6, 0.2, 50, 1e-05): (33.73075529, 26.57727365),
    (2.0, 0.3, 200, 1e-06): (14.00399503, 13.09085311),
    (4.0, 1.0, 100, 1e-05): (14.17669148, 13.20671247),
    (8.0, 0.5, 1000, 1e-06): (11.77586028, 10.91161866),
    (0.8, 1 / 50, 500, 0.0001): (4.62949055, 3.86206501),
    (1.3, 0.001, 10000, 1e-07): (0.66459507, 0.41032072),
}
"""(noise, p, rounds, delta) -> ε by dp-accounting 0.6.0, Google's: RdpAccountant with the orders `INTEGERS`, where its
divergences are closed forms, and PLDAccountant, which composes whole privacy loss distributions and is tighter."""
INTEGRALS = {
    (1.6, 0.2, 0.6): 0.253423932141036,
    (1.7, 0.2, 0.6): 0.295473021192994,
    (3.6, 0.5, 8.0): 0.00711717985869318,
    (3.2, 0.1, 1.0): 0.035695054268047,
    (3.7, 0.02, 0.8): 0.00385003355591696,
    (1.1, 0.3, 0.3): 1.62472361690189,
    (9.6, 0.01, 1.1): 0.000746054432188729,
}
"""(order, p, noise) -> the divergence, by mpmath's quadrature with 30 digits."""


def closed_form(order: int, p: float, noise: float) -> float:
    """Mironov, Talwar, Zhang 2019, section 3.3: log Σ_k C(α,k) (1-p)^(α-k) p^k exp(k(k-1)/(2z²)) / (α-1)."""
    logs = [
        math.log(math.comb(order, k)) + (order - k) * math.log1p(-p) + k * math.log(p) + k * (k - 1) / (2 * noise**2)
        for k in range(order + 1)
    ]
    return (max(logs) + math.log(sum(math.exp(each - max(logs)) for each in logs))) / (order - 1)


@together("noise", [0.1, 0.3, 0.8, 1.0, 3.0, 20.0, 100.0])
@together("p", [1e-4, 0.01, 0.1, 0.5, 0.99])
def test_integer_orders_have_their_closed_form(noise: float, p: float) -> None:
    for order in (2, 3, 8, 32, 256):
        assert divergence(order, p, noise) == pytest.approx(closed_form(order, p, noise), rel=1e-6, abs=1e-11)


@together(("what", "expected"), INTEGRALS.items())
def test_other_orders_are_their_integrals(what: tuple[float, float, float], expected: float) -> None:
    assert divergence(*what) == pytest.approx(expected, rel=1e-9)


@together(("run", "theirs"), GOLDEN.items())
def test_epsilon_is_that_of_another_accountant(
    run: tuple[float, float, int, float], theirs: tuple[float, float]
) -> None:
    """To six digits with its orders; ours are more, so ε is at most that, and at least the tighter one."""
    noise, p, rounds, delta = run
    by_divergence, by_distribution = theirs
    assert epsilon(p, noise, rounds, delta, INTEGERS) == pytest.approx(by_divergence, rel=1e-6)
    assert by_distribution < epsilon(p, noise, rounds, delta) <= by_divergence * (1 + 1e-9)


def test_epsilon_of_the_moments_accountant_is_the_published_one() -> None:
    """Abadi et al. 2016, section 3.2: q = 0.01, σ = 4, 10,000 steps, δ = 1e-5 give 1.26 (by the older conversion)."""
    found = min(10_000 * divergence(order, 0.01, 4.0) + math.log(1e5) / (order - 1) for order in range(2, 65))
    assert round(found, 2) == 1.26


MEMORIES: dict[str, Callable[[int, Array], Array]] = {
    "none": lambda drawn, seen: np.ones_like(seen),
    "takes back what it gave": lambda drawn, seen: np.full_like(seen, -1.0 if drawn else 1.0),
    "sends what it kept": lambda drawn, seen: np.full_like(seen, 0.0 if drawn else 1.0),
    "follows the model": lambda drawn, seen: np.where((seen > 0.5) == bool(drawn), 1.0, -1.0),
}
"""What a client sends in its second round, given whether it was drawn in the first and what was released there."""


@together("memory", MEMORIES)
@together("order", [1.5, 2.0, 4.0])
def test_two_rounds_cost_twice_one_round_whatever_clients_remember(memory: str, order: float) -> None:
    """By integration over both releases, in both directions; when the client was drawn stays hidden."""
    p, noise = 0.3, 1.2
    grid = np.linspace(-11, 15, 600)
    first, second = grid[:, None], grid[None, :]

    def density(at: Array, mean: Array | float) -> Array:
        return np.exp(-((at - mean) ** 2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))

    without, met = density(first, 0) * density(second, 0), np.zeros((len(grid), len(grid)))
    for drawn, chance in ((0, 1 - p), (1, p)):
        later = (1 - p) * density(second, 0) + p * density(second, MEMORIES[memory](drawn, first))
        met += chance * density(first, float(drawn)) * later
    area = (grid[1] - grid[0]) ** 2
    for one, other in ((met, without), (without, met)):
        found = math.log(float((one**order * other ** (1 - order)).sum()) * area) / (order - 1)
        assert found <= 2 * divergence(order, p, noise) * (1 + 1e-6)
        if memory == "none" and one is met:
            assert found == pytest.approx(2 * divergence(order, p, noise), rel=1e-6)


def test_without_sampling_it_is_the_gaussian_mechanism() -> None:
    """Certain participation costs the closed form α/(2z²), to which sampling tends."""
    for order in (1.5, 2.0, 17.0):
        assert divergence(order, 1.0, 2.0) == order / 8
        assert divergence(order, 1 - 1e-9, 2.0) == pytest.approx(order / 8, rel=1e-6)


def test_more_noise_fewer_rounds_and_rarer_clients_cost_less() -> None:
    base = epsilon(0.1, 1.0, 100, 1e-5)
    assert epsilon(0.1, 1.1, 100, 1e-5) < base
    assert epsilon(0.1, 1.0, 99, 1e-5) < base
    assert epsilon(0.09, 1.0, 100, 1e-5) < base
    assert epsilon(0.1, 1.0, 100, 1e-4) < base
    assert epsilon(0.1, 1.0, 0, 1e-5) == 0


@pytest.mark.parametrize("target", [0.5, 8.0, 30.0])
def test_the_noise_for_a_target_is_just_enough(target: float) -> None:
    noise = noise_for(target, 0.2, 50, 1e-5)
    assert epsilon(0.2, noise, 50, 1e-5) <= target < epsilon(0.2, noise / 1.002, 50, 1e-5)


def test_a_target_that_no_noise_meets_is_refused() -> None:
    with pytest.raises(SpecError, match=r"epsilon=1e-05: no noise reaches it in 10 rounds"):
        noise_for(1e-5, 1.0, 10, 1e-5)


def test_all_orders_are_orders() -> None:
    assert min(ORDERS) > 1
    assert list(ORDERS) == sorted(ORDERS)
