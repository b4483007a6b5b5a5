"""The base class of transforms, which change updates, messages, arrivals or the mean, or refuse an arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from fedcams.errors import SpecError, UpdateError
from fedcams.keys import derive
from fedcams.layout import Layout
from fedcams.parts import Parts
from fedcams.registry import Spec
from fedcams.schedules import Constant  # noqa: F401  (registers what numbers may follow)

if TYPE_CHECKING:
    from torch import Tensor

POINTS = {"update": "update_", "message": "message_", "arrival": "arrival_", "guard": "refuses", "mean": "mean_"}
"""Where a transform can act -> the method that it overrides for that."""


@dataclass(frozen=True)
class Facts:
    """What is known about the clients in a call, in ascending id; each tuple has one entry per client."""

    round: int
    seed: int
    ids: tuple[int, ...]
    examples: tuple[int, ...]
    steps: tuple[int, ...]
    """The number of local steps of each; at the server, what the replies say."""
    weights: tuple[float, ...]
    """The weight of each in the mean, not normalised."""
    rate: float
    """The local learning rate of the round."""
    population: int = 0
    """The number of all clients; 0 if it is not known."""

    def __post_init__(self) -> None:
        """Refuse tuples of different lengths and ids that do not ascend."""
        lengths = {len(self.ids), len(self.examples), len(self.steps), len(self.weights)}
        if len(lengths) > 1 or any(b <= a for a, b in zip(self.ids, self.ids[1:], strict=False)):
            raise UpdateError(f"facts of ids={self.ids}; give ascending ids, and examples, steps and weights for each")

    def key(self, purpose: str, client: int) -> int:
        """Return a 64-bit key for one client's randomness in this round; another purpose gives an unrelated key."""
        return derive(self.seed, purpose, self.round, client)

    def take(self, places: Sequence[int]) -> Facts:
        """Return the facts of the clients at these places of the tuples, which must ascend."""
        ids, examples, steps = (tuple(known[i] for i in places) for known in (self.ids, self.examples, self.steps))
        weights = tuple(self.weights[i] for i in places)
        return replace(self, ids=ids, examples=examples, steps=steps, weights=weights)


class Transform(Spec):
    """The base class of all transforms. Override at least one of its methods; the others do nothing.

    What a client does (`update_`, `message_`) must not depend on the other rows: a federation has one row, a simulation
    the whole cohort. Compute norms of rows with `fedcams.bits.vectors.row_norms`, whose bits do not depend on the
    number of rows.

    Examples:
        >>> import fedcams, torch
        >>> from fedcams.transforms import Facts
        >>> rows = torch.tensor([[3.0, 4.0]])
        >>> facts = Facts(round=1, seed=1, ids=(0,), examples=(20,), steps=(3,), weights=(1.0,), rate=0.1)
        >>> fedcams.Method(transforms="clip(norm=1)").transforms[0].update_(rows, facts, fedcams.Layout.flat(2))
        >>> rows
        tensor([[0.6000, 0.8000]])
    """

    kind = "transform"
    schedulable = True
    reference: ClassVar[str] = ""
    """The publication that describes it."""
    reads_norm: ClassVar[bool] = False
    """Whether `refuses` reads the norm; norms are computed only if some transform does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.points:
            raise SpecError(f"{self.name} overrides none of {', '.join(POINTS.values())}, and would do nothing")

    def update_(self, rows: Tensor, facts: Facts, layout: Layout) -> None:
        """Change the updates Δ `[C, d]` in place, at the client."""

    def message_(self, rows: Tensor, facts: Facts, layout: Layout) -> None:
        """Change what is compressed, h = Δ + e `[C, d]`, in place, at the client."""

    def arrival_(self, rows: Tensor, facts: Facts, layout: Layout) -> None:
        """Change decoded rows `[C, d]` in place, at the server."""

    def refuses(self, norm: float, facts: Facts) -> str:
        """Return why the server must refuse one client's update, or an empty string.

        `norm` is that of its decoded row, or NaN if no transform `reads_norm`; `facts` are those of this client.
        """
        return ""

    def mean_(self, mean: Tensor, facts: Facts, layout: Layout) -> None:
        """Change the mean `[d]` of the accepted updates in place, at the server; `facts` are those of the accepted."""

    def check(self, method: Parts) -> None:
        """Refuse a method that it does not work with; raises a SpecError that names both parts."""

    @property
    def points(self) -> frozenset[str]:
        """Where it acts: a subset of `update`, `message`, `arrival`, `guard` and `mean`."""
        mine = (point for point, name in POINTS.items() if getattr(type(self), name) is not getattr(Transform, name))
        return frozenset(mine)
