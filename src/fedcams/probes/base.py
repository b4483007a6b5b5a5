"""The base class of probes, which compute named numbers from what a round leaves behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from fedcams.guards import Norms
from fedcams.layout import Layout
from fedcams.optimizers import State
from fedcams.parts import Parts
from fedcams.registry import Spec
from fedcams.transforms.base import Facts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Leftovers:
    """What a round leaves behind. Probes only read it; what no probe needs may be missing."""

    method: Parts
    """The method of this round, without schedules."""
    layout: Layout
    facts: Facts
    """The facts of the accepted clients, with the round and the seed."""
    mean: Tensor
    """`[d]`, the mean of the decoded updates after the transforms of the mean."""
    decoded: Callable[[], Tensor]
    """Returns the decoded rows `[C, d]` of the accepted clients."""
    error: Tensor | None = None
    """`[C]`, the relative compression errors ‖C(h)-h‖/‖h‖ of the accepted clients."""
    mean_h: Tensor | None = None
    """`[d]`, the mean of what the accepted clients compressed, h = Δ + e."""
    mean_delta_norm: float = 0.0
    """The norm of the mean of their updates Δ."""
    gram: Tensor | None = None
    """`[C, C]`, float64, the inner products of the accepted clients' updates Δ as they were trained."""
    residual: Tensor | None = None
    """`[C, d]`, what accepted clients keep for later, e; None without error feedback."""
    state: State | None = None
    """The state of the server's optimizer after the step."""
    step_norm: float | None = None
    """The length ‖x' - x‖ of the server's step."""
    norms: Norms = field(default_factory=dict)
    """Client -> stream -> the norm of its decoded row; empty unless the guard or a transform reads them."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Stream -> the largest norm that the guard accepts."""


class Probe(Spec, ABC):
    """The base class of all probes. A subclass writes `measure`, and says what it `needs`.

    Examples:
        >>> import fedcams.probes
        >>> from fedcams.registry import resolve_several
        >>> [probe.name for probe in resolve_several("probe", "q + gamma")]
        ['q', 'gamma']
    """

    kind = "probe"
    reference: ClassVar[str] = ""
    """The publication that describes it."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """What a round must keep for the probe: a subset of `error`, `mean_h` (with the mean update's norm), `gram` and
    `step` (its length). Decoded rows are there for all probes."""

    @abstractmethod
    def measure(self, left: Leftovers) -> dict[str, float]:
        """Return the numbers of a round with at least one accepted client, by their keys in the record."""


def mean_before(delta: Tensor, residual: Tensor | None, weights: Sequence[float]) -> tuple[Tensor, float]:
    """Return the mean of h = Δ + e before compression, and the norm of the mean of Δ.

    Arguments:
        delta: the updates Δ `[C, d]`.
        residual: the residuals e `[C, d]`; None if clients keep none.
        weights: one per client.

    Returns:
        The weighted mean of h `[d]`, and the norm of the weighted mean of Δ.

    Examples:
        >>> import torch
        >>> from fedcams.probes import mean_before
        >>> mean_before(torch.tensor([[3.0, 0.0], [3.0, 8.0]]), None, [1.0, 1.0])
        (tensor([3., 4.]), 5.0)
    """
    parts = torch.tensor(weights, dtype=delta.dtype, device=delta.device) / sum(weights)
    mean = parts @ delta
    kept = 0.0 if residual is None else parts @ residual.to(delta.device)
    return mean + kept, float(mean.norm())
