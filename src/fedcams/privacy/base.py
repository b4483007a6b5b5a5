"""The base class of privacy mechanisms, and what they must know about a method and a run."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from fedcams.aggregates import Aggregate
from fedcams.control import Control
from fedcams.downlink import Downlink
from fedcams.errors import SpecError
from fedcams.guards import Guard
from fedcams.layout import Layout
from fedcams.parts import Parts
from fedcams.privacy.sums import ClippedSum
from fedcams.registry import Spec, register
from fedcams.sampler import Sampler
from fedcams.transforms import Transform

if TYPE_CHECKING:
    from torch import Tensor


class PrivateParts(Parts, Protocol):
    """A method, as far as what it reveals about clients depends on it."""

    @property
    def aggregate(self) -> Aggregate:
        """How the server combines updates."""

    @property
    def control(self) -> Control:
        """The control variates."""

    @property
    def downlink(self) -> Downlink:
        """How the model travels to the clients."""

    @property
    def guard(self) -> Guard:
        """What refuses long rows."""

    @property
    def min_replies(self) -> int:
        """How many accepted updates a step needs."""

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """What changes updates on their way."""


@dataclass(frozen=True)
class Participation:
    """Who may take part in a run: each of `clients` with probability p in each round, independently and in secret."""

    p: float
    clients: int
    rounds: int | None
    """The length of the run; None if it is not known."""


class Privacy(Spec, ABC):
    """The base class of all privacy mechanisms. Unless it is `active`, nothing is clipped, drawn or accounted."""

    kind = "privacy"
    reference: ClassVar[str] = ""
    """The publication that describes it."""
    active: ClassVar[bool] = True
    """Whether updates are clipped, the mean gets noise, and ε is accounted."""

    @property
    def depends_on_rounds(self) -> bool:
        """Whether the noise depends on the length of the run."""
        return False

    def check(self, method: PrivateParts) -> None:
        """Refuse a method for which the claim would not hold; raises a SpecError that names both parts."""

    def participation(self, sampler: Sampler | None, clients: int, rounds: int | None) -> Participation:
        """Return who may take part; refuses a sampler or a number of clients for which the claim would not hold."""
        raise SpecError(f"{self.kind}={self} draws no secret cohorts")

    def clip_(self, rows: Tensor) -> None:
        """Shorten what clients compress, h = Δ + e `[C, d]`, in place, each row for itself."""

    def clipped_sum(self, layout: Layout, in_order: bool) -> ClippedSum:
        """Return an empty sum for the decoded rows of a round."""
        raise SpecError(f"{self.kind}={self} clips no rows")

    def noisy_mean(self, total: ClippedSum, who: Participation, key: str, round: int) -> Tensor:
        """Return the mean `[d]`, float32 on the CPU: the sum with noise, divided by the expected size of the cohort."""
        raise SpecError(f"{self.kind}={self} adds no noise")

    def epsilon_after(self, rounds: int, who: Participation) -> float:
        """Return the ε that so many rounds of a run have spent."""
        raise SpecError(f"{self.kind}={self} spends no epsilon")


@register("none")
@dataclass(frozen=True)
class NoPrivacy(Privacy):
    """No differential privacy: models may reveal what their clients trained on."""

    active = False
    examples = ("none",)
    refused = (("none(1)", "at most 0 values"),)
