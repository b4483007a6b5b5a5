"""The numbers of docs/theory.md: this writes the block between its two marks from the measurements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedcams.theory import printed, sound
from reproduction.runs import Results
from theory_page import quadratics, recorded
from theory_page.adaptivity import SHOWN, STEPS, Point
from theory_page.experiments import DOCS
from theory_page.markdown import paragraph, picture, table
from theory_page.measured import Measurements
from theory_page.over_rounds import SMOOTHED, views
from theory_page.pictures import PAPER, PAPER_RUN, draw, gradient

BLOCK = re.compile(r"(?<=<!-- measured, by make theory -->\n).*(?=<!-- end -->)", re.DOTALL)

OFF_FLOOR = """\
![Accuracy against the share of coordinates off the floor](theory/off-floor.png)

*Bars and bands show the range from the lowest seed to the highest, where there are several.*
"""


def write(measured: Measurements) -> None:
    """Draw the pictures and write the numbers."""
    draw(measured, DOCS / "theory")
    path = DOCS / "theory.md"
    path.write_text(BLOCK.sub(lambda _: block(measured), path.read_text("utf-8")), "utf-8")


def block(measured: Measurements) -> str:
    """Return the part of the page that shows measurements."""
    digits, results = measured.digits, measured.results
    adaptive = [*_adaptivity(digits), *recorded.sections(results), OFF_FLOOR, *_over_rounds(results)]
    parts = [*quadratics.sections(measured), *adaptive, *_paper(gradient(results)), *_made(measured.made)]
    return "\n".join(parts)


def _adaptivity(points: Sequence[Point]) -> Iterator[str]:
    yield "### Does leaving the floor help?\n"
    yield "#### Digits\n"
    yield (
        "The table shows FedAMS on the demo's digits with nine values of ε, and FedAvgM, which is FedAMS that\n"
        "never leaves its floor. Each uses the best of nine rates, chosen with seeds 11 and 12; the accuracies\n"
        "shown are those of seeds 1 to 3. There is no bias correction and no compression. *Accuracy* is the mean over\n"
        "the last fifth of the rounds, followed by the lowest and the highest seed. *Averaged* is the accuracy of the\n"
        "averaged model at the end.\n"
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
    yield picture("adaptivity", "Accuracy by ε and rate, with the share of coordinates off the floor")


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


def _over_rounds(results: Results) -> Iterator[str]:
    """Yield the picture of recorded runs over rounds."""
    shown = views(results)
    if not shown:
        return
    seeds = ", ".join(f"{view.seed} for {view.title.partition(',')[0]} ({view.rounds} rounds)" for view in shown)
    yield "### Recorded runs, round by round\n"
    yield paragraph(
        "The picture shows the share of coordinates off the floor, the rate at which the server follows its momentum,",
        "an estimate of ‖∇f‖² from the cohort's updates (too low where clients travel far), and γ. FedAvgM's momentum",
        "is a sum and that of the others a mean, so FedAvgM's rates are multiplied by 1/(1 - β1). FedAvgM is dashed,",
        "in the colour of its method.",
    )
    yield picture("over-rounds", "Off the floor, rate, gradient and γ of recorded runs against rounds")
    yield paragraph(f"*Seeds: {seeds}. The estimates of ‖∇f‖² and γ are means over {SMOOTHED} rounds.*")
    yield paragraph(
        "With the paper's settings, no coordinate ever leaves the floor, and a method and its twin have the same rate",
        "and similar gradients. With ε = 1e-7 and below, v̂ leaves its floor and the rate falls below that of FedAvgM.",
        "γ grows in all runs shown here.",
    )


def _made(made: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield where the numbers come from."""
    keys = ("runs", "seconds", "cpu_seconds")
    lines = [[f"[`{file}`](theory/{file})", *(str(about[key]) for key in keys)] for file, about in made.items()]
    yield "### Where these numbers come from\n"
    yield table(["file", "runs", "seconds", "CPU seconds"], lines)
    yield paragraph(
        f"The numbers were computed on {'; '.join(dict.fromkeys(map(_origin, made.values())))}.",
        "*Seconds* include waiting for other programs on the machine; *CPU seconds* do not, and are the sum over",
        "all processes. The runs on CIFAR-10 and on Shakespeare's plays are in `results/`, each with its own",
        "`environment.json`.",
    )


def _origin(about: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {about[name.lower()]}" for name in ("Python", "NumPy", "torch", "fedcams"))
    return f"{about['cpu']} with {about['cores']} cores, in {about['processes']} processes, with {versions}"


def _paper(seen: float | None) -> Iterator[str]:
    values = [bound(PAPER, PAPER_RUN).value for bound in (printed, sound)]
    yield "### The paper's own run\n"
    yield (
        f"For FedAMS on ResNet-18, the printed bound is {values[0]:.1e} and the proved one {values[1]:.1e}; the\n"
        f"trivial one is G² = {PAPER.G**2:.0f}. The constants were measured once, at the start, with batches of 20. L\n"
        "and G are lower bounds and σ_g is set to 0, so both bounds would be larger still with the true constants.\n"
        "The run violates the conditions of both bounds by orders of magnitude, so the theorems say nothing about it.\n"
    )
    if seen is not None:
        yield (
            f"The recorded updates of FedAMS put the mean of ‖∇f‖² at about {seen:.2g}, which is too low where\n"
            "clients travel far.\n"
        )
    yield picture("terms", "Terms of both bounds for the paper's ResNet-18 run, on a logarithmic scale")
