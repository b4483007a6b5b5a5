"""What all mechanisms with Gaussian noise share: a bound on norms, and the noise or the ε that it must keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fedcams.errors import SpecError
from fedcams.privacy.accountant import LEAST_NOISE, MOST_NOISE, noise_for
from fedcams.privacy.base import Participation, Privacy, PrivateParts, unsound_parts
from fedcams.registry import Number, number


@dataclass(frozen=True)
class GaussianNoise(Privacy):
    """The base class of mechanisms that clip to a norm and add Gaussian noise; give either `noise` or `epsilon`."""

    clip: Number = number(low=0, high=10**6, open="low", doc="largest norm of what a client contributes")
    noise: Number | None = number(
        None, low=LEAST_NOISE, high=MOST_NOISE, doc="standard deviation of the noise, in units of clip"
    )
    epsilon: Number | None = number(None, low=0, open="low", doc="what the whole run may spend; instead of noise")
    delta: Number = number(1e-5, low=0, high=1, open="both", doc="the δ at which epsilon is stated, below 1/clients")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.noise is None) == (self.epsilon is None):
            raise SpecError(f"privacy {self}: give either noise or epsilon")

    @property
    def depends_on_rounds(self) -> bool:
        return self.epsilon is not None

    def reasons(self, method: PrivateParts) -> Iterator[str]:
        """Yield what would invalidate the claim, why, and the fix."""
        yield from unsound_parts(method, "max_norm" if self.at_client else "clip")

    def multiplier(self, who: Participation) -> float:
        if self.noise is not None:
            return float(self.noise)
        if self.epsilon is None or who.rounds is None:
            raise SpecError(f"privacy={self} spreads epsilon over the run, whose length is unknown; give rounds=...")
        return noise_for(float(self.epsilon), who.p, who.rounds, float(self.delta))
