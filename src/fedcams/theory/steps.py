"""Step sizes that the proved bound recommends, and those of the paper's corollaries."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedcams.theory.proved import CROSS, kept, sound
from fedcams.theory.setting import Bound, Constants, Setting

DRIFT = 0.1
"""The share of the leading terms that client drift, or changing weights, may add."""


@dataclass(frozen=True)
class Steps:
    """Recommended rates, as a setting, with the bound they give."""

    run: Setting
    bound: Bound
    limited_by: str
    """What keeps the step below the best one; empty if nothing does."""


def recommended(known: Constants, run: Setting) -> Steps:
    """Return the rates that minimise the bound within its conditions; those of `run` do not matter.

    The local rate is the largest at which drift adds at most a tenth to the leading terms and v̂ cannot leave its floor.
    If the server adds ε to the root, changes of v̂ may also add at most a tenth. The server's rate then makes the step
    of a round the one with the lowest bound.
    """
    variance = known.s_l**2 / (run.n * run.K)
    if not run.full:
        variance += 3 * known.s_g**2 * (run.m - run.n) / (run.n * (run.m - 1))
    eta_l = _local_rate(known, run, variance)
    longest = _longest(known, replace(run, eta_l=eta_l))
    alpha = _best(known, replace(run, eta_l=eta_l), longest)
    chosen = _with_step(run, eta_l, alpha)
    return Steps(chosen, sound(known, chosen), "the conditions of the bound" if alpha == longest else "")


def corollary(known: Constants, run: Setting) -> Steps:
    """Return the corollaries' choice with all constants set to 1: η = √(K n), η_l = 1/(√T K)."""
    chosen = replace(run, eta=math.sqrt(run.K * run.n), eta_l=1 / (math.sqrt(run.T) * run.K))
    return Steps(chosen, sound(known, chosen), "")


def _local_rate(known: Constants, run: Setting, variance: float) -> float:
    limits = [1 / (8 * run.K * known.L), 1 / (run.K * known.L * math.sqrt(60)), 1.0]
    longest = run.amplification * run.K * known.G  # an update, for a local rate of 1
    if run.adapts:
        limits.append(math.sqrt(run.eps) / longest)
    leading = 2 * math.sqrt(CROSS * known.F * known.L * variance / run.T)
    spread = 2.5 * run.K * known.L**2 * (known.s_l**2 + 6 * run.K * known.s_g**2)
    if leading and spread:
        limits.append(math.sqrt(DRIFT * leading / spread))
    if leading and run.adapts and not run.inside:  # without a hard floor the weights always change
        limits.append(DRIFT * leading * run.T * math.sqrt(run.eps) / (known.G**2 * known.d * (1 + kept(run)) * longest))
    return min(limits)


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
