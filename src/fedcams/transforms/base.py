"""What a transform is: it changes updates, messages, arrivals or the mean, or refuses an arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedcams.errors import UpdateError
from fedcams.keys import derive
from fedcams.layout import Layout
from fedcams.parts import Parts
from fedcams.registry import Spec
from fedcams.schedules import Constant  # noqa: F401  (registers what numbers may follow)

POINTS = {"update": "update_", "message": "message_", "arrival": "arrival_", "guard": "refuses", "mean": "mean_"}
"""Where a transform may act -> the method that it overrides for that."""


@dataclass(frozen=True)
class Facts:
    """What is known of the clients that a call is about, in ascending id; a tuple has one entry for each of them."""

    round: int
    seed: int
    ids: tuple[int, ...]
    examples: tuple[int, ...]
    steps: tuple[int, ...]
    """How many local steps each took; at the server, what their replies say."""
    weights: tuple[float, ...]
    """What each counts in the mean, not normalised."""
    rate: float
    """The local learning rate of the round."""
    population: int = 0
    """How many clients there are; 0: not known."""

    def __post_init__(self) -> None:
        """Refuses tuples of different lengths and ids that do not ascend."""
        lengths = {len(self.ids), len(self.examples), len(self.steps), len(self.weights)}
        if len(lengths) > 1 or any(b <= a for a, b in zip(self.ids, self.ids[1:], strict=False)):
            raise UpdateError(f"facts of ids={self.ids}; give ascending ids, and examples, steps and weights for each")

    def key(self, purpose: str, client: int) -> int:
        """A 64-bit key for one client's randomness in this round; another purpose gives an unrelated key."""
        return derive(self.seed, purpose, self.round, client)

    def take(self, places: Sequence[int]) -> Facts:
        """The facts of the clients at these places of the tuples, which must ascend."""
        ids, examples, steps = (tuple(known[i] for i in places) for known in (self.ids, self.examples, self.steps))
        weights = tuple(self.weights[i] for i in places)
        return replace(self, ids=ids, examples=examples, steps=steps, weights=weights)


class Transform(Spec):
    """The root of all transforms. Override one or more of the methods below; the others do nothing.

    What a client does (`update_`, `message_`) must not depend on the other rows: in a federation there is one row, in
    a simulation the whole cohort. Take norms of rows by `fedcams.bits.vectors.row_norms`, whose bits do not depend on
    the number of rows.
    """

    kind = "transform"
    schedulable = True
    reference: ClassVar[str] = ""
    """Where it was published."""
    reads_norm: ClassVar[bool] = False
    """Whether `refuses` looks at the norm; without one that does, norms need not be taken."""

    def update_(self, rows: Tensor, facts: Facts, layout: Layout) -> None:
        """Changes the updates Δ `[C, d]` on the client, in place."""

    def message_(self, rows: Tensor, facts: Facts, layout: Layout) -> None:
        """Changes what is compressed, h = Δ + e `[C, d]`, on the client, in place."""

    def arrival_(self, rows: Tensor, facts: Facts, layout: Layout) -> None:
        """Changes decoded rows `[C, d]` at the server, in place."""

    def refuses(self, norm: float, facts: Facts) -> str:
        """Why the server must not take one client's update, or an empty text.

        `norm` is that of its decoded row, or NaN if nothing that guards `reads_norm`; `facts` are those of this client.
        """
        return ""

    def mean_(self, mean: Tensor, facts: Facts, layout: Layout) -> None:
        """Changes the mean `[d]` of the accepted updates at the server, in place; `facts` are those of the accepted."""

    def check(self, method: Parts) -> None:
        """Refuses a method with which it does not work, by a SpecError that names both parts."""

    @property
    def points(self) -> frozenset[str]:
        """Where it acts, of `update`, `message`, `arrival`, `guard` and `mean`."""
        mine = (point for point, name in POINTS.items() if getattr(type(self), name) is not getattr(Transform, name))
        return frozenset(mine)
