"""The paper's four theorems as printed, with their misprints corrected; docs/theory.md lists those.

Theorems 1 and 2 cover FedAMS with all and with some of the clients per round; 3 and 4 do the same for FedCAMS. A step
of their proofs does not hold (docs/theory.md), so these bounds are for comparison; `proved` has the one proved there.
"""

from __future__ import annotations

import math

from fedcams.theory.setting import Bound, Condition, Constants, Setting


def theorem(run: Setting) -> int:
    """Return the number of the theorem that covers a setting.

    Arguments:
        run: the setting.

    Returns:
        1 or 3 for full participation, 2 or 4 for partial participation; 3 and 4 are with compression.

    Examples:
        >>> from fedcams.theory import Setting, theorem
        >>> theorem(Setting(m=100, n=10, K=60, T=500, eta=1.0, eta_l=0.01, eps=1e-3, q=0.5))
        4
    """
    return (3 if run.q else 1) + (not run.full)


def printed(known: Constants, run: Setting) -> Bound:
    """Return the printed bound of the setting's theorem, with the printed and the tight condition on the local rate.

    The tight one is what the proof uses; the printed one replaces the local rate in S by 1.

    Arguments:
        known: what the theorems assume of the problem.
        run: the setting.

    Returns:
        The bound, term by term, and its conditions.

    Examples:
        >>> from fedcams.theory import Constants, Setting, printed
        >>> known = Constants(L=1.0, G=1.0, s_l=0.1, s_g=0.1, F=1.0, d=10)
        >>> run = Setting(m=10, n=10, K=5, T=100, eta=0.1, eta_l=0.01, eps=1e-3)
        >>> list(printed(known, run).terms)[:2]
        ['optimisation', 'memory']
    """
    L, G, number = known.L, known.G, theorem(run)
    pre = 4 if run.full else 8
    scale = pre * s_of(run.eta_l, known, run)
    root = math.sqrt(run.eps)
    c_1 = _c_1(run)
    memory = c_1 * G**2 * known.d / root + 2 * c_1**2 * run.eta * run.eta_l * run.K * L * G**2 * known.d / run.eps
    drift = 5 * run.eta_l**2 * run.K * L**2 / math.sqrt(2 * run.eps) * (known.s_l**2 + 6 * run.K * known.s_g**2)
    noise = _a(known, run) * run.eta_l / (2 * run.eps)
    terms = {
        "optimisation": known.F / (run.eta * run.eta_l * run.K * run.T),
        "memory": memory / run.T,
        "drift": drift,
        "noise": noise * known.s_l**2 / run.n,
        "sampling": noise * run.sampling(known),
        "error feedback": c_1 * run.eta * run.eta_l * run.K * L * G**2 / run.eps if number == 4 else 0.0,
    }
    conditions = (
        Condition("local rate ≤ 1/(8KL)", 1 / (8 * run.K * L), run.eta_l),
        Condition("local rate, as printed", printed_rate(known, run), run.eta_l),
        Condition("local rate, tight", tight_rate(known, run), run.eta_l),
    )
    return Bound("printed", {name: scale * term for name, term in terms.items()}, conditions)


def printed_rate(known: Constants, run: Setting) -> float:
    """Return the largest local rate that the theorem allows as printed.

    Arguments:
        known: what the theorems assume of the problem.
        run: the setting.

    Returns:
        The rate; 0 if one of several clients takes part (n = 1), since the condition then divides by 0.

    Examples:
        >>> from fedcams.theory import Constants, Setting, printed_rate, tight_rate
        >>> known = Constants(L=1.0, G=1.0, s_l=0.1, s_g=0.1, F=1.0, d=10)
        >>> run = Setting(m=10, n=10, K=5, T=100, eta=0.1, eta_l=0.01, eps=1e-3)
        >>> printed_rate(known, run) <= tight_rate(known, run)
        True
    """
    allowed = run.eps / (run.K * s_of(1.0, known, run) * _a(known, run))
    if not run.full:
        part = 24 * run.m * (run.n - 1)  # the printed 48 b is 24 a: b = a/2
        allowed *= run.n * (run.m - 1) / part if part else 0.0
    return min(1 / (8 * run.K * known.L), allowed)


def tight_rate(known: Constants, run: Setting) -> float:
    """Return the largest local rate that the proof allows: the solution of η_l S(η_l) ≤ A, at most 1/(8KL).

    Arguments:
        known: what the theorems assume of the problem.
        run: the setting.

    Returns:
        The rate.

    Examples:
        >>> from fedcams.theory import Constants, Setting, tight_rate
        >>> known = Constants(L=1.0, G=1.0, s_l=0.1, s_g=0.1, F=1.0, d=10)
        >>> tight_rate(known, Setting(m=10, n=10, K=5, T=100, eta=0.1, eta_l=0.01, eps=1e-3)) <= 1 / 40
        True
    """
    limits = [run.eps / (run.K * _a(known, run))]
    if not run.full:
        m, n = run.m, run.n
        limits = [limits[0] * n * (m - 1) / (17.64 * (m - n))] + (
            [limits[0] * n * (m - 1) / (m * (n - 1))] if n > 1 else []
        )
    # x = η_l²: b2 R K² G² x² + ε x - A² = 0
    square, area = run.beta2 * _inflation(run) * (run.K * known.G) ** 2, min(limits) ** 2
    solved = 2 * area / (run.eps + math.sqrt(run.eps**2 + 4 * square * area))
    return min(1 / (8 * run.K * known.L), math.sqrt(solved))


def s_of(eta_l: float, known: Constants, run: Setting) -> float:
    """Return S(η_l), the theorem's bound on the root of v̂."""
    return math.sqrt(run.beta2 * _inflation(run) * (eta_l * run.K * known.G) ** 2 + run.eps)


def _inflation(run: Setting) -> float:
    """Return R, the bound on the squared length of decoded updates, divided by that of updates."""
    return 4 * (1 + run.q**2) ** 3 / (1 - run.q**2) ** 2 if run.q else 1.0


def _c_1(run: Setting) -> float:
    lost = 2 * run.q / (1 - run.q**2)
    return run.c_b + (1 if run.full else run.m / run.n) * lost


def _a(known: Constants, run: Setting) -> float:
    w, lost = math.sqrt(2 * (1 - run.beta2)), 2 * (run.q + run.gamma) / (1 - run.q**2)
    factor = {1: 3 + run.c_b**2, 2: 3 + run.c_b**2, 3: 3 + 2 * (run.c_b**2 + lost**2), 4: 2.0}[theorem(run)]
    return factor * run.eta * known.L + 2 * w * known.G
