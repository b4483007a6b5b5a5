"""What a control is: a vector at the server and a row at every client that correct the clients' gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcams.compress import Compressor
from fedcams.compress.identity import IDENTITY
from fedcams.parts import Parts
from fedcams.registry import Spec, register
from fedcams.schedules import Constant  # noqa: F401  (registers what numbers may follow)


class Control(Spec, ABC):
    """The root of all controls. State is data: the server's c `[d]` and a row c_i `[d]` of every client, zero at first.

    In a round a client gets c, adds `shift` to every gradient, and sends the `change` of its row through `codec`. Its
    row advances by exactly what the server decodes, once the update was accepted; the server then takes a `step_`.
    """

    kind = "control"
    schedulable = True
    reference: ClassVar[str] = ""
    """Where it was published."""
    active: ClassVar[bool] = True
    """Whether anything is kept and sent at all."""

    @property
    def codec(self) -> Compressor:
        """How the change of a row travels."""
        return IDENTITY

    def init(self, x: Tensor) -> Tensor:
        """The server's c before the first round, for a model `x [d]`: zero."""
        return torch.zeros_like(x, requires_grad=False)

    @abstractmethod
    def shift(self, c: Tensor, rows: Tensor) -> Tensor:
        """What is added to every gradient `[C, d]`, for c `[d]` and the clients' rows c_i `[C, d]`."""

    @abstractmethod
    def change(self, c: Tensor, rows: Tensor, delta: Tensor, rate_sum: Tensor) -> Tensor:
        """The new c_i minus the old `[C, d]`, in new memory.

        `delta [C, d]` are the updates as training left them, `rate_sum [C]` the sums of the rates of their steps.
        """

    @abstractmethod
    def step_(self, c: Tensor, mean_change: Tensor, accepted: int, population: int) -> None:
        """Advances c `[d]` by the uniform mean of the accepted clients' decoded changes, in place.

        `accepted` clients of `population` took part; a population that is not known is 0.
        """

    def check(self, method: Parts) -> None:
        """Refuses a method with which it does not work, by a SpecError that names both parts."""


@register("none")
@dataclass(frozen=True)
class NoControl(Control):
    """No control: gradients stay as they are, and nothing is kept or sent."""

    active = False
    examples = ("none",)
    refused = (("none(1)", "at most 0 values"),)

    def shift(self, c: Tensor, rows: Tensor) -> Tensor:
        return torch.zeros_like(rows)

    def change(self, c: Tensor, rows: Tensor, delta: Tensor, rate_sum: Tensor) -> Tensor:
        return torch.zeros_like(rows)

    def step_(self, c: Tensor, mean_change: Tensor, accepted: int, population: int) -> None:
        return
