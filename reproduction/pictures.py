"""The pictures of docs/reproduction.md. A picture is drawn again only if its runs or this file have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter
from PIL import Image

from fedcams.report.collection import COLOURS
from fedcams.report.figures import LINES, MARKERS, STYLE
from fedcams.report.series import (
    ACCURACY,
    AVERAGED,
    BYTES,
    BYTES_UP,
    GAMMA,
    HELD,
    ROUNDS,
    TRAIN_LOSS,
    Array,
    Axis,
    Metric,
    height,
    track,
)
from fedcams.runs.folder import ROUNDS as RECORDS
from reproduction.runs import LAST, Done, collection, looks

AROUND = 5
"""Curves are means over this many rounds on each side; single rounds are drawn faintly behind them."""
WIDE, SINGLE = (9.6, 3.3), (4.8, 3.3)
DIGEST = "fedcams:input"

Draw = Callable[[Any, list[Done]], None]
Panel = tuple[Draw, list[Done]]


def digest(panels: list[Panel]) -> str:
    """Return a hash of everything that a picture shows and of how it is drawn."""
    hashed = hashlib.sha256(Path(__file__).read_bytes())
    for _, runs in panels:
        for done, look in zip(runs, looks(runs), strict=True):
            hashed.update(f"{done.label} {look}".encode())
            for run in done.runs:
                hashed.update((run.path / RECORDS).read_bytes())
    return hashed.hexdigest()


def is_current(path: Path, panels: list[Panel]) -> bool:
    """Return whether the picture exists and shows these runs."""
    return drawn_from(path) == digest(panels)


def drawn_from(path: Path) -> str | None:
    """Return the hash of what a picture shows, or None if there is no picture."""
    if not path.exists():
        return None
    with Image.open(path) as image:
        found: str | None = image.info.get(DIGEST)
        return found


def picture(path: Path, panels: list[Panel]) -> None:
    """Draw panels side by side with one legend below them, unless the picture is current."""
    if is_current(path, panels):
        return
    with mpl.rc_context(STYLE):
        figure = Figure(WIDE if len(panels) > 1 else SINGLE, layout="constrained")
        for axes, (draw, runs) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            draw(axes, runs)
        _level(figure)
        _legend(figure)
        figure.savefig(path, bbox_inches="tight", metadata={"Software": None, DIGEST: digest(panels)})


def _level(figure: Figure) -> None:
    """Panels with the same quantity get the same height, so that they can be compared."""
    if len({axes.get_ylabel() for axes in figure.axes}) == 1:
        lows, highs = zip(*(axes.get_ylim() for axes in figure.axes), strict=True)
        for axes in figure.axes:
            axes.set_ylim(min(lows), max(highs))


def _legend(figure: Figure) -> None:
    """Every method once, below all panels."""
    entries = {
        name: handle for axes in figure.axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    longest = max(map(len, entries))
    columns = min(len(entries), 2 if len(figure.axes) == 1 else 3 if longest > 26 else 5)
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns)


def curves(metric: Metric, axis: Axis, title: str = "") -> Draw:
    """Return a function that draws a metric along an axis, smoothed, with every round behind it.

    Where a method was run with several seeds, these are means, in a band from the lowest to the highest.
    """

    def draw(axes: Any, runs: list[Done]) -> None:
        shown = [track(method).curve(metric) for method in collection(runs).methods]
        for done, line, look in zip(runs, shown, looks(runs), strict=True):
            axes.plot(line.x[axis.key], line.mean, color=look.colour, lw=0.6, alpha=0.25)
            rounds = line.x[ROUNDS.key]
            if line.seeds > 1:
                band = smooth(line.low, rounds), smooth(line.high, rounds)
                axes.fill_between(line.x[axis.key], *band, color=look.colour, alpha=0.15, lw=0)
            style = {"color": look.colour, "ls": LINES[look.dash], "lw": 1.5}
            axes.plot(line.x[axis.key], smooth(line.mean, rounds), label=done.label, **style)
        if axis.log:
            _bytes(axes)
            axes.set_xlim(left=min(line.x[axis.key][len(line.mean) // 25] for line in shown))
        if metric in (ACCURACY, AVERAGED):
            _percent(axes)
        axes.set(
            xlabel=axis.title,
            ylabel=metric.title,
            title=title,
            ylim=height(shown) if metric in (ACCURACY, AVERAGED) else None,
        )

    return draw


accuracy_by_rounds = curves(ACCURACY, ROUNDS)
accuracy_by_bytes_up = curves(ACCURACY, BYTES_UP)
loss_by_rounds = curves(TRAIN_LOSS, ROUNDS)
averaged_by_rounds = curves(AVERAGED, ROUNDS)
averaged_by_bytes = curves(AVERAGED, BYTES)


def gamma_by_rounds(title: str) -> Draw:
    """Return a function that draws γ over rounds, from zero."""
    plain = curves(GAMMA, ROUNDS, title)

    def draw(axes: Any, runs: list[Done]) -> None:
        plain(axes, runs)
        axes.set_ylim(bottom=0)

    return draw


def accuracy_by_bytes(axes: Any, runs: list[Done]) -> None:
    """Draw accuracy along all bytes with a mark at the end, hollow for what clients hold, if it was measured."""
    curves(ACCURACY, BYTES)(axes, runs)
    methods = collection(runs).methods
    for method, look in zip(methods, looks(runs), strict=True):
        for metric, face in ((ACCURACY, look.colour), (HELD, "white")):
            if line := track(method).curve(metric):
                style = {"color": look.colour, "ls": LINES[look.dash] if metric == ACCURACY else "-", "lw": 1.5}
                name = method.label + ("" if metric == ACCURACY else ", held by clients")
                mark = {"marker": MARKERS[look.dash], "markevery": [-1], "markerfacecolor": face, "ms": 7}
                axes.plot(line.x[BYTES.key], smooth(line.mean, line.x[ROUNDS.key]), label=name, **style, **mark)
    axes.set_ylim(height([track(method).curve(ACCURACY) for method in methods], start=0.5))


def tradeoff(axes: Any, runs: list[Done]) -> None:
    """Draw accuracy against all bytes: one mark per method, and a hollow one for what clients hold."""
    for done, look in zip(runs, looks(runs), strict=True):
        style = {"ls": "", "marker": MARKERS[look.dash], "ms": 8, "color": look.colour}
        axes.plot([done.total], [done.accuracy / 100], label=done.label, **style)
        _bars(axes, [done.total], [done], look.colour)
        if done.held is not None:
            hollow = {"markerfacecolor": "white", "label": f"{done.label}, held by clients"}
            axes.plot([done.total], [done.held / 100], **style, **hollow)
    _bytes(axes, subs=(1, 2, 5))
    axes.margins(0.12, 0.2)
    _percent(axes, decimals=1)
    axes.set(xlabel=BYTES.title, ylabel=f"Test accuracy, last {LAST} rounds")


def against_paper(published: dict[str, str], rules: dict[str, str], shared: str) -> Draw:
    """Return a function that draws our accuracies next to the paper's, by label.

    `rules` has one line of ours for each ending of a label, with its name; the label `shared` belongs to all of them.
    """

    def draw(axes: Any, runs: list[Done]) -> None:
        ours = {done.label: done for done in runs}
        shown = [label for label in published if any(label + ending in ours for ending in rules)]
        axes.plot(shown, [float(published[label]) / 100 for label in shown], "s--", color="#777777", label="paper")
        for place, (ending, name) in enumerate(rules.items()):
            named = {label: label if label == shared else label + ending for label in shown}
            line = {label: ours[each] for label, each in named.items() if each in ours}
            if line.keys() - {shared}:
                heights = [done.accuracy / 100 for done in line.values()]
                axes.plot(list(line), heights, "o-", color=COLOURS[place], label=f"fedcams, {name}")
                _bars(axes, list(line), list(line.values()), COLOURS[place])
        _percent(axes, decimals=1)
        axes.set(ylabel=f"Test accuracy, last {LAST} rounds")

    return draw


def _bars(axes: Any, x: list[Any], shown: list[Done], colour: str) -> None:
    """Draw a bar from the lowest to the highest seed of every method that has several."""
    for place, done in zip(x, shown, strict=True):
        if len(done.runs) > 1:
            ends = [[abs(end(done.accuracies) - done.accuracy) / 100] for end in (min, max)]
            axes.errorbar([place], [done.accuracy / 100], ends, fmt="none", ecolor=colour, elinewidth=1, capsize=6)


def smooth(values: Array, rounds: Array) -> Array:
    """Return the mean of each value and of those of its neighbouring rounds, `[T]`; the ends have fewer of them."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    starts, ends = np.searchsorted(rounds, rounds - AROUND), np.searchsorted(rounds, rounds + AROUND, side="right")
    mean: Array = (sums[ends] - sums[starts]) / (ends - starts)
    return mean


def _percent(axes: Any, decimals: int = 0) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=decimals))


def _bytes(axes: Any, subs: tuple[int, ...] = (1,)) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=subs))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
