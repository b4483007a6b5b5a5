"""The paper's claims, one by one: our evidence, and whether each holds, fails or is open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from fedcams.plan.paper import ROUNDS, paper_tables
from reproduction import words
from reproduction.runs import LAST, NEAR, Done, Results, with_common_seeds
from reproduction.tables import measured, table

HOLDS, FAILS, OPEN = "holds", "fails", "open"
COMPARABLE = 1.0
"""Points that compression may cost and still be comparable."""
GROWS = 1.5
"""Ratio of the last rounds to the first from which on γ counts as growing."""
COMPRESSED = ("FedCAMS sign", *(f"FedCAMS top-k 1/{ratio}" for ratio in (64, 128, 256)))
OPTIMIZERS = ("FedAvg", "FedAdam", "FedYogi", "FedAMSGrad")
TEXT = f"""\
## The paper's claims

These are the claims of the paper's text, figures and tables in our words. Accuracies are means over the last {LAST}
rounds, and over the seeds that all methods of a claim have: one, unless *Seeds* below lists more. Two methods within
{NEAR} points count as equal. Compression that costs at most {COMPARABLE:g} point counts as comparable. *Open* means
that runs are missing, or that what the claim ranks counts as equal.
"""

Verdict = tuple[str, str]
"""What was found, and whether the claim holds, fails or is open."""


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, where the paper makes it, and how to judge it."""

    text: str
    where: str
    judge: Callable[[Results], Verdict]


def claims(results: Results) -> Iterator[str]:
    """Yield the section."""
    yield TEXT
    found = [(claim, *claim.judge(results)) for claim in CLAIMS]
    rows = [
        [claim.text, claim.where, evidence or "not run yet", f"**{verdict}**"] for claim, evidence, verdict in found
    ]
    yield from table("claim | where | evidence | verdict", "llll", rows)


# -- judges --------------------------------------------------------------------------------------------------------


def scores(results: Results, preset: str, labels: Collection[str]) -> dict[str, float]:
    """Return the accuracies of those of these methods of a preset that were run.

    Each is the mean over the seeds that all of them have.
    """
    found = with_common_seeds([done for done in results.of(preset) if done.label in labels])
    return {done.label: done.accuracy for done in found}


def _shown(found: dict[str, float], labels: tuple[str, ...]) -> str:
    return ", ".join(f"{label} {found[label]:.2f}" for label in labels if label in found)


def best_of_all(preset: str) -> Callable[[Results], Verdict]:
    """Return a judge of the claim that FedAMS is the best of the five server optimizers."""

    def judge(results: Results) -> Verdict:
        found = scores(results, preset, ("FedAMS", *OPTIMIZERS))
        evidence = _shown(found, ("FedAMS", *OPTIMIZERS))
        if "FedAMS" not in found or len(found.keys() & set(OPTIMIZERS)) < len(OPTIMIZERS):
            return evidence, OPEN
        return evidence, _leads(found["FedAMS"] - max(found[name] for name in OPTIMIZERS))

    return judge


def _leads(points: float) -> str:
    """Return the verdict on a claim that something is ahead of all others, by how many points it is."""
    return OPEN if abs(points) <= NEAR else HOLDS if points > 0 else FAILS


def comparable(preset: str, label: str) -> Callable[[Results], Verdict]:
    """Return a judge of the claim that a compressed method is comparable to FedAMS."""

    def judge(results: Results) -> Verdict:
        found = scores(results, preset, ("FedAMS", label))
        evidence = _shown(found, ("FedAMS", label))
        if not {"FedAMS", label} <= found.keys():
            return evidence, OPEN
        return evidence, HOLDS if found["FedAMS"] - found[label] <= COMPARABLE else FAILS

    return judge


def rising(preset: str, labels: tuple[str, ...]) -> Callable[[Results], Verdict]:
    """Return a judge of the claim that accuracy rises along these labels: from first to last, and never falls."""

    def judge(results: Results) -> Verdict:
        found = scores(results, preset, labels)
        values = [found[label] for label in labels if label in found]
        if len(values) < len(labels):
            return _shown(found, labels), OPEN
        if any(b < a - NEAR for a, b in pairwise(values)):
            return _shown(found, labels), FAILS
        return _shown(found, labels), _leads(values[-1] - values[0])

    return judge


def twins(preset: str) -> Callable[[Results], Verdict]:
    """Return a judge of the claim that FedAMS owes its accuracy to adaptivity, by FedAvgM at the same rate.

    If both count as equal, the claim fails: what FedAMS gains, the rate gives without adaptive steps.
    """

    def judge(results: Results) -> Verdict:
        found = scores(results, preset, ("FedAMS", "FedAvgM, twin of FedAMS"))
        own, twin = found.get("FedAMS"), found.get("FedAvgM, twin of FedAMS")
        if own is None or twin is None:
            return _shown(found, ("FedAMS",)), OPEN
        return f"FedAMS {own:.2f}, its FedAvgM twin {twin:.2f}", HOLDS if own - twin > NEAR else FAILS

    return judge


def best_epsilon(results: Results) -> Verdict:
    """Judge the claim that ε = 1e-3 is the best of six, with the better rate for each."""
    found = scores(results, "epsilon", [label + ending for label in words.EPSILON for ending in words.EPSILON_RULES])
    each: dict[str, float] = {}
    for label in words.EPSILON:
        known = [found[name] for name in (label, f"{label}, scaled lr") if name in found]
        each |= {label: max(known)} if known else {}
    evidence = _shown(each, tuple(words.EPSILON))
    if len(found) < 2 * len(words.EPSILON) - 1:
        return evidence, OPEN
    return evidence, _leads(each.pop("eps=1e-3") - max(each.values()))


def reaches(results: Results) -> Verdict:
    """Judge the one accuracy of FedAMS that the paper prints."""
    found = scores(results, "fig1-resnet18", ("FedAMS",)).get("FedAMS")
    if found is None:
        return "", OPEN
    return f"{found:.2f} against {words.EPSILON['eps=1e-3']}", (
        HOLDS if found >= float(words.EPSILON["eps=1e-3"]) - NEAR else FAILS
    )


def bits(results: Results) -> Verdict:
    """Judge the paper's tables of communication, which need no run."""
    rows = [row for rows in paper_tables() for row in rows]
    right = sum(float(f"{row.bits:.2e}") == float(row.printed) for row in rows)
    return f"{right} of {len(rows)} numbers for {ROUNDS} rounds come out as printed", (
        HOLDS if right == len(rows) else FAILS
    )


def gamma_stays(results: Results) -> Verdict:
    """Judge the claim that γ does not grow over a run."""
    runs = [done for model in words.MODELS for done in measured(results, model)]
    if not runs:
        return "", OPEN
    ratios = [_growth(done) for done in runs]
    evidence = f"last {LAST} rounds over the first: {min(ratios):.1f}x to {max(ratios):.1f}x in {len(runs)} runs"
    return evidence, FAILS if max(ratios) > GROWS else HOLDS


def _growth(done: Done) -> float:
    return fmean(done.gamma[-LAST:]) / fmean(done.gamma[:LAST])


def stated(evidence: str, verdict: str) -> Callable[[Results], Verdict]:
    """Return a judge of a claim that docs/theory.md settles, whatever was run."""
    return lambda results: (evidence, verdict)


def _each(text: str, where: str, preset: str, judge: Callable[[str], Callable[[Results], Verdict]]) -> list[Claim]:
    """Return the same claim for both models."""
    return [Claim(f"{text}, {name}", where, judge(f"{preset}-{model}")) for model, name in words.MODELS.items()]


CLAIMS = [
    *_each("FedAMS is the best of the five server optimizers", "figure 1", "fig1", best_of_all),
    Claim("FedAMS with ε = 1e-3 ends at 90.94%, ResNet-18", "table on ε", reaches),
    *_each("FedAMS gains from adaptive steps, not from the rate", "figure 1, twins", "fig1", twins),
    Claim("ε = 1e-3 is the best of six", "table on ε", best_epsilon),
    *[
        Claim(f"FedCAMS with {label.removeprefix('FedCAMS ')} is comparable to FedAMS, {name}", "figure on compression",
              comparable(f"compression-{model}", label))
        for model, name in words.MODELS.items() for label in COMPRESSED
    ],
    Claim("Compressed both ways, 500 rounds take 2.79e9 to 1.12e10 bits", "tables on communication", bits),
    Claim("γ stays bounded: it does not grow over a run", "figure on γ", gamma_stays),
    *_each("More clients per round do better, FedAMS", "figure on cohorts", "cohort",
           lambda preset: rising(preset, ("FedAMS n=5", "FedAMS n=10", "FedAMS n=20"))),
    *_each("More clients per round do better, FedCAMS", "figure on cohorts", "cohort",
           lambda preset: rising(preset, tuple(f"FedCAMS sign n={n}" for n in (5, 10, 20)))),
    *_each("FedAMS is the best with two label shards per client", "figure on non-IID data", "noniid", best_of_all),
    Claim("FedAMS is the best on CIFAR-100, ResNet-18", "figure on CIFAR-100", best_of_all("fig1-resnet18-cifar100")),
    Claim("FedAMS converges at the rate 1/√(TKm)", "corollary of theorem 1",
          stated("slopes of -0.5 against T, K and m: [theory](theory.md#measured)", HOLDS)),
    Claim("More local steps slow partial participation down", "corollary of theorem 2",
          stated("only with η ~ √(Kn): [theory](theory.md#more-local-steps-under-partial-participation)", FAILS)),
    Claim("The theorems explain adaptive steps", "theorems 1 to 4",
          stated("their conditions keep v̂ on its floor: [theory](theory.md#regimes)", FAILS)),
]  # fmt: skip
