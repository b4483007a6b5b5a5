"""The base class of control variates: a vector at the server and a row per client that correct gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedcams.compress import Compressor
from fedcams.compress.identity import IDENTITY
from fedcams.parts import Parts
from fedcams.registry import Spec, register
from fedcams.schedules import Constant  # noqa: F401  (registers what numbers may follow)

if TYPE_CHECKING:
    from torch import Tensor


class Control(Spec, ABC):
    """The base class of all control variates. State is data: the server's c `[d]` and a row c_i `[d]` per client.

    Both start at zero. In a round, a client receives c, adds `shift` to every gradient, and sends the `change` of its
    row, compressed by `codec`. Once the update is accepted, its row changes by exactly what the server decodes, and the
    server calls `step_`.

    Examples:
        >>> import fedcams, torch
        >>> fedcams.Method(control="scaffold").control.shift(torch.tensor([1.0]), torch.tensor([[0.25], [0.5]]))
        tensor([[0.7500],
                [0.5000]])
    """

    kind = "control"
    schedulable = True
    reference: ClassVar[str] = ""
    """The publication that describes it."""
    active: ClassVar[bool] = True
    """Whether anything is kept and sent."""

    @property
    def codec(self) -> Compressor:
        """The compressor by which the change of a row travels."""
        return IDENTITY

    def init(self, x: Tensor) -> Tensor:
        """Return the server's c before the first round, for a model `x [d]`: zeros."""
        return torch.zeros_like(x, requires_grad=False)

    @abstractmethod
    def shift(self, c: Tensor, rows: Tensor) -> Tensor:
        """Return what is added to every gradient `[C, d]`, given c `[d]` and the clients' rows c_i `[C, d]`."""

    @abstractmethod
    def change(self, c: Tensor, rows: Tensor, delta: Tensor, rate_sum: Tensor) -> Tensor:
        """Return the new c_i minus the old `[C, d]`, in new memory.

        `c [d]` is the server's, `rows [C, d]` the old c_i, `delta [C, d]` the updates as training left them, and
        `rate_sum [C]` the sums of the rates of their steps.
        """

    @abstractmethod
    def step_(self, c: Tensor, mean_change: Tensor, accepted: int, population: int) -> None:
        """Update c `[d]` in place with the uniform mean of the accepted clients' decoded changes.

        `accepted` of `population` clients took part; the population is 0 if it is not known.
        """

    def check(self, method: Parts) -> None:
        """Refuse a method that it does not work with; raises a SpecError that names both parts."""


@register("none")
@dataclass(frozen=True)
class NoControl(Control):
    """No control variates: gradients are unchanged, and nothing is kept or sent."""

    active = False
    examples = ("none",)
    refused = (("none(1)", "at most 0 values"),)

    def shift(self, c: Tensor, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows)

    def change(self, c: Tensor, rows: Tensor, delta: Tensor, rate_sum: Tensor) -> Tensor:
        return torch.zeros_like(rows)

    def step_(self, c: Tensor, mean_change: Tensor, accepted: int, population: int) -> None:
        return
