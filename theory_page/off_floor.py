"""The picture of accuracy against the share of coordinates off the floor: digits, and the recorded studies."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedcams.report.collection import COLOURS
from reproduction.runs import Results
from theory_page.adaptivity import SHOWN, Point
from theory_page.recorded import STUDIES, Row, best_rates, rows


def off_floor_panels(points: Sequence[Point], results: Results) -> dict[str, list[Row]]:
    """Return the settings of each panel by its title: digits, and every study with at least two ε."""
    panels = {"Digits, 60 rounds": _digits(points)}
    return panels | {study.title: found for study in STUDIES if _several(found := rows(results, study))}


def off_floor(panels: dict[str, list[Row]]) -> Figure:
    """Return a figure with these panels."""
    figure = Figure((max(5.2, 3.4 * len(panels)), 3.5), layout="constrained")
    for axes, (title, found) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _panel(axes, title, found)
    figure.axes[0].set_ylabel("test accuracy")
    entries = {
        name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=3)
    return figure


def _several(found: Sequence[Row]) -> bool:
    return len({row.eps for row in found if row.eps is not None}) > 1


def _digits(points: Sequence[Point]) -> list[Row]:
    """Return the settings that the page shows, as rows."""
    settings: dict[tuple[str, float, float], list[Point]] = {}
    for point in points:
        if point.seed in SHOWN:
            settings.setdefault((point.family, point.eps, point.step), []).append(point)
    return [
        Row(
            eps=eps if family == "fedams" else None,
            rate=step,
            accuracies=tuple(100 * p.accuracy for p in same),
            averaged=None,
            off_floor=fmean(p.off_floor for p in same),
            seeds=SHOWN,
        )
        for (family, eps, step), same in settings.items()
    ]


def _panel(axes: Any, title: str, found: list[Row]) -> None:
    """Draw a line through the best rate of each ε with bars over seeds, the other rates, and FedAvgM as a level."""
    best = best_rates(found)
    plain = max((row for row in found if row.eps is None), key=lambda row: row.accuracy)
    axes.axhline(plain.accuracy / 100, color="#777777", ls="--", lw=1, label="FedAvgM, best rate")
    axes.axhspan(min(plain.accuracies) / 100, max(plain.accuracies) / 100, color="#777777", alpha=0.12, lw=0)
    line = sorted((row for row in best if row.eps is not None), key=lambda row: row.off_floor)
    heights = [row.accuracy / 100 for row in line]
    bars = [[abs(row.accuracy - end(row.accuracies)) / 100 for row in line] for end in (min, max)]
    style = {"fmt": "o-", "ms": 4, "capsize": 3, "elinewidth": 0.8, "color": COLOURS[0]}
    axes.errorbar([row.off_floor for row in line], heights, bars, label="FedAMS, best rate for each ε", **style)
    rest = [(row.off_floor, row.accuracy / 100) for row in found if row.eps is not None and row not in best]
    if rest:
        axes.plot(*zip(*rest, strict=True), "o", ms=4, mfc="none", color=COLOURS[0], label="FedAMS, other rates")
    axes.set(title=title, xlabel="coordinates off the floor at the end", xlim=(-0.04, 1.04))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
    axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))  # not 0.25, which one decimal would round
    low = max(min(min(row.accuracies) for row in found), max(row.accuracy for row in best) - 15) / 100
    axes.set_ylim(bottom=low - 0.005)
