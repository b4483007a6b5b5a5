"""A bound with every step proved (docs/theory.md): the paper's, with the weights of the previous round.

Subtracting D_t = V̂_{t-1}^{-1/2} - V̂_t^{-1/2} ≥ 0 first makes the weights of the descent term known before the round.
Keeping the expected update in the product with ∇f(y_t) - ∇f(x_t) makes the terms with momentum and residuals of higher
order.
"""

from __future__ import annotations

import math

from fedcams.theory.setting import Bound, Condition, Constants, Setting

CROSS = 2.0
"""A safe factor for the product of noise and later gradients, which the paper sets to zero; 1 ignores it."""


def sound(known: Constants, run: Setting) -> Bound:
    """Return a proved bound on the average of E‖∇f(x_t)‖² over all rounds, with its conditions.

    Arguments:
        known: what the theorems assume of the problem.
        run: the setting.

    Returns:
        The bound, term by term, and its conditions.

    Examples:
        >>> from fedcams.theory import Constants, Setting, sound
        >>> known = Constants(L=1.0, G=1.0, s_l=0.1, s_g=0.1, F=1.0, d=10)
        >>> sound(known, Setting(m=10, n=10, K=5, T=100, eta=0.1, eta_l=0.01, eps=1e-3)).value > 0
        True
    """
    root, peak = math.sqrt(run.eps), largest_root(known, run)
    scale = (4 if run.full else 8) * peak
    boost, feedback = _higher_order(known, run)
    noise = CROSS * boost * run.eta * run.eta_l * known.L / run.eps
    drift = 5 * run.K * known.L**2 * run.eta_l**2 / (2 * root) * (known.s_l**2 + 6 * run.K * known.s_g**2)
    terms = {
        "optimisation": known.F / (run.eta * run.eta_l * run.K * run.T),
        "memory": _memory(known, run) / run.T,
        "drift": drift,
        "noise": noise * known.s_l**2 / run.n,
        "sampling": noise * run.sampling(known),
        "error feedback": feedback,
    }
    return Bound("sound", {name: scale * term for name, term in terms.items()}, conditions(known, run))


def conditions(known: Constants, run: Setting) -> tuple[Condition, ...]:
    """Return what the proof needs of the two rates."""
    room = math.sqrt(run.eps) / largest_root(known, run)
    boost, _ = _higher_order(known, run)
    step, m, n = CROSS * boost * run.alpha * known.L, run.m, run.n
    found = [
        Condition("local rate ≤ 1/(8KL)", 1 / (8 * run.K * known.L), run.eta_l),
        Condition("(η_l K L)²", room / 60, (run.eta_l * run.K * known.L) ** 2),
        Condition("step of a round", room / 4, step * (m * (n - 1) / (n * (m - 1)) if m > 1 else 1.0)),
    ]
    if not run.full:
        found.append(Condition("step of a round, sampling", room / 8, step * 4.41 * (m - n) / (n * (m - 1))))
    return tuple(found)


def largest_root(known: Constants, run: Setting) -> float:
    """Return P, the largest possible √v̂, or √v̂ + ε where ε is added to the root."""
    root = math.sqrt(run.eps)
    longest = run.adaptivity(known) * root
    return max(root, longest) if run.inside else root + longest


def _memory(known: Constants, run: Setting) -> float:
    """Return Ψ, the cost of changing weights; zero if v̂ cannot leave its floor."""
    fall = 1 / math.sqrt(run.eps) - 1 / largest_root(known, run)
    held = kept(run)
    first = (1 + held) * known.G**2 * known.d * fall
    return first + run.eta * run.eta_l * run.K * known.L * (held * known.G) ** 2 * known.d * fall**2


def kept(run: Setting) -> float:
    """Return how many updates momentum and residuals hold at most; residuals of all m clients count, divided by n."""
    return run.c_b + run.m / run.n * run.q / (1 - run.q)


def _higher_order(known: Constants, run: Setting) -> tuple[float, float]:
    """Return the factor on the noise, and the term that partial participation with error feedback has instead."""
    if run.q and not run.full:
        return 1.0, (run.alpha * known.L * known.G * kept(run)) ** 2 / math.sqrt(run.eps)
    held = run.c_b + ((run.q + run.gamma) / (1 - run.q) if run.q else 0.0)
    return 1 + run.alpha * known.L * held**2, 0.0
