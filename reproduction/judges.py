"""How the paper's claims are judged: by runs with the same seeds, and by the measurements in docs/theory.md."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from fedcams.plan.paper import ROUNDS, paper_tables
from reproduction import words
from reproduction.runs import NEAR, Done, Results, ahead, last_rounds, spread, with_common_seeds
from reproduction.tables import measured
from theory_page import grid

HOLDS, FAILS, OPEN, NOT_RUN = "holds", "fails", "open", "open: runs missing"
COMPARABLE = 1.0
"""Points that compression may cost and still be comparable."""
MARGIN = 0.3
"""How near to that limit a single seed settles nothing: about as much as seeds of one method differ."""
GROWS = 1.5
"""γ counts as growing if the mean of the last rounds is more than this many times that of the first."""
STRAIGHT = 0.06
"""How far a measured slope may be from the one that theory predicts."""
OPTIMIZERS = ("FedAvg", "FedAdam", "FedYogi", "FedAMSGrad")


class Verdict(NamedTuple):
    """What was found, whether the claim holds, fails or is open, and the seeds of the runs."""

    evidence: str
    verdict: str
    seeds: tuple[int, ...] = ()


Judge = Callable[[Results], Verdict]


def found(results: Results, preset: str, labels: Collection[str]) -> dict[str, Done]:
    """Return the given methods of a preset, if they were run, with the seeds that all of them have."""
    runs = with_common_seeds([done for done in results.of(preset) if done.label in labels])
    return {done.label: done for done in runs}


def _judged(known: dict[str, Done], labels: Collection[str], verdict: str, more: str = "") -> Verdict:
    """Return a verdict with the accuracies of these methods as evidence; open if they have no seed in common."""
    each = ", ".join(f"{label} {known[label].accuracy:.2f}" for label in labels if label in known)
    seeds = sorted({seed for done in known.values() for seed in done.seeds})
    if verdict != NOT_RUN and len({tuple(done.seeds) for done in known.values()}) > 1:
        verdict, more = OPEN, f"{more}; no seed in common"
    return Verdict(each + more, verdict, tuple(seeds))


def leads(points: list[float]) -> str:
    """Return the verdict on a claim that something is ahead, from its lead in points with each seed.

    The claim is open if the mean counts as equal, or if some seed says the opposite.
    """
    mean = fmean(points)
    if abs(mean) <= NEAR or any(each * mean < 0 for each in points):
        return OPEN
    return HOLDS if mean > 0 else FAILS


def gains(points: list[float]) -> str:
    """Return the verdict on a claim that something gains, from its lead in points with each seed.

    If all seeds count as equal or worse, there is no gain and the claim fails.
    """
    if fmean(points) > NEAR:
        return leads(points)
    return FAILS if max(points) <= NEAR else OPEN


def cheap(points: list[float]) -> str:
    """Return the verdict on a claim that compression is comparable, from its lead, mostly negative, with each seed.

    The claim is open if seeds disagree, or if there is only one and it is near the limit.
    """
    agree = {each >= -COMPARABLE for each in points}
    if len(agree) > 1 or (len(points) == 1 and abs(points[0] + COMPARABLE) < MARGIN):
        return OPEN
    return HOLDS if agree == {True} else FAILS


def best_of_all(preset: str) -> Judge:
    """Return a judge of the claim that FedAMS is the best of the five server optimizers."""

    def judge(results: Results) -> Verdict:
        known = found(results, preset, ("FedAMS", *OPTIMIZERS))
        if len(known) <= len(OPTIMIZERS):
            return _judged(known, ("FedAMS", *OPTIMIZERS), NOT_RUN)
        next_best = max((known[name] for name in OPTIMIZERS), key=lambda done: done.accuracy)
        points = ahead(known["FedAMS"], next_best)
        more = f"; {spread(points, '+')} against {next_best.label}"
        return _judged(known, ("FedAMS", *OPTIMIZERS), leads(points), more)

    return judge


def comparable(preset: str, label: str) -> Judge:
    """Return a judge of the claim that a compressed method is comparable to FedAMS."""

    def judge(results: Results) -> Verdict:
        known = found(results, preset, ("FedAMS", label))
        if len(known) < 2:
            return _judged(known, ("FedAMS", label), NOT_RUN)
        points = ahead(known[label], known["FedAMS"])
        return _judged(known, ("FedAMS", label), cheap(points), f"; {spread(points, '+')}")

    return judge


def rising(preset: str, labels: tuple[str, ...]) -> Judge:
    """Return a judge of the claim that accuracy rises from the first label to the last, and never falls in between."""

    def judge(results: Results) -> Verdict:
        known = found(results, preset, labels)
        if len(known) < len(labels):
            return _judged(known, labels, NOT_RUN)
        values = [known[label].accuracy for label in labels]
        falls = any(b < a - NEAR for a, b in pairwise(values))
        return _judged(known, labels, FAILS if falls else leads(ahead(known[labels[-1]], known[labels[0]])))

    return judge


def twins(preset: str) -> Judge:
    """Return a judge of the claim that FedAMS owes its accuracy to adaptivity, not to a rate that FedAvgM has too.

    If both count as equal, the claim fails: the same rate gives the same gain without adaptive steps.
    """

    def judge(results: Results) -> Verdict:
        labels = ("FedAMS", "FedAvgM, twin of FedAMS")
        known = found(results, preset, labels)
        if len(known) < 2:
            return _judged(known, labels, NOT_RUN)
        points = ahead(*(known[label] for label in labels))
        own, twin = (known[label].accuracy for label in labels)
        evidence = f"FedAMS {own:.2f}, its FedAvgM twin {twin:.2f}; {spread(points, '+')}"
        return _judged(known, (), gains(points), evidence)

    return judge


def best_epsilon(results: Results) -> Verdict:
    """Judge the claim that ε = 1e-3 is the best of six, using the better of two rates for each."""
    names = [label + ending for label in words.EPSILON for ending in words.EPSILON_RULES]
    known = found(results, "epsilon", names)
    each: dict[str, Done] = {}
    for label in words.EPSILON:
        tried = [known[label + ending] for ending in words.EPSILON_RULES if label + ending in known]
        each |= {label: max(tried, key=lambda done: done.accuracy)} if tried else {}
    if len(known) < 2 * len(words.EPSILON) - 1:
        return _judged(each, words.EPSILON, NOT_RUN)
    next_best = max((label for label in each if label != "eps=1e-3"), key=lambda label: each[label].accuracy)
    points = ahead(each["eps=1e-3"], each[next_best])
    return _judged(each, words.EPSILON, leads(points), f"; {spread(points, '+')} against {next_best}")


def reaches(results: Results) -> Verdict:
    """Judge the one accuracy of FedAMS that the paper prints."""
    known, printed = found(results, "fig1-resnet18", ("FedAMS",)), words.EPSILON["eps=1e-3"]
    if not known:
        return Verdict("", NOT_RUN)
    done = known["FedAMS"]
    near = done.accuracy >= float(printed) - NEAR
    return Verdict(f"{spread(done.accuracies)} against {printed}", HOLDS if near else FAILS, tuple(done.seeds))


def bits(results: Results) -> Verdict:
    """Judge the paper's tables of communication, which need no run."""
    rows = [row for rows in paper_tables() for row in rows]
    right = sum(float(f"{row.bits:.2e}") == float(row.printed) for row in rows)
    evidence = f"{right} of {len(rows)} numbers for {ROUNDS} rounds come out as printed"
    return Verdict(evidence, HOLDS if right == len(rows) else FAILS)


def gamma_stays(results: Results) -> Verdict:
    """Judge the claim that γ does not grow during a run."""
    every = [done for model in words.MODELS for done in measured(results, model)]
    runs = list({done.run.path: done for done in every}.values())  # with other settings, both models may be the same
    if not runs:
        return Verdict("", NOT_RUN)
    ratios = [done.late_gamma / done.early_gamma for done in runs]
    methods = f"{len(runs)} method{'s' * (len(runs) > 1)}"
    most = max(last_rounds(done.run) for done in runs)
    evidence = f"last {most} rounds {min(ratios):.1f}x to {max(ratios):.1f}x the first {most}, for {methods}"
    seeds = sorted({run.experiment.seed for done in runs for run in done.with_gamma})
    return Verdict(evidence, FAILS if max(ratios) > GROWS else HOLDS, tuple(seeds))


# -- by docs/theory.md -------------------------------------------------------------------------------------------------


def rates(results: Results) -> Verdict:
    """Judge the rate of the first corollary by the slopes that the oracle measured on quadratics."""
    found, row = grid.stored(), grid.ROWS[0]
    slopes = [grid.fit(found, row, axis).mean for axis in row.axes]
    shown = ", ".join(f"{each:+.2f}" for each in slopes)
    holds = all(abs(each + 0.5) <= STRAIGHT for each in slopes)
    evidence = f"slopes {shown} against T, K, m on a quadratic: [theory](theory.md#slopes)"
    return Verdict(evidence, HOLDS if holds else FAILS)


def slower(results: Results) -> Verdict:
    """Judge the slowdown by local steps: it fails if a server rate that does not grow with them avoids it."""
    found = grid.stored()
    by_steps, alone = (grid.fit(found, row, "K", late=True).mean for row in grid.STEP_RULES)
    where = "[theory](theory.md#more-local-steps-under-partial-participation)"
    evidence = f"slope against K on a quadratic: {by_steps:+.2f} with η ~ √(Kn), but {alone:+.2f} with η ~ √n: {where}"
    return Verdict(evidence, FAILS if alone <= STRAIGHT else HOLDS)


def proven(evidence: str, verdict: str) -> Judge:
    """Return a judge of a claim that a proof in docs/theory.md settles, whatever was run."""
    return lambda results: Verdict(evidence, verdict)
