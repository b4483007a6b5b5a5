"""What a piece can ask about the method that it belongs to, so that it can refuse what it does not work with.

The method is made of pieces and imports them, so they know it only by these protocols.
"""

from __future__ import annotations

from typing import Protocol

from fedcams.compress import Compressor
from fedcams.optimizers import ServerOptimizer


class LocalRule(Protocol):
    """The local rule, as other pieces see it."""

    @property
    def steps_are_rates(self) -> bool:
        """Whether an update is -Σ rate·gradient, as it is for SGD without momentum."""


class Parts(Protocol):
    """A method, as its pieces see it."""

    @property
    def local(self) -> LocalRule:
        """What clients do with the model."""

    @property
    def server(self) -> ServerOptimizer:
        """What the server does with the mean update."""

    @property
    def uplink(self) -> Compressor:
        """The compressor of updates."""

    @property
    def weighting(self) -> str:
        """What weights clients in the mean: `uniform`, `examples` or `sampler`."""
