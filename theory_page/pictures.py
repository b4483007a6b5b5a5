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
from reproduction.pictures import DIGEST, drawn_from
from reproduction.runs import Results
from theory_page.adaptivity import EPS, SHOWN, STEPS, Point
from theory_page.measured import Measurements
from theory_page.off_floor import off_floor, off_floor_panels
from theory_page.over_rounds import over_rounds, views
from theory_page.quadratic_pictures import SINGLE, quadratic_pictures

DRAWING = ("pictures.py", "quadratic_pictures.py", "off_floor.py", "over_rounds.py")
"""The files that draw."""
FEDAMS = ("FedAMS", "FedAMS without bias correction")
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
        for name in DRAWING:
            hashed.update(Path(__file__).with_name(name).read_bytes())
        return hashed.hexdigest()


def pictures(measured: Measurements) -> dict[str, Picture]:
    """Return all pictures by name."""
    points, results = measured.digits, measured.results
    seen, panels, recorded = gradient(results), off_floor_panels(points, results), views(results)
    quadratics = quadratic_pictures(measured.oracle, measured.package)
    return {
        **{name: Picture(*each) for name, each in quadratics.items()},
        "terms": Picture(seen, partial(_filled, SINGLE, _terms, seen)),
        "adaptivity": Picture(points, partial(_filled, (6.4, 3.6), _adaptivity, points)),
        "off-floor": Picture(panels, partial(off_floor, panels)),
        **({"over-rounds": Picture(recorded, partial(over_rounds, recorded))} if recorded else {}),
    }


def draw(measured: Measurements, folder: Path) -> None:
    """Draw those pictures whose numbers, or the code that draws them, have changed."""
    for name, picture in pictures(measured).items():
        path = folder / f"{name}.png"
        if drawn_from(path) != picture.digest:
            with mpl.rc_context(STYLE):
                picture.draw().savefig(path, metadata={"Software": None, DIGEST: picture.digest})


def _filled(size: tuple[float, float], fill: Callable[[Any, Any], None], shows: Any) -> Figure:
    figure = Figure(size, layout="constrained")
    fill(figure.subplots(), shows)
    return figure


def gradient(results: Results) -> float | None:
    """Return the mean of the estimates of ‖∇f‖² over the recorded runs of FedAMS on ResNet-18; None without any."""
    runs = [run for done in results.of("fig1-resnet18") if done.label in FEDAMS for run in done.runs]
    known = [value for run in runs for value in run.recorded("gradient_sq") if value is not None]
    return fmean(known) if known else None


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
