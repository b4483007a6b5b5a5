"""The paper's claims, one by one: our evidence, and whether each holds, fails or is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

from fedcams.plan.paper import ROUNDS, paper_tables
from reproduction import words
from reproduction.runs import LAST, Done, Results
from reproduction.tables import measured, table

HOLDS, FAILS, OPEN = "holds", "fails", "open"
NEAR = 0.5
"""Points of accuracy within which two methods count as equal: single seeds differ by about 0.3."""
COMPARABLE = 1.0
"""Points that compression may cost and still be comparable."""
GROWS = 1.5
"""Ratio of the last rounds to the first from which on γ counts as growing."""
COMPRESSED = ("FedCAMS sign", *(f"FedCAMS top-k 1/{ratio}" for ratio in (64, 128, 256)))
OPTIMIZERS = ("FedAvg", "FedAdam", "FedYogi", "FedAMSGrad")
TEXT = f"""\
## The paper's claims

These are the claims of the paper's text, figures and tables in our words. Accuracies are means over the last {LAST}
rounds and over seeds: one seed, unless *Seeds* below lists more. Two methods within {NEAR} points count as equal.
Compression that costs at most {COMPARABLE:g} point counts as comparable. *Open* means that runs are missing.
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


def scores(results: Results, preset: str) -> dict[str, float]:
    """Return the accuracy of every run of a preset by label, as the mean over its seeds."""
    return {done.label: done.accuracy for done in results.of(preset)}


def _shown(found: dict[str, float], labels: tuple[str, ...]) -> str:
    return ", ".join(f"{label} {found[label]:.2f}" for label in labels if label in found)


def best_of_all(preset: str) -> Callable[[Results], Verdict]:
    """Return a judge of the claim that FedAMS is the best of the five server optimizers."""

    def judge(results: Results) -> Verdict:
        found = scores(results, preset)
        evidence = _shown(found, ("FedAMS", *OPTIMIZERS))
        if "FedAMS" not in found or len(found.keys() & set(OPTIMIZERS)) < len(OPTIMIZERS):
            return evidence, OPEN
        return evidence, HOLDS if found["FedAMS"] >= max(found[name] for name in OPTIMIZERS) - 1e-9 else FAILS

    return judge


def comparable(preset: str, label: str) -> Callable[[Results], Verdict]:
    """Return a judge of the claim that a compressed method is comparable to FedAMS."""

    def judge(results: Results) -> Verdict:
        found = scores(results, preset)
        evidence = _shown(found, ("FedAMS", label))
        if not {"FedAMS", label} <= found.keys():
            return evidence, OPEN
        return evidence, HOLDS if found["FedAMS"] - found[label] <= COMPARABLE else FAILS

    return judge


def rising(preset: str, labels: tuple[str, ...]) -> Callable[[Results], Verdict]:
    """Return a judge of the claim that accuracy rises along these labels, up to what counts as equal."""

    def judge(results: Results) -> Verdict:
        found = scores(results, preset)
        values = [found[label] for label in labels if label in found]
        if len(values) < len(labels):
            return _shown(found, labels), OPEN
        steps = zip(values, values[1:], strict=False)
        return _shown(found, labels), HOLDS if all(b >= a - NEAR for a, b in steps) else FAILS

    return judge


def twins(preset: str) -> Callable[[Results], Verdict]:
    """Return a judge of the claim that FedAMS owes its accuracy to adaptivity, by FedAvgM at the same rate."""

    def judge(results: Results) -> Verdict:
        found = scores(results, preset)
        labels = ("FedAMS", "FedAvgM, twin of FedAMS")
        if not set(labels) <= found.keys():
            return _shown(found, labels), OPEN
        return _shown(found, labels), HOLDS if found[labels[0]] - found[labels[1]] > NEAR else FAILS

    return judge


def best_epsilon(results: Results) -> Verdict:
    """Judge the claim that ε = 1e-3 is the best of six, with the better rate for each."""
    found = scores(results, "epsilon")
    each: dict[str, float] = {}
    for label in words.EPSILON:
        known = [found[name] for name in (label, f"{label}, scaled lr") if name in found]
        each |= {label: max(known)} if known else {}
    evidence = _shown(each, tuple(words.EPSILON))
    if len(found) < 2 * len(words.EPSILON) - 1:
        return evidence, OPEN
    return evidence, HOLDS if max(each, key=lambda label: each[label]) == "eps=1e-3" else FAILS


def reaches(results: Results) -> Verdict:
    """Judge the one accuracy of FedAMS that the paper prints."""
    found = scores(results, "fig1-resnet18").get("FedAMS")
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
    Claim("FedAMS with ε = 1e-3 ends at 90.94 %, ResNet-18", "table on ε", reaches),
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
