"""The base class of privacy mechanisms, and what they must know about a method and a run."""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Iterator, Mapping, Sequence
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

MIXES = {"arrival", "mean"}
"""The points at which a transform may mix the rows of several clients."""
Spent = Mapping[str, Mapping[int, float]]
"""What a mechanism counts -> client -> how much of it so far; the state from which ε is computed."""


class PrivateParts(Parts, Protocol):
    """The parts of a method that decide what it reveals about clients."""

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
    """Who may take part in a run: each of `clients` with probability p in each round, independently and in secret.

    With noise at the client, p is 1: nothing is claimed for those who are not drawn.
    """

    p: float
    clients: int
    rounds: int | None
    """The length of the run; None if it is not known."""


class Privacy(Spec, ABC):
    """The base class of all privacy mechanisms. Unless it is `active`, nothing is clipped, drawn or accounted.

    Examples:
        >>> import fedcams
        >>> from fedcams.sampler import sampler
        >>> privacy = fedcams.Method(privacy="server(clip=1, epsilon=8)", guard="none").privacy
        >>> round(privacy.multiplier(privacy.participation(sampler("bernoulli(p=0.1)"), 1000, 100)), 2)
        0.99
    """

    kind = "privacy"
    reference: ClassVar[str] = ""
    """The publication that describes it."""
    active: ClassVar[bool] = True
    """Whether updates are clipped and get noise, and ε is accounted."""
    at_client: ClassVar[bool] = False
    """Whether clients add the noise themselves, and tell the server nothing about their training but the result."""

    @property
    def depends_on_rounds(self) -> bool:
        """Whether the noise depends on the length of the run."""
        return False

    def check(self, method: PrivateParts) -> None:
        """Refuse a method for which the claim would not hold; raises a SpecError that names both parts."""
        if reason := next(self.reasons(method), ""):
            raise SpecError(f"{self.kind}={self} and {reason}")

    def reasons(self, method: PrivateParts) -> Iterator[str]:
        """Yield what in a method would invalidate the claim, why, and the fix."""
        yield from ()

    def participation(self, sampler: Sampler | None, clients: int, rounds: int | None) -> Participation:
        """Return who may take part; refuses a sampler or a number of clients for which the claim would not hold."""
        raise SpecError(f"{self.kind}={self} has no claim")

    def multiplier(self, who: Participation) -> float:
        """Return the standard deviation of the noise in units of the clipping bound; refuses what no noise meets."""
        raise SpecError(f"{self.kind}={self} adds no noise")

    # -- at the client -----------------------------------------------------------------------------------------------

    def perturb_(self, rows: Tensor, keys: Sequence[str], round: int, who: Participation) -> None:
        """Clip the updates Δ `[C, d]` and add noise in place, each row from its own key; only if `at_client`."""

    def clip_(self, rows: Tensor) -> None:
        """Shorten what clients compress, h = Δ + e `[C, d]`, in place, each row separately."""

    # -- at the server -----------------------------------------------------------------------------------------------

    def clipped_sum(self, layout: Layout, in_order: bool) -> ClippedSum | None:
        """Return an empty sum for the decoded rows of a round; None if they are combined as without privacy."""
        return None

    def noisy_mean(self, total: ClippedSum, who: Participation, key: str, round: int) -> Tensor:
        """Return the mean `[d]`, float32 on the CPU: the sum with noise, divided by the expected size of the cohort."""
        raise SpecError(f"{self.kind}={self} adds no noise")

    # -- what it costs -----------------------------------------------------------------------------------------------

    def observe(self, spent: Spent, asked: Collection[int], added: int) -> Spent:
        """Return the state after a round in which these clients were asked and `added` updates made the step."""
        return spent

    def epsilon_after(self, rounds: int, who: Participation, spent: Spent, method: PrivateParts) -> dict[str, float]:
        """Return what this many rounds of a run have spent, by the names of records."""
        return {}


def unsound_parts(method: PrivateParts, bound: str) -> Iterator[str]:
    """Yield the parts of a method that no claim on a mean of bounded rows covers, why, and the fix.

    `bound` names the setting that bounds arriving rows in place of the guard.
    """
    if method.guard.active:
        yield f"guard={method.guard}: refusals depend on other clients; set guard=none; {bound} is the bound instead"
    if not method.aggregate.streaming:
        yield f"aggregate={method.aggregate}: one client may change it by more than clip; set aggregate=mean"
    if method.weighting != "uniform":
        yield f"weighting={method.weighting}: a client may count for more than others; set weighting=uniform"
    if method.control.active:
        yield f"control={method.control}: control variates travel without noise; set control=none"
    if mixing := [str(transform) for transform in method.transforms if transform.points & MIXES]:
        yield f"transforms={mixing[0]}: it may mix updates at the server, where no bound covers it; leave it out"


def check_delta(privacy: Privacy, delta: float, clients: int) -> None:
    """Refuse an unknown number of clients, and a δ that is too large for it."""
    if not clients:
        raise SpecError(f"privacy={privacy} divides by a fixed number of clients, which is unknown; give clients=...")
    if delta * clients >= 1:
        raise SpecError(
            f"privacy={privacy} with {clients} clients: a delta of 1/clients lets the run reveal one of them "
            f"completely; give a delta well below {1 / clients:.2g}"
        )


@register("none")
@dataclass(frozen=True)
class NoPrivacy(Privacy):
    """No differential privacy: models may reveal what their clients trained on."""

    active = False
    examples = ("none",)
    refused = (("none(1)", "at most 0 values"),)
