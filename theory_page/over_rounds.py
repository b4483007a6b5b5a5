"""The picture of recorded CIFAR-10 runs over rounds: off the floor, rate, gradient and γ, next to FedAvgM twins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedcams.report.collection import COLOURS
from fedcams.runs import Run
from reproduction.pictures import AROUND, smooth
from reproduction.runs import Results

SMOOTHED = 2 * AROUND + 1
"""Rounds over which noisy numbers are averaged."""
TWIN = "FedAvgM"
RATE = ", rate 31.6"
"""What all labels of the last row have in common."""


@dataclass(frozen=True)
class Panel:
    """One number of the record and how it is drawn."""

    name: str
    title: str
    scale: str
    noisy: bool = False
    least: float = 0.0
    """Where a logarithmic scale turns linear, so that zero has a place."""


PANELS = (
    Panel("off_floor", "share off the floor", "symlog", least=1e-6),
    Panel("rate", "rate of the server", "linear"),
    Panel("gradient_sq", "estimate of ‖∇f‖²", "log", noisy=True),
    Panel("gamma", "γ", "linear", noisy=True),
)


@dataclass(frozen=True)
class Curve:
    """A run under its label; its twin has the same colour."""

    label: str
    colour: int
    numbers: dict[str, tuple[float, ...]]
    """By the name of a panel; only what was recorded."""


@dataclass(frozen=True)
class View:
    """A row of the picture: a model, and runs on it with the same seed."""

    title: str
    seed: int
    curves: tuple[Curve, ...]

    @property
    def rounds(self) -> int:
        """The rounds of the longest run."""
        return max(len(values) for curve in self.curves for values in curve.numbers.values())


Wanted = tuple[tuple[str, str, int], ...]
WANTED: dict[tuple[str, int], Wanted] = {
    ("ConvMixer-256-8, 500 rounds, settings of the paper", 1): (
        ("bytes-convmixer", "FedAMS", 0), ("fig1-convmixer", "FedAvgM, twin of FedAMS", 0),
        ("fig1-convmixer", "FedYogi", 1), ("fig1-convmixer", "FedAvgM, twin of FedYogi", 1),
        ("compression-convmixer", "FedCAMS sign", 2), ("compression-convmixer", "FedCAMS top-k 1/64", 3),
    ),
    ("ResNet-18, 500 rounds, settings of the paper", 1): (
        ("fig1-resnet18", "FedAMS without bias correction", 4), ("fig1-resnet18", "FedAvgM, twin of FedAMS", 0),
        ("fig1-resnet18", "FedYogi", 1), ("fig1-resnet18", "FedAvgM, twin of FedYogi", 1),
        ("compression-resnet18", "FedCAMS sign", 2), ("compression-resnet18", "FedCAMS top-k 1/64", 3),
    ),
    ("ResNet-18, 60 rounds, FedAMS with the same lr/√ε and smaller ε", 11): (
        ("adaptivity-resnet18", "FedAvgM, rate 31.6", 0), ("adaptivity-resnet18", "eps=1e-7, rate 31.6", 5),
        ("adaptivity-resnet18", "eps=1e-8, rate 31.6", 6), ("adaptivity-resnet18", "eps=1e-9, rate 31.6", 7),
    ),
}  # fmt: skip
"""For the title and the seed of each row: presets, labels and colours."""


def views(results: Results) -> list[View]:
    """Return the rows whose runs are there and recorded something."""
    found = [View(title, seed, tuple(_curves(results, seed, wanted))) for (title, seed), wanted in WANTED.items()]
    return [view for view in found if view.curves]


def _curves(results: Results, seed: int, wanted: Wanted) -> Iterator[Curve]:
    for preset, label, colour in wanted:
        for done in results.of(preset):
            for run in done.runs:
                if done.label == label and run.experiment.seed == seed and (numbers := _numbers(run)):
                    yield Curve(label.removesuffix(RATE).replace("eps=", "FedAMS, ε = "), colour, numbers)


def _numbers(run: Run) -> dict[str, tuple[float, ...]]:
    found = {panel.name: run.column(panel.name) for panel in PANELS}
    # FedAvgM's momentum is a sum, that of the others a mean
    found["rate"] = found["rate"] / (1 - float(getattr(run.experiment.server, "momentum", 0)))
    return {name: tuple(each.tolist()) for name, each in found.items() if np.isfinite(each).all()}


# -- the picture -------------------------------------------------------------------------------------------------------


def over_rounds(shown: Sequence[View]) -> Figure:
    """Return a figure with a row for every view; a row has a legend of its own."""
    figure = Figure((9.6, 2.9 * max(1, len(shown))), layout="constrained")
    for part, view in zip(figure.subfigures(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        part.suptitle(view.title)
        panels = [panel for panel in PANELS if any(panel.name in curve.numbers for curve in view.curves)]
        for axes, panel in zip(part.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _panel(axes, panel, view.curves)
        known = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in part.axes)
        entries = {name: line for each in known for line, name in each}
        part.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=min(len(entries), 4))
    return figure


def _panel(axes: Any, panel: Panel, curves: Sequence[Curve]) -> None:
    for curve in curves:
        if panel.name in curve.numbers:
            values = np.array(curve.numbers[panel.name])
            rounds = np.arange(1.0, len(values) + 1)
            style = {"ls": "--" if curve.label.startswith(TWIN) else "-", "lw": 1.3, "color": COLOURS[curve.colour]}
            axes.plot(rounds, smooth(values, rounds) if panel.noisy else values, label=curve.label, **style)
    axes.set_title(panel.title, fontsize=9)
    axes.set_xlabel("rounds")
    axes.set_yscale(panel.scale, **({"linthresh": panel.least} if panel.least else {}))
    if panel.least:
        axes.set_ylim(-panel.least / 2, 1.5)
    if panel.scale == "linear":
        axes.set_ylim(bottom=0)
