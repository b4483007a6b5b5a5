"""One look for each method, the same in every chart."""

from __future__ import annotations

from dataclasses import dataclass

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8250df")
"""Okabe and Ito's, which the colour-blind can tell apart, less the yellow and black that vanish on white or black;
and a violet that they can tell from these."""
DASHES = ("solid", "dash", "dot", "dashdot")
PATTERNS = ("", "/", "x", ".")


@dataclass(frozen=True)
class Look:
    """How a method is drawn: when the colours are used up, they come again with another dash and hatch."""

    colour: str
    dash: str
    pattern: str

    def faint(self, opacity: float) -> str:
        """The colour as CSS with transparency."""
        red, green, blue = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red},{green},{blue},{opacity})"


def look(index: int) -> Look:
    """The look of the method at a place in the collection."""
    turn = index // len(COLOURS) % len(DASHES)
    return Look(COLOURS[index % len(COLOURS)], DASHES[turn], PATTERNS[turn])
