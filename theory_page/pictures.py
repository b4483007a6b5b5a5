"""The pictures of docs/theory.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from fedcams.report.collection import COLOURS
from fedcams.report.figures import STYLE
from fedcams.theory import Constants, Setting, printed, sound
from fedcams.theory.rates import slope
from reproduction.runs import Results
from theory_page.adaptivity import EPS, SHOWN, STEPS, Point
from theory_page.off_floor import off_floor

NAMES = {"T": "rounds T", "K": "local steps K", "m": "clients m"}
AVERAGE = "mean ‖∇f‖²"
SETTLED = 5
"""First rounds without residuals yet, in which γ is not what it becomes."""
PAPER = Constants(L=250, G=18.3, s_l=17.4, s_g=0.0, F=2.3, d=11_173_962)
"""Measured once at the start of the paper's ResNet-18 run, batches of 20; L and G are lower bounds."""
PAPER_RUN = Setting(m=100, n=10, K=60, T=500, eta=1.0, eta_l=0.01, eps=1e-3, beta1=0.9)


def draw(found: dict[str, Any], points: Sequence[Point], results: Results, folder: Path) -> None:
    """Draw all pictures from what was measured."""
    pictures: dict[str, tuple[int, Callable[[Any, dict[str, Any]], None]]] = {
        "rates": (3, _rates), "collapse": (1, _collapse), "partial": (1, _partial), "compression": (1, _compression),
        "gamma": (1, _gamma), "epsilon": (1, _epsilon), "terms": (1, _terms),
    }  # fmt: skip
    with mpl.rc_context(STYLE):
        for name, (panels, fill) in pictures.items():
            figure = Figure((9.6, 3.0) if panels > 1 else (5.2, 3.3), layout="constrained")
            axes = figure.subplots(1, panels, squeeze=False)[0]
            fill(axes if panels > 1 else axes[0], found)
            figure.savefig(folder / f"{name}.png", metadata={"Software": None})
        figure = Figure((6.4, 3.6), layout="constrained")
        _adaptivity(figure.subplots(), points)
        figure.savefig(folder / "adaptivity.png", metadata={"Software": None})
        off_floor(points, results).savefig(folder / "off-floor.png", metadata={"Software": None})


def of(found: dict[str, Any], name: str, **chosen: Any) -> list[dict[str, Any]]:
    """Return the points of a picture, or those with these values."""
    return [p for p in found["points"] if p["of"] == name and all(p.get(k) == v for k, v in chosen.items())]


def _logs(axes: Any, xlabel: str, ylabel: str = AVERAGE) -> None:
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_minor_formatter(NullFormatter())


def _rates(panels: Any, found: dict[str, Any]) -> None:
    for axes, (axis, name) in zip(panels, NAMES.items(), strict=True):
        points = of(found, f"rates {axis}")
        x, y = (np.array([p[key] for p in points], float) for key in (axis, "average"))
        fit = slope(x.tolist(), y.tolist())
        axes.plot(x, y, "o", ms=3.5, color=COLOURS[0], label=f"measured, slope {fit:.3f}")
        line = np.unique(x)
        axes.plot(
            line, np.exp(np.mean(np.log(y * np.sqrt(x)))) / np.sqrt(line), "--", color="#777777", label="slope -1/2"
        )
        bounds = {p[axis]: p["bound"] for p in points}
        axes.plot(list(bounds), list(bounds.values()), "-", color=COLOURS[1], label="proved bound")
        _logs(axes, name)
        axes.legend()


def _collapse(axes: Any, found: dict[str, Any]) -> None:
    for place, axis in enumerate(NAMES):
        points = of(found, f"rates {axis}")
        axes.plot([p["T"] * p["K"] * p["m"] for p in points], [p["average"] for p in points], "o", ms=3.5,
                  color=COLOURS[place], label=f"{axis} varies")  # fmt: skip
    _logs(axes, "T K m")
    axes.legend()


def _partial(axes: Any, found: dict[str, Any]) -> None:
    for place, (by_steps, name) in enumerate({True: "η ~ √(Kn), as in the corollary", False: "η ~ √n"}.items()):
        points = of(found, "partial", by_steps=by_steps)
        x, y = [p["K"] for p in points], [p["late"] for p in points]
        axes.plot(x, y, "o-", color=COLOURS[place], label=f"{name}: slope {slope(x, y):+.2f}")
    _logs(axes, "local steps K, 4 of 32 clients", f"{AVERAGE}, second half")
    axes.legend()


def _compression(axes: Any, found: dict[str, Any]) -> None:
    dense = {p["T"]: p["average"] for p in of(found, "compression", uplink="identity")}
    others = dict.fromkeys(p["uplink"] for p in of(found, "compression") if p["uplink"] != "identity")
    for place, uplink in enumerate(others):
        points = of(found, "compression", uplink=uplink)
        x, y = [p["T"] for p in points], [p["average"] / dense[p["T"]] - 1 for p in points]
        axes.plot(x, y, "o-", color=COLOURS[place], label=uplink)
    axes.axhline(0, color="#777777", lw=0.8)
    axes.set(xscale="log", xlabel="rounds T", ylabel="excess over no compression")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend()


def _gamma(axes: Any, found: dict[str, Any]) -> None:
    for place, run in enumerate(found["gamma"]):
        norms, gammas = np.array(run["norm"])[SETTLED:], np.array(run["gamma"])[SETTLED:]
        axes.plot(norms, gammas, ".", ms=2.5, color=COLOURS[place], label=f"σ_g = {run['sigma_g']:.2f}")
        level = np.median(norms * gammas)
        axes.plot(norms, level / norms, "--", lw=0.8, color=COLOURS[place], label=f"{level:.2f}/‖∇f‖")
    _logs(axes, "‖∇f‖", "γ of the round")
    axes.legend()


def _epsilon(axes: Any, found: dict[str, Any]) -> None:
    points = of(found, "epsilon")
    x = [p["eps"] for p in points]
    axes.plot(x, [p["average"] for p in points], "o-", color=COLOURS[0], label=AVERAGE)
    _logs(axes, "ε, both rates fixed")
    share = axes.twinx()
    share.plot(x, [p["off_floor"] for p in points], "s--", color=COLOURS[1], label="off the floor")
    share.set(ylabel="share of coordinates off the floor", ylim=(-0.03, 1.03))
    share.grid(visible=False)
    axes.figure.legend(loc="outside upper center", ncols=2)


def _adaptivity(axes: Any, points: Sequence[Point]) -> None:
    """Draw a line for every rate, over ε; marks are filled where v̂ has left its floor."""
    tried = [p for p in points if p.seed not in SHOWN]
    for place, step in enumerate(STEPS):
        line = [
            (eps, fmean(p.accuracy for p in same), fmean(p.off_floor for p in same))
            for eps in EPS
            if (same := [p for p in tried if (p.family, p.eps, p.step) == ("fedams", eps, step)])
        ]
        x, y, off = zip(*line, strict=True)
        colour = COLOURS[place % len(COLOURS)]
        style = "-" if place < len(COLOURS) else "--"
        axes.plot(x, y, style, lw=1.2, color=colour, label=f"{step:g}")
        axes.scatter(x, y, s=22, edgecolors=colour, facecolors=[to_rgba(colour, share**0.5) for share in off], zorder=3)
        (twin,) = {fmean(p.accuracy for p in tried if (p.family, p.step) == ("fedavgm", step))}
        axes.plot([3 * max(EPS)], [twin], ">", ms=5, color=colour)
    axes.set(xscale="log", xlabel="ε; marks fill as coordinates leave the floor; ▶ FedAvgM", ylabel="test accuracy")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(title="lr/√ε", loc="center left", bbox_to_anchor=(1, 0.5))


def _terms(axes: Any, found: dict[str, Any]) -> None:
    for place, bound in enumerate((printed(PAPER, PAPER_RUN), sound(PAPER, PAPER_RUN))):
        terms = {name: term for name, term in bound.terms.items() if term > 0}
        offsets = np.arange(len(terms)) + 0.2 * (2 * place - 1)
        axes.barh(offsets, list(terms.values()), 0.38, color=COLOURS[place], label=bound.version, left=1e-3)
        axes.set_yticks(np.arange(len(terms)), list(terms))
    axes.axvline(PAPER.G**2, color="#777777", ls="--", lw=0.8, label="trivial bound G²")
    axes.set(xscale="log", xlabel="terms of the bound, the paper's ResNet-18 run")
    axes.grid(visible=False, axis="y")
    axes.legend(loc="lower right")
