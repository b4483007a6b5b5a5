"""What a piece may ask of the method that it is a part of, to refuse what it does not fit to.

The method itself is made of pieces and stands above them, so they know it by these protocols alone.
"""

from __future__ import annotations

from typing import Protocol

from fedcams.compress import Compressor


class LocalRule(Protocol):
    """What clients do with the model, as other pieces see it."""

    @property
    def steps_are_rates(self) -> bool:
        """Whether an update is -Σ rate·gradient, as that of plain SGD is."""


class Parts(Protocol):
    """A method, as its pieces see it."""

    @property
    def local(self) -> LocalRule:
        """What clients do with the model."""

    @property
    def uplink(self) -> Compressor:
        """How updates travel."""

    @property
    def weighting(self) -> str:
        """What counts in the mean over the cohort: `uniform`, `examples` or `sampler`."""
