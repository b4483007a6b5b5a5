"""What a server optimizer is: a formula on vectors `[d]`, written once and run over pieces that stay in the cache."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fedcams.errors import LayoutError
from fedcams.registry import Number, Spec, flag, number
from fedcams.schedules import Constant  # noqa: F401  (registers what numbers may follow)

PIECE = {"cpu": 2**18, "cuda": 2**22}
"""Elements of a piece, by device. A formula is a handful of operations; over whole vectors each of them waits for
memory, over pieces only the first one does, and no temporary is ever larger than a piece. On a GPU the formulas that
come with fedcams take one fused kernel instead; for others pieces are longer there, since launches cost more."""


class State(Protocol):
    """What an optimizer remembers: a NamedTuple of the number `t` of steps taken, then vectors `[d]`."""

    @property
    def t(self) -> int:
        """The number of steps taken."""

    def _asdict(self) -> dict[str, Any]: ...


class Moments(NamedTuple):
    """The first and the second moment."""

    t: int
    m: Tensor
    v: Tensor


class MaxMoments(NamedTuple):
    """The two moments and the largest second moment so far."""

    t: int
    m: Tensor
    v: Tensor
    vhat: Tensor


class ServerOptimizer(Spec, ABC):
    """The root of all server optimizers. Subclasses name their state and write `update_`."""

    kind = "server"
    schedulable = True
    reference: ClassVar[str] = ""
    """Where it was published."""
    state_type: ClassVar[type[Any]]
    """The NamedTuple that it remembers; `state_type(**saved)` brings back what `state._asdict()` gave."""

    def init(self, x: Tensor) -> State:
        """The state before the first step on `x [d]`: no step taken, every vector zero."""
        _check(x, {})
        _, *names = self.state_type._fields
        state: State = self.state_type(0, *(torch.zeros_like(x, requires_grad=False) for _ in names))
        return state

    @torch.no_grad()
    def step(self, state: State, x: Tensor, delta: Tensor) -> tuple[Tensor, State]:
        """One step on `x [d]` with the mean update `delta [d]`; overwrites `x` and the state, only reads `delta`."""
        vectors = state._asdict()
        if (*vectors,) != self.state_type._fields:
            needed = ", ".join(self.state_type._fields)
            raise LayoutError(f"the state holds {', '.join(vectors)}; {self.name} needs {needed}: start with its init")
        t = vectors.pop("t") + 1
        _check(x, {"delta": delta, **vectors})
        if not _step_fused_(self, t, x, delta, vectors):
            length = PIECE.get(x.device.type, PIECE["cuda"])
            whole = (x, delta, *vectors.values())
            parts = [whole] if x.numel() <= length else zip(*(vector.split(length) for vector in whole), strict=True)
            for pieces in parts:
                self.update_(t, *pieces)
        return x, self.state_type(t, **vectors)

    @abstractmethod
    def update_(self, t: int, x: Tensor, delta: Tensor, *args: Any, **kwargs: Any) -> None:
        """The formula of step t = 1, 2, ..., in place on a piece of `x` and of the state's vectors, in their order.

        Write `β m + (1-β) Δ` as `m.lerp_(Δ, 1-β)`: its weights sum to one even where float32 rounds β, which leaves a
        third of the error in `v` after 200 steps. Keep one temporary at a time: after two, glibc returns the memory to
        the system, and page faults at every piece make the step twice as long.
        """


def _step_fused_(optimizer: ServerOptimizer, t: int, x: Tensor, delta: Tensor, state: dict[str, Tensor]) -> bool:
    """The step as one kernel, where there is one; returns whether there was."""
    if x.device.type != "cuda" or x.dtype != torch.float32 or find_spec("triton") is None:
        return False
    from fedcams.optimizers._fused import RULES, fused_step_

    if optimizer.name not in RULES or not all(v.is_contiguous() for v in (x, delta, *state.values())):
        return False
    fused_step_(optimizer, t, x, delta, state)
    return True


def _check(x: Tensor, others: dict[str, Tensor]) -> None:
    """Refuses an `x` that is no float vector, and vectors that are not like it."""
    if x.dim() != 1 or x.dtype not in (torch.float32, torch.float64):
        raise LayoutError(f"x is {_show(x)}; give a vector [d] of float32 or float64")
    for name, vector in others.items():
        if (vector.shape, vector.dtype, vector.device) != (x.shape, x.dtype, x.device):
            raise LayoutError(f"{name} is {_show(vector)} but x is {_show(x)}; give {name} as x is")


def _show(vector: Tensor) -> str:
    return f"{vector.dtype} {list(vector.shape)} on {vector.device}"


def server(spec: str | ServerOptimizer) -> ServerOptimizer:
    """The server optimizer that a spec string such as `fedams(lr=1, eps=1e-3)` spells."""
    return ServerOptimizer.parse(spec)


@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    """What fedadam, fedyogi, fedamsgrad and fedams share: their hyperparameters and the correction of the start.

    An `eps` below 1e-30 could become zero in float32, and then a coordinate without updates 0/0.
    """

    lr: Number = number(0.1, low=0, open="low", doc="server learning rate")
    beta1: Number = number(0.9, low=0, high=1, open="high", doc="how much of m a step keeps")
    beta2: Number = number(0.99, low=0, high=1, open="high", doc="how much of v a step keeps")
    eps: Number = number(0.1, low=1e-30, doc="bounds the step of a coordinate with small updates")
    bias_correction: bool = flag(False, doc="divides m by 1-beta1^t and the root of v by that of 1-beta2^t")

    def rates(self, t: int) -> tuple[float, float]:
        """`lr` and `eps` for step t, which carry the bias correction at no cost to the vectors.

        With `c1 = 1-β1^t` and `c2 = √(1-β2^t)`: `lr (m/c1)/(√v/c2 + ε) = (lr c2/c1) m/(√v + c2 ε)`.
        """
        lr, eps = float(self.lr), float(self.eps)
        if not self.bias_correction:
            return lr, eps
        c1, c2 = 1 - float(self.beta1) ** t, math.sqrt(1 - float(self.beta2) ** t)
        return lr * c2 / c1, eps * c2
