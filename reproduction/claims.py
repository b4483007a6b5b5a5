"""The paper's claims, one by one: our evidence, and whether each holds, fails or is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from reproduction import words
from reproduction.judges import (
    COMPARABLE,
    FAILS,
    HOLDS,
    MARGIN,
    NOT_RUN,
    Judge,
    Verdict,
    best_epsilon,
    best_of_all,
    bits,
    comparable,
    gamma_stays,
    proven,
    rates,
    reaches,
    rising,
    slower,
    twins,
)
from reproduction.runs import LAST, NEAR, Results
from reproduction.tables import table

COMPRESSED = ("FedCAMS sign", *(f"FedCAMS top-k 1/{ratio}" for ratio in (64, 128, 256)))
TEXT = f"""\
## The paper's claims

The table states the claims of the paper's text, figures and tables in our own words. The paper only suggests two of
them: that FedAMS gains from adaptive steps and not from its rate, and that the theorems explain these steps. For the
first, we compare FedAMS with its *twin*, the FedAvgM that takes the same steps while [v̂ is on its
floor](theory.md#regimes). Accuracies are means over the last {LAST} rounds, and over the seeds that all methods in a
claim share. Signed numbers are points of accuracy; brackets give the lowest and the highest seed. Confidence intervals
are [further down](#differences-from-fedams).

- Two methods within {NEAR} points count as equal%s.
- While two methods count as equal, a claim that one of them is better stays open, and a claim that something brings a
  gain fails.
- Compression that costs at most {COMPARABLE:g} point counts as comparable. A single seed within {MARGIN} points of this
  limit leaves the claim open.
- *Open* also means that runs are missing, that seeds disagree, or that the methods have no seed in common.
"""


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, for one model or for none, where the paper makes it, and how to judge it."""

    text: str
    where: str
    judge: Judge
    model: str = ""


def judged(results: Results) -> list[tuple[Claim, Verdict]]:
    """Return every claim with its verdict."""
    return [(claim, claim.judge(results)) for claim in CLAIMS]


def claims(results: Results) -> Iterator[str]:
    """Yield the section."""
    yield TEXT % _apart(results)
    rows = [_row(claim, found) for claim, found in judged(results)]
    yield from table("claim | model | verdict | evidence | seeds | where", "llllll", rows)


def _apart(results: Results) -> str:
    """Return how far seeds of one method are apart, as the reason for what counts as equal; empty without seeds."""
    presets = [f"{figure}-{model}" for figure in ("fig1", "compression") for model in words.MODELS]
    each = [done.accuracies for preset in presets for done in results.of(preset) if len(done.runs) > 1]
    most = max((max(scores) - min(scores) for scores in each), default=None)
    return "" if most is None else f"; seeds of one method differ by up to {most:.2f}"


def _row(claim: Claim, found: Verdict) -> list[str]:
    seeds = ", ".join(map(str, found.seeds))
    return [claim.text, claim.model, emphasized(found.verdict), found.evidence or "not run yet", seeds, claim.where]


def summary(results: Results, small: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Yield how many claims hold, fail and are open, and a table of the verdicts alone, next to those of small runs."""
    every = judged(results)
    holds, fails = (sum(found.verdict == name for _, found in every) for name in (HOLDS, FAILS))
    yield (
        f"Of {len(every)} claims of the paper, **{holds} hold, {fails} fail and {len(every) - holds - fails} are "
        f"open**.{_sure(every)}\nThe table lists the verdicts; [the evidence](#the-papers-claims) is below.\n"
    )
    columns = {**dict.fromkeys(words.MODELS.values(), ""), "": ""}
    also = ["[small network, rates not tuned](small.md)"] if small else []
    rows: dict[str, dict[str, str]] = {}
    for claim, found in every:
        rows.setdefault(claim.text, dict(columns))[claim.model] = emphasized(found.verdict)
    heads = ["claim", *words.MODELS.values(), "in general", *also]
    cells = [[text, *row.values(), *(small.get(text, "") for _ in also)] for text, row in rows.items()]
    yield from table(" | ".join(heads), "l" * len(heads), cells)


def emphasized(verdict: str) -> str:
    """Return a verdict as a table shows it: bold if it is settled."""
    return f"**{verdict}**" if verdict in (HOLDS, FAILS) else verdict


def _sure(every: list[tuple[Claim, Verdict]]) -> str:
    """Return how many seeds the verdicts rest on."""
    counts = sorted({len(found.seeds) for _, found in every if found.seeds and found.verdict != NOT_RUN})
    if not counts:
        return ""
    seeds = " to ".join(map(str, {counts[0]: "", counts[-1]: ""}))
    return f" Verdicts from runs rest on {seeds} seed{'s' * (counts[-1] > 1)} each."


def _each(text: str, where: str, preset: str, judge: Callable[[str], Judge]) -> list[Claim]:
    """Return the same claim for both models."""
    return [Claim(text, where, judge(preset.format(model)), name) for model, name in words.MODELS.items()]


def _compressed(label: str) -> list[Claim]:
    text = f"FedCAMS with {label.removeprefix('FedCAMS ')} is comparable to FedAMS"
    return _each(text, "figure on compression", "compression-{}", lambda preset: comparable(preset, label))


def _cohorts(method: str, name: str) -> list[Claim]:
    labels = tuple(f"{method} n={n}" for n in (5, 10, 20))
    text = f"More clients per round help {name}"
    return _each(text, "figure on cohorts", "cohort-{}", lambda preset: rising(preset, labels))


RESNET = words.MODELS["resnet18"]
CLAIMS = [
    *_each("FedAMS is the best of the five server optimizers", "figure 1", "fig1-{}", best_of_all),
    *_each("FedAMS gains from adaptive steps, not from the rate", "figure 1, twins", "fig1-{}", twins),
    Claim("FedAMS with ε = 1e-3 reaches 90.94%", "table on ε", reaches, RESNET),
    Claim("ε = 1e-3 is the best of six", "table on ε", best_epsilon, RESNET),
    *[claim for label in COMPRESSED for claim in _compressed(label)],
    Claim("500 rounds take as many bits as the tables say", "tables on communication", bits, RESNET),
    Claim("γ does not grow during a run", "figure on γ", gamma_stays),
    *_cohorts("FedAMS", "FedAMS"),
    *_cohorts("FedCAMS sign", "FedCAMS"),
    *_each("FedAMS is the best with two label shards per client", "figure on non-IID data", "noniid-{}", best_of_all),
    *_each("FedAMS is the best on CIFAR-100", "figure on CIFAR-100", "fig1-{}-cifar100", best_of_all),
    Claim("FedAMS converges at the rate 1/√(TKm)", "corollary of theorem 1", rates),
    Claim("More local steps slow convergence under partial participation", "corollary of theorem 2", slower),
    Claim("The theorems explain adaptive steps", "theorems 1 to 4",
          proven("their conditions keep v̂ on its floor: [theory](theory.md#regimes)", FAILS)),
]  # fmt: skip
