"""Step sizes that the proved bound recommends, and those of the paper's corollaries."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedcams.theory.proved import kept, sound
from fedcams.theory.setting import Bound, Constants, Setting

MORE = 0.1
"""How much client drift, or changing weights, may add to the lowest bound, as a share of it."""


@dataclass(frozen=True)
class Steps:
    """Recommended rates, as a setting, with the bound they give."""

    run: Setting
    bound: Bound
    limited_by: str
    """What keeps the step below the best one; empty if nothing does."""


def recommended(known: Constants, run: Setting) -> Steps:
    """Return rates whose bound is near the lowest within its conditions; those of `run` do not matter.

    A shorter local rate never makes the bound worse, but the server's rate must then be higher. So the local rate is
    the largest at which v̂ cannot leave its floor and drift adds at most a tenth to the lowest bound. If the server adds
    ε to the root, P and changes of v̂ may also add at most a tenth each. The server's rate then makes the step of a
    round the one with the lowest bound.
    """
    eta_l = _local_rate(known, run)
    return _with_best_step(known, replace(run, eta_l=eta_l))


def corollary(known: Constants, run: Setting) -> Steps:
    """Return the corollaries' choice with all constants set to 1: η = √(K n), η_l = 1/(√T K)."""
    chosen = replace(run, eta=math.sqrt(run.K * run.n), eta_l=1 / (math.sqrt(run.T) * run.K))
    return Steps(chosen, sound(known, chosen), "")


def _local_rate(known: Constants, run: Setting) -> float:
    soft = run.adapts and not run.inside  # without a hard floor the weights always change
    limits = [1 / (8 * run.K * known.L), 1.0]
    longest = run.amplification * run.K * known.G  # an update, for a local rate of 1
    if run.adapts:
        limits.append((MORE if soft else 1) * math.sqrt(run.eps) / longest)
    lowest = _lowest(known, run)
    spread = 2.5 * run.K * known.L**2 * (known.s_l**2 + 6 * run.K * known.s_g**2)
    if spread:
        limits.append(math.sqrt(MORE * lowest / spread))
    if soft:
        limits.append(1 / (run.K * known.L * math.sqrt(60 * (1 + MORE))))
        limits.append(MORE * lowest * run.T * math.sqrt(run.eps) / (known.G**2 * known.d * (1 + kept(run)) * longest))
    return min(limits)


def _lowest(known: Constants, run: Setting) -> float:
    """Return the lowest bound, divided by its first factor: with the local rate near 0, clients do not drift."""
    still = replace(run, eta_l=1e-12 / (run.K * known.L), adapts=False)
    return _with_best_step(known, still).bound.value / (4 if run.full else 8)


def _with_best_step(known: Constants, run: Setting) -> Steps:
    """Return the rates of a setting whose step of a round has the lowest bound, for its local rate."""
    longest = _longest(known, run)
    alpha = _best(known, run, longest)
    chosen = _with_step(run, run.eta_l, alpha)
    return Steps(chosen, sound(known, chosen), "the conditions of the bound" if alpha == longest else "")


def _with_step(run: Setting, eta_l: float, alpha: float) -> Setting:
    return replace(run, eta_l=eta_l, eta=alpha * math.sqrt(run.eps) / (eta_l * run.K))


def _longest(known: Constants, run: Setting) -> float:
    """Return the longest step of a round that meets all conditions, by bisection."""
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        if sound(known, _with_step(run, run.eta_l, middle)).admissible:
            low = middle
        else:
            high = middle
    return low


def _best(known: Constants, run: Setting, longest: float) -> float:
    """Return the step of a round up to `longest` with the lowest bound.

    Every term is a power of the step with a positive factor, so their sum is convex in the step's logarithm: a third
    of an interval can be dropped at a time.
    """

    def bound(log: float) -> float:
        return sound(known, _with_step(run, run.eta_l, math.exp(log))).value

    low, high = math.log(longest) - 50, math.log(longest)
    for _ in range(150):
        third = (high - low) / 3
        if bound(low + third) < bound(high - third):
            high -= third
        else:
            low += third
    return longest if high == math.log(longest) else math.exp(high)
