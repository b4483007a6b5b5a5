"""A history in a notebook: its last rounds as a table, and its numbers as curves."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from fedcams.errors import SpecError
from fedcams.extras import load
from fedcams.registry.fields import nearest
from fedcams.simulation import RoundRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = ("round", "train_loss", "test_loss", "test_accuracy", "wire_up", "wire_down")
ROWS = 8
"""How many rounds the table shows."""


def html_table(records: Sequence[RoundRecord], rounds: int) -> str:
    """Return the last rounds of a run of `rounds` rounds as an HTML table."""
    said = f"<p>{len(records)} of {rounds} rounds</p>"
    if not records:
        return said
    head = "".join(f"<th>{name}</th>" for name in SHOWN)
    lines = ("".join(f"<td>{escape(_cell(record.get(name)))}</td>" for name in SHOWN) for record in records[-ROWS:])
    return f"{said}<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def plot_records(records: Sequence[RoundRecord], names: Sequence[str]) -> Figure:
    """Return a figure with one panel for each name; without names, the training loss and the test score.

    Refuses names that no record has, and records that hold nothing to draw.
    """
    pyplot = load("matplotlib.pyplot", what="History.plot", extra="report")
    known = {name for record in records for name, value in record.to_dict().items() if isinstance(value, int | float)}
    chosen = names or [name for name in ("train_loss", "test_accuracy") if name in known]
    for name in chosen:
        if name not in known:
            raise SpecError(f"no record has a number {name!r}{nearest(name, known)}; known: {', '.join(sorted(known))}")
    if not chosen:
        raise SpecError("there is nothing to draw yet; call history.run() first")
    figure, panels = pyplot.subplots(1, len(chosen), figsize=(4.5 * len(chosen), 3), squeeze=False, layout="tight")
    for panel, name in zip(panels[0], chosen, strict=True):
        points = [(record.round, value) for record in records if (value := record.get(name)) is not None]
        panel.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else "")
        panel.set(xlabel="round", ylabel=name.replace("_", " "))
    if "inline" in pyplot.get_backend():  # a notebook shows what a cell returns, and shows open figures a second time
        pyplot.close(figure)
    drawn: Figure = figure
    return drawn
