"""The numbers of docs/theory.md: the block between its two marks is written from what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from fedcams.theory import printed, sound
from fedcams.theory.rates import slope
from reproduction.runs import Results
from theory_page.adaptivity import SHOWN, STEPS, Point
from theory_page.experiments import DOCS
from theory_page.pictures import PAPER, PAPER_RUN, draw, gradient, of
from theory_page.recorded import sections

BLOCK = re.compile(r"(?<=<!-- measured, by make theory -->\n).*(?=<!-- end -->)", re.DOTALL)

OFF_FLOOR = """\
![Accuracy against the share of coordinates off the floor](theory/off-floor.png)

*Bars and band: from the lowest seed to the highest, where there are several.*
"""


def write(found: dict[str, Any], points: Sequence[Point], results: Results) -> None:
    """Draw the pictures and write the numbers."""
    draw(found, points, results, DOCS / "theory")
    path = DOCS / "theory.md"
    path.write_text(BLOCK.sub(lambda _: block(found, points, results), path.read_text("utf-8")), "utf-8")


def block(found: dict[str, Any], points: Sequence[Point], results: Results) -> str:
    """Return the part of the page that shows measurements."""
    quadratics = [*_slopes(found), *_partial(found), *_compression(found), *_gamma(found), *_epsilon(found)]
    adaptive = [*_adaptivity(points), *sections(results), OFF_FLOOR]
    return "\n".join([*quadratics, *adaptive, *_paper(gradient(results))])


def _picture(name: str, text: str) -> str:
    return f"![{text}](theory/{name}.png)\n"


def _slopes(found: dict[str, Any]) -> Iterator[str]:
    yield "| slope of mean ‖∇f‖² against | all rounds | second half | theory | bound over measurement |"
    yield "|---|--:|--:|--:|--:|"
    for axis, name in {"T": "rounds T", "K": "local steps K", "m": "clients m"}.items():
        points = of(found, f"rates {axis}")
        x = [p[axis] for p in points]
        fits = [slope(x, [p[key] for p in points]) for key in ("average", "late")]
        times = [p["bound"] / p["average"] for p in points]
        shown = " | ".join(f"{fit:+.3f}" for fit in fits)
        yield f"| {name} | {shown} | -0.5 | {min(times):.0f}x to {max(times):.0f}x |"
    yield (
        "\nFull participation, no compression, β1 = 0, one seed. v̂ never left its floor in these runs, so the bound\n"
        "is that of their FedAvgM twin. For T = 64, K >= 8 or m >= 16, the step is longer than its condition allows,\n"
        "so the bound is not proved there, but the measurements still lie below it.\n"
    )
    yield _picture("rates", "Mean squared gradient against rounds, local steps and clients, with the bound above")
    yield _picture("collapse", "The same against T K m: all points on one line")


def _partial(found: dict[str, Any]) -> Iterator[str]:
    fits = {}
    for by_steps in (True, False):
        points = of(found, "partial", by_steps=by_steps)
        fits[by_steps] = slope([p["K"] for p in points], [p["late"] for p in points])
    yield "### More local steps under partial participation\n"
    yield (
        "With 4 of 32 clients and η ~ √(Kn), the corollary's choice, the average of the second half grows with K:\n"
        f"slope {fits[True]:+.2f} (theory +1/2). With η ~ √n the slope is {fits[False]:+.2f}. The step causes the\n"
        "slowdown, not the local work.\n"
    )
    yield _picture("partial", "Second half of the run against local steps, for two step rules")


def _compression(found: dict[str, Any]) -> Iterator[str]:
    dense = {p["T"]: p["average"] for p in of(found, "compression", uplink="identity")}
    yield "### What compression costs\n"
    yield "The average over all rounds, relative to no compression, with all clients in every round:\n"
    yield f"| uplink | {' | '.join(f'T = {rounds}' for rounds in dense)} |"
    yield f"|---|{'--:|' * len(dense)}"
    for uplink in dict.fromkeys(p["uplink"] for p in of(found, "compression")):
        if uplink != "identity":
            ratios = [f"{p['average'] / dense[p['T']]:.3f}" for p in of(found, "compression", uplink=uplink)]
            yield f"| `{uplink}` | {' | '.join(ratios)} |"
    yield ""
    yield _picture("compression", "Excess of compression against rounds")


def _gamma(found: dict[str, Any]) -> Iterator[str]:
    yield "### γ grows as the gradient falls\n"
    yield (
        "With clients that differ, exact gradients and sign compression, γ is about σ_g/‖∇f‖ once\n"
        "‖∇f‖ is below σ_g. Means over 20 rounds:\n"
    )
    yield "| σ_g | rounds | ‖∇f‖ | γ | γ ‖∇f‖/σ_g |"
    yield "|--:|--:|--:|--:|--:|"
    for run in found["gamma"]:
        products = [norm * gamma / run["sigma_g"] for norm, gamma in zip(run["norm"], run["gamma"], strict=True)]
        for end in (80, 120, len(products)):
            means = [f"{fmean(values[end - 20 : end]):.3g}" for values in (run["norm"], run["gamma"], products)]
            yield f"| {run['sigma_g']:.2f} | {end - 19} to {end} | {' | '.join(means)} |"
    yield (
        "\n‖∇f‖ and γ level off at the end, because the server's step is constant. If ‖∇f‖ went to zero, no constant\n"
        "would bound γ, unless all clients agreed at the minimum.\n"
    )
    yield _picture("gamma", "γ against the norm of the gradient: a hyperbola")


def _epsilon(found: dict[str, Any]) -> Iterator[str]:
    points = of(found, "epsilon")
    best = min(points, key=lambda p: p["average"])
    yield "### Two regimes of ε\n"
    yield (
        "With both rates fixed, the step grows as ε falls until v̂ leaves its floor; then ε no longer matters.\n"
        f"The best is ε = {best['eps']:g}, with {100 * best['off_floor']:.0f}% of coordinates off the floor.\n"
    )
    yield _picture("epsilon", "Average and share of coordinates off the floor against ε")


def _adaptivity(points: Sequence[Point]) -> Iterator[str]:
    yield "### Does leaving the floor help?\n"
    yield "#### Digits\n"
    yield (
        "The table shows FedAMS on the demo's digits with nine values of ε, and FedAvgM, which is FedAMS that\n"
        "never leaves its floor. Each uses the best of nine rates, chosen with seeds 11 and 12; the accuracies\n"
        "shown are those of seeds 1 to 3. There is no bias correction and no compression. *Accuracy* is that of\n"
        "the last models, as a mean over the last fifth of the rounds, with the lowest and the highest seed.\n"
    )
    yield "| ε | rate on the floor, lr/√ε | off the floor at the end | accuracy | averaged |"
    yield "|--:|--:|--:|--:|--:|"
    settings: dict[tuple[str, float], list[Point]] = {}
    for point in points:
        if point.seed in SHOWN:
            settings.setdefault((point.family, point.eps), []).append(point)
    for (family, eps), same in settings.items():
        name, off = f"{eps:g}", f"{100 * fmean(p.off_floor for p in same):.3g}%"
        name, off = ("FedAvgM", "") if family == "fedavgm" else (name, off)
        scores = [100 * p.accuracy for p in same]
        accuracy = f"{fmean(scores):.2f} ({min(scores):.2f} … {max(scores):.2f})"
        yield f"| {name} | {same[0].step:g} | {off} | {accuracy} | {100 * fmean(p.averaged for p in same):.2f} |"
    yield _best_epsilon(settings)
    yield _picture("adaptivity", "Accuracy by ε and rate, with the share of coordinates off the floor")


def _best_epsilon(settings: dict[tuple[str, float], list[Point]]) -> str:
    means = {key: fmean(p.accuracy for p in same) for key, same in settings.items()}
    best = max(means, key=lambda key: means[key])
    off = fmean(p.off_floor for p in settings[best])
    plain = {p.seed: p.accuracy for p in settings["fedavgm", 0.0]}
    gains = [100 * (p.accuracy - plain[p.seed]) for p in settings[best]]
    edge = " Its rate is the highest that was tried." if settings[best][0].step == max(STEPS) else ""
    return (
        f"\nThe best is ε = {best[1]:g}, with {100 * off:.0f}% of coordinates off the floor at the end.{edge}\n"
        f"The difference from FedAvgM with the same seeds is {fmean(gains):+.2f} points ({min(gains):+.2f} to "
        f"{max(gains):+.2f} by seed).\n"
    )


def _paper(seen: float | None) -> Iterator[str]:
    values = [bound(PAPER, PAPER_RUN).value for bound in (printed, sound)]
    yield "### The paper's own run\n"
    yield (
        f"For FedAMS on ResNet-18, the printed bound is {values[0]:.1e} and the proved one {values[1]:.1e}; the\n"
        f"trivial one is G² = {PAPER.G**2:.0f}. The constants were measured once, at the start, with batches of 20. L\n"
        "and G are lower bounds and σ_g is taken as 0, so with the true ones both would be larger still. The run\n"
        "violates the conditions of both by orders of magnitude, so the theorems say nothing about it.\n"
    )
    if seen is not None:
        yield f"The recorded updates of FedAMS put the mean of ‖∇f‖² at about {seen:.2g}.\n"
    yield _picture("terms", "Terms of both bounds for the paper's ResNet-18 run, on a logarithmic scale")
