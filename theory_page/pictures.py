"""The pictures of docs/theory.md."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from fedcams.report.collection import COLOURS
from fedcams.report.figures import STYLE
from fedcams.theory import Constants, Setting, printed, sound
from fedcams.theory.rates import slope
from reproduction.pictures import DIGEST, drawn_from
from reproduction.runs import Results
from theory_page.adaptivity import EPS, SHOWN, STEPS, Point
from theory_page.off_floor import off_floor, off_floor_panels

NAMES = {"T": "rounds T", "K": "local steps K", "m": "clients m"}
AVERAGE = "mean ‖∇f‖²"
SINGLE = (5.2, 3.3)
SETTLED = 5
"""First rounds without residuals yet, in which γ is not what it becomes."""
PAPER = Constants(L=250, G=18.3, s_l=17.4, s_g=0.0, F=2.3, d=11_173_962)
"""Measured once at the start of the paper's ResNet-18 run, batches of 20; L and G are lower bounds."""
PAPER_RUN = Setting(m=100, n=10, K=60, T=500, eta=1.0, eta_l=0.01, eps=1e-3, beta1=0.9)


class Picture(NamedTuple):
    """What a picture shows, and how it is drawn."""

    shows: Any
    draw: Callable[[], Figure]

    @property
    def digest(self) -> str:
        """A hash of both, which the picture carries."""
        hashed = hashlib.sha256(repr((self.shows, COLOURS, STYLE)).encode())
        for path in (Path(__file__), Path(__file__).with_name("off_floor.py")):
            hashed.update(path.read_bytes())
        return hashed.hexdigest()


def pictures(found: dict[str, Any], points: Sequence[Point], results: Results) -> dict[str, Picture]:
    """Return all pictures by name."""
    quadratics: dict[str, Callable[[Any, dict[str, Any]], None]] = {
        "collapse": _collapse, "partial": _partial, "compression": _compression, "gamma": _gamma, "epsilon": _epsilon,
    }  # fmt: skip
    seen, panels = gradient(results), off_floor_panels(points, results)
    return {
        "rates": Picture(found, partial(_filled, (9.6, 3.0), _rates, found, panels=3)),
        **{name: Picture(found, partial(_filled, SINGLE, fill, found)) for name, fill in quadratics.items()},
        "terms": Picture(seen, partial(_filled, SINGLE, _terms, seen)),
        "adaptivity": Picture(points, partial(_filled, (6.4, 3.6), _adaptivity, points)),
        "off-floor": Picture(panels, partial(off_floor, panels)),
    }


def draw(found: dict[str, Any], points: Sequence[Point], results: Results, folder: Path) -> None:
    """Draw those pictures whose numbers, or the code that draws them, have changed."""
    for name, picture in pictures(found, points, results).items():
        path = folder / f"{name}.png"
        if drawn_from(path) != picture.digest:
            with mpl.rc_context(STYLE):
                picture.draw().savefig(path, metadata={"Software": None, DIGEST: picture.digest})


def _filled(size: tuple[float, float], fill: Callable[[Any, Any], None], shows: Any, panels: int = 1) -> Figure:
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    fill(axes if panels > 1 else axes[0], shows)
    return figure


def gradient(results: Results) -> float | None:
    """Return the mean of the estimates of ‖∇f‖² over the recorded runs of FedAMS on ResNet-18; None without any."""
    runs = [run for done in results.of("fig1-resnet18") if done.label == "FedAMS" for run in done.runs]
    known = [value for run in runs for value in run.recorded("gradient_sq") if value is not None]
    return fmean(known) if known else None


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


def _terms(axes: Any, seen: float | None) -> None:
    for place, bound in enumerate((printed(PAPER, PAPER_RUN), sound(PAPER, PAPER_RUN))):
        terms = {name: term for name, term in bound.terms.items() if term > 0}
        offsets = np.arange(len(terms)) + 0.2 * (2 * place - 1)
        axes.barh(offsets, list(terms.values()), 0.38, color=COLOURS[place], label=bound.version, left=1e-3)
        axes.set_yticks(np.arange(len(terms)), list(terms))
    axes.axvline(PAPER.G**2, color="#777777", ls="--", lw=0.8, label="trivial bound G²")
    if seen is not None:
        axes.axvline(seen, color="#777777", ls=":", lw=1.2, label="measured")
    axes.set(xscale="log", xlabel="terms of the bound, the paper's ResNet-18 run")
    axes.grid(visible=False, axis="y")
    axes.figure.legend(loc="outside lower center", ncols=4)
