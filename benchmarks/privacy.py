"""Accuracy against ε: the table and the picture of docs/privacy.md, from runs of the preset `private-digits`.

    fedcams run private-digits --out runs/private-digits
    python benchmarks/privacy.py runs/private-digits

Keys of noise come from the operating system, so numbers differ a little whenever the runs are made again.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator, PercentFormatter

from fedcams.privacy.server_noise import ServerNoise
from fedcams.report.collection import COLOURS, Method, collect
from fedcams.report.figures import STYLE

OUT = Path(__file__).parents[1] / "docs" / "privacy"
KEYS = ("fedcams", "torch", "device", "cpu")


class Row(NamedTuple):
    """A method at one ε: the accuracy of its averaged models after the last round, over seeds."""

    method: str
    uplink: str
    epsilon: str
    """The target ε; `none` without privacy."""
    spent: str
    """What the records say was spent."""
    noise: str
    """The standard deviation on the sum in units of clip."""
    mean: float
    low: float
    high: float
    bytes_up: float
    """Per client that took part."""


def main() -> None:
    found = collect([Path(sys.argv[1])])
    rows = [row_of(method) for method in found.methods]
    OUT.mkdir(exist_ok=True)
    with (OUT / "accuracy.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([Row._fields, *rows])
    (OUT / "accuracy.md").write_text(table(rows), "utf-8")
    environment = {key: found.runs[0].environment[key] for key in KEYS}
    (OUT / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")
    draw(rows)


def row_of(method: Method) -> Row:
    """Return the numbers of one method, whose runs differ in their seeds."""
    experiment = method.experiment
    label, asked = (
        experiment.label.partition(", ε")[0].removeprefix("DP-"),
        getattr(experiment.privacy, "epsilon", None),
    )
    spent, noise = "", ""
    if isinstance(experiment.privacy, ServerNoise):
        who = experiment.privacy.participation(experiment.sampler, experiment.clients, experiment.rounds)
        spent = f"{max(run.records[-1].probes['epsilon'] or 0 for run in method.runs):.3f}"
        noise = f"{experiment.privacy.multiplier(who):.3f}"
    scores = [run.records[-1].averaged_accuracy or 0.0 for run in method.runs]
    records = [record for run in method.runs for record in run.records]
    up = sum(record.wire_up for record in records) / sum(len(record.cohort) for record in records)
    epsilon = "none" if asked is None else f"{float(asked):g}"
    return Row(label, str(experiment.uplink), epsilon, spent, noise, fmean(scores), min(scores), max(scores), round(up))


def table(rows: Iterable[Row]) -> str:
    """Return one line per method and one column per ε, in percent."""
    rows = list(rows)
    columns = list(dict.fromkeys(row.epsilon for row in rows))
    noise = {row.epsilon: row.noise or "0" for row in rows}
    heads = [f"ε = {each}" if each != "none" else "no privacy" for each in columns]
    lines = [["method", "bytes up", *heads], ["noise / clip", "", *(noise[each] for each in columns)]]
    for method in dict.fromkeys(row.method for row in rows):
        mine = {row.epsilon: row for row in rows if row.method == method}
        cells = [f"{100 * mine[each].mean:.1f}" for each in columns]
        lines.append([method, f"{fmean(row.bytes_up for row in mine.values()):.0f}", *cells])
    text = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([text[0], "|---|--:|" + "--:|" * len(columns), *text[1:]]) + "\n"


def draw(rows: list[Row]) -> None:
    """Draw accuracy against ε, with the range over seeds, and without privacy as a dotted line."""
    with mpl.rc_context(STYLE):
        figure = Figure((5.6, 3.6), layout="constrained")
        axes = figure.subplots()
        for colour, method in zip(COLOURS, dict.fromkeys(row.method for row in rows), strict=False):
            mine = [row for row in rows if row.method == method and row.epsilon != "none"]
            spent, means = [float(row.spent) for row in mine], [row.mean for row in mine]
            ends = [[row.mean - row.low for row in mine], [row.high - row.mean for row in mine]]
            axes.errorbar(spent, means, ends, label=method, color=colour, marker="o", ms=4, lw=1.5, capsize=2)
            for row in rows:
                if row.method == method and row.epsilon == "none":
                    axes.axhline(row.mean, color=colour, ls=":", lw=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks([float(row.epsilon) for row in rows[:4]], [row.epsilon for row in rows[:4]])
        axes.yaxis.set_major_locator(MultipleLocator(0.05))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set(xlabel="ε at δ = 1e-5, one client added or removed", ylabel="test accuracy of the averaged model")
        axes.legend(loc="lower right")
        figure.savefig(OUT / "accuracy.png", dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
