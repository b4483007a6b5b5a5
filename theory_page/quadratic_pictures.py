"""The pictures of the rate experiment and of the other runs on quadratics: seeds as small dots behind their means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from fedcams.report.collection import COLOURS
from theory_page import grid
from theory_page.experiments import Package
from theory_page.grid import Fit, Found, Row
from theory_page.quadratics import DENSE, SAME, bound_of, excesses, package_slopes, ratios

NAMES = {"T": "rounds T", "K": "local steps K", "m": "clients m"}
AVERAGE = "mean ‖∇f‖²"
GREY = "#777777"
SINGLE, PAIR, TALL = (5.2, 3.3), (8.2, 3.4), (9.6, 6.0)
SETTLED = 5
"""First rounds without residuals yet, in which γ is not what it becomes."""
Points = Sequence[Sequence[float]]
"""A number for each seed, at each place."""


def quadratic_pictures(found: Found, package: Package) -> dict[str, tuple[Any, Callable[[], Figure]]]:
    """Return for each picture by name what it shows, and how it is drawn."""
    both = (found, package)
    return {
        "rates": (both, lambda: _drawn(TALL, 2, 3, _rates, *both)),
        "collapse": (found, lambda: _drawn(SINGLE, 1, 1, _collapse, found)),
        "partial": (found, lambda: _drawn(SINGLE, 1, 1, _partial, found)),
        "compression": (found, lambda: _drawn(PAIR, 1, 2, _compression, found)),
        "gamma": (package.gamma, lambda: _drawn(SINGLE, 1, 1, _gamma, package)),
        "epsilon": (found, lambda: _drawn(PAIR, 1, 2, _epsilon, found)),
    }


def _drawn(size: tuple[float, float], rows: int, columns: int, fill: Callable[..., None], *shows: Any) -> Figure:
    figure = Figure(size, layout="constrained")
    fill(figure.subplots(rows, columns, squeeze=False).ravel(), *shows)
    return figure


def _logs(axes: Any, xlabel: str, ylabel: str = AVERAGE) -> None:
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_minor_formatter(NullFormatter())


def _seeds(axes: Any, x: Sequence[float], y: Points, colour: str, label: str, style: str = "o-") -> None:
    """Draw the seeds as small dots, and a line through their means."""
    places = [place for place, seeds in zip(x, y, strict=True) for _ in seeds]
    axes.plot(places, [value for seeds in y for value in seeds], ".", ms=5, alpha=0.45, mew=0, color=colour)
    axes.plot(x, list(map(fmean, y)), style, ms=3.5, lw=1.0, mfc="none", color=colour, label=label)


def _half(axes: Any, x: Sequence[float], y: Sequence[float], label: str = "slope -1/2") -> None:
    """Draw the line of slope -1/2 that lies closest to the points."""
    ends = np.array([min(x), max(x)], float)
    level = np.exp(np.mean(np.log(np.array(y) * np.sqrt(x))))
    axes.plot(ends, level / np.sqrt(ends), "--", lw=1.0, color=GREY, label=label, zorder=1)


# -- slopes ------------------------------------------------------------------------------------------------------------


def _of(found: Found, row: Row, axis: str, late: bool = False) -> Points:
    return [[each.late if late else each.average for each in found[case]] for case in row.cases(axis)]


def _fitted(fit: Fit) -> str:
    return f"{fit.mean:.3f} ± {fit.deviation:.3f}"


def _rates(panels: Sequence[Any], found: Found, package: Package) -> None:
    """Draw the oracle's own problem above, and the package next to the oracle on a common problem below."""
    for axes, axis in zip(panels[:3], NAMES, strict=True):
        row = grid.ROWS[0]
        x, y = row.axes[axis], _of(found, row, axis)
        _seeds(axes, x, y, COLOURS[0], f"oracle: {_fitted(grid.fit(found, row, axis))}", "-")
        _half(axes, x, list(map(fmean, y)))
        axes.plot(x, [bound_of(case).value for case in row.cases(axis)], "-", color=COLOURS[1], label="proved bound")
        _logs(axes, NAMES[axis])
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.45)  # room for the legend
        axes.legend(loc="upper right")
    for axes, axis in zip(panels[3:], NAMES, strict=True):
        _levelled(axes, axis, found, package)


def _levelled(axes: Any, axis: str, found: Found, package: Package) -> None:
    """Draw averages times √x, so that the slope -1/2 is a level and single seeds can be told apart."""
    x, ours = SAME.axes[axis], [each for name, each in package.rates if name == axis]
    both = {
        f"oracle: {_fitted(grid.fit(found, SAME, axis))}": _of(found, SAME, axis),
        f"package: {_fitted(package_slopes(package)[axis])}": [
            [each.average for each in ours if getattr(each.trial, axis) == value] for value in x
        ],
    }
    for (name, y), colour, style in zip(both.items(), (COLOURS[0], COLOURS[2]), ("o-", "s:"), strict=True):
        levels = [[value * value_x**0.5 for value in seeds] for value_x, seeds in zip(x, y, strict=True)]
        whole = fmean(map(fmean, levels))
        _seeds(axes, x, [[level / whole for level in seeds] for seeds in levels], colour, name, style)
    axes.axhline(1, ls="--", lw=1.0, color=GREY, label="slope -1/2", zorder=1)
    axes.set(xscale="log", ylim=(0.93, 1.13), xlabel=f"{NAMES[axis]}, the package's problem")
    axes.set_ylabel(f"{AVERAGE} · √{axis}, relative")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="upper center")


def _collapse(panels: Sequence[Any], found: Found) -> None:
    (axes,) = panels
    row, every = grid.ROWS[0], list[tuple[int, float]]()
    for place, axis in enumerate(row.axes):
        products, seeds = [case.T * case.K * case.m for case in row.cases(axis)], _of(found, row, axis)
        _seeds(axes, products, seeds, COLOURS[place], f"{axis} varies", "o")
        every += list(zip(products, map(fmean, seeds), strict=True))
    x, y = zip(*every, strict=True)
    _half(axes, x, y)
    _logs(axes, "T K m")
    axes.legend()


def _partial(panels: Sequence[Any], found: Found) -> None:
    (axes,) = panels
    names = ("η ~ √(Kn), as in the corollary", "η ~ √n")
    for place, (row, name) in enumerate(zip(grid.STEP_RULES, names, strict=True)):
        fit = grid.fit(found, row, "K", late=True)
        label = f"{name}: slope {fit.mean:+.2f} ± {fit.deviation:.2f}"
        _seeds(axes, row.axes["K"], _of(found, row, "K", late=True), COLOURS[place], label)
    _logs(axes, f"local steps K, {row.base.n} of {row.base.m} clients", f"{AVERAGE}, second half")
    axes.legend()


# -- compression, γ and ε ----------------------------------------------------------------------------------------------


def _compression(panels: Sequence[Any], found: Found) -> None:
    """Draw what compression costs, and the excess of what stays above 1 on logarithmic axes."""
    plain, logarithmic = panels
    for place, uplink in enumerate(each for each in grid.COMPRESSORS if each != "identity"):
        each = ratios(found, grid.compressed(uplink), DENSE)
        _seeds(plain, grid.LENGTHS, each, COLOURS[place], uplink)
        if excess := excesses(each):
            _seeds(logarithmic, grid.LENGTHS, excess, COLOURS[place], uplink)
            _half(logarithmic, grid.LENGTHS, list(map(fmean, excess)), "slope -1/2" if place == 0 else "_")
    plain.axhline(1, color=GREY, lw=0.8)
    plain.set(xscale="log", xlabel="rounds T", ylabel=f"{AVERAGE} over no compression")
    plain.xaxis.set_minor_formatter(NullFormatter())
    plain.legend()
    _logs(logarithmic, "rounds T", "excess over no compression")
    logarithmic.legend()


def _gamma(panels: Sequence[Any], package: Package) -> None:
    (axes,) = panels
    for place, run in enumerate(package.gamma):
        norms, gammas = np.array(run["norm"])[SETTLED:], np.array(run["gamma"])[SETTLED:]
        axes.plot(norms, gammas, ".", ms=2.5, color=COLOURS[place], label=f"σ_g = {run['sigma_g']:.2f}")
        level = np.median(norms * gammas)
        axes.plot(norms, level / norms, "--", lw=0.8, color=COLOURS[place], label=f"{level:.2f}/‖∇f‖")
    _logs(axes, "‖∇f‖", "γ of the round")
    axes.legend()


def _epsilon(panels: Sequence[Any], found: Found) -> None:
    """Draw averages on the left and shares on the right."""
    averages, shares = panels
    for place, travel in enumerate(grid.TRAVELS):
        runs = [found[case] for case in grid.floors(travel)]
        label = f"η_l K = {travel:g}"
        _seeds(averages, grid.FLOORS, [[m.average for m in each] for each in runs], COLOURS[place], label)
        _seeds(shares, grid.FLOORS, [[m.off_floor for m in each] for each in runs], COLOURS[place], label)
    _logs(averages, "ε, both rates fixed")
    averages.legend()
    shares.set(xscale="log", xlabel="ε, both rates fixed", ylabel="share of coordinates off the floor")
    shares.yaxis.set_major_formatter(ScalarFormatter())
    shares.legend()
