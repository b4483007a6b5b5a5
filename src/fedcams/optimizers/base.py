"""The base class of server optimizers: a formula on vectors `[d]`, run over pieces that fit into the cache."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch

from fedcams.errors import LayoutError
from fedcams.registry import Number, Spec, flag, number
from fedcams.registry.fields import show
from fedcams.schedules import Constant  # noqa: F401  (registers what numbers may follow)

if TYPE_CHECKING:
    from torch import Tensor

PIECE = {"cpu": 2**18, "cuda": 2**22}
"""Elements per piece, by device. A formula is a handful of operations. On whole vectors each of them waits for memory;
on pieces only the first one does, and no temporary is larger than a piece. On a GPU the formulas that come with fedcams
use one fused kernel instead. Pieces for other formulas are longer there, because launches cost more."""


class State(Protocol):
    """The state of an optimizer: a NamedTuple of `t`, the number of steps taken, followed by vectors `[d]`."""

    @property
    def t(self) -> int:
        """The number of steps taken."""

    def _asdict(self) -> dict[str, Any]: ...


class Moments(NamedTuple):
    """The number of steps taken, and the first and second moment, both `[d]`."""

    t: int
    m: Tensor
    v: Tensor


class MaxMoments(NamedTuple):
    """The number of steps taken, the two moments, and the largest second moment so far, all `[d]`."""

    t: int
    m: Tensor
    v: Tensor
    vhat: Tensor


class ServerOptimizer(Spec, ABC):
    """The base class of all server optimizers. A subclass names its `state_type` and writes `update_`.

    Examples:
        >>> import fedcams, torch
        >>> optimizer, x = fedcams.server("fedams(lr=0.03)"), torch.zeros(2)
        >>> optimizer.init(x).t, optimizer.step_(optimizer.init(x), x, torch.ones(2))[1].t
        (0, 1)
    """

    kind = "server"
    schedulable = True
    reference: ClassVar[str] = ""
    """The publication that describes it."""
    state_type: ClassVar[type[Any]]
    """The NamedTuple that holds its state; `state_type(**saved)` restores what `state._asdict()` returned."""
    elementwise: ClassVar[bool] = True
    """Whether each coordinate steps on its own; if not, as with a norm, `update_` gets whole vectors, not pieces."""

    def init(self, x: Tensor) -> State:
        """Return the state before the first step: t = 0 and zero vectors like `x [d]`, which must be a float vector."""
        _check(x, {})
        _, *names = self.state_type._fields
        state: State = self.state_type(0, *(torch.zeros_like(x, requires_grad=False) for _ in names))
        return state

    def step_(self, state: State, x: Tensor, delta: Tensor) -> tuple[Tensor, State]:
        """Take one step on `x [d]` with the mean update `delta [d]`; return x and the new state.

        Overwrites `x` and the vectors of the state, and only reads `delta`. Refuses the state of another optimizer, and
        vectors whose shape, dtype or device differs from that of x.
        """
        vectors = state._asdict()
        if (*vectors,) != self.state_type._fields:
            needed = ", ".join(self.state_type._fields)
            raise LayoutError(f"the state holds {', '.join(vectors)}; {self.name} needs {needed}: start with its init")
        t = vectors.pop("t") + 1
        _check(x, {"delta": delta, **vectors})
        with torch.no_grad():
            if not _step_fused_(self, t, x, delta, vectors):
                self._step_in_pieces_(t, x, delta, *vectors.values())
        return x, self.state_type(t, **vectors)

    def _step_in_pieces_(self, t: int, *whole: Tensor) -> None:
        """Apply the formula piece by piece if it is elementwise, so that temporaries stay in the cache."""
        length = PIECE.get(whole[0].device.type, PIECE["cuda"])
        undivided = not self.elementwise or len(whole[0]) <= length
        parts = [whole] if undivided else zip(*(vector.split(length) for vector in whole), strict=True)
        for pieces in parts:
            self.update_(t, *pieces)

    @abstractmethod
    def update_(self, t: int, x: Tensor, delta: Tensor, *args: Any, **kwargs: Any) -> None:
        """Apply the formula of step t = 1, 2, … in place to a piece of `x` and of the state's vectors, given in order.

        A sum or a norm over a piece is not that of the vector: set `elementwise = False` to get whole vectors.
        `delta` is the same piece of the mean update. Write `β m + (1-β) Δ` as `m.lerp_(Δ, 1-β)`: its weights sum to one
        even if float32 rounds β, which leaves a third of the error in `v` after 200 steps. Keep one temporary at a
        time: with two, glibc returns the memory to the system, and page faults make every piece take twice as long.
        """

    def off_floor(self, state: State) -> Tensor | None:
        """Return which coordinates `[d]` the second moment scales, because it is above its floor `eps`.

        Where none is, the server never adapts: see `twin`. None if the optimizer has no second moment.
        """
        return None

    def twin(self, digits: int = 9) -> ServerOptimizer | None:
        """Return the `fedavgm` that takes the same steps while all second moments are at their floor.

        Its rate is rounded to this many `digits`. None for optimizers without a floor, and for those with a schedule.
        """
        return None


def momentum_twin(rate: float | str, beta1: Number, digits: int) -> ServerOptimizer:
    """Return the `fedavgm` of a step `rate·m` with `m = β1 m + (1-β1) Δ`; a rate in words is a schedule's spec."""
    shown = rate if isinstance(rate, str) else f"{rate * (1 - float(beta1)):.{digits}g}"
    return ServerOptimizer.parse(f"fedavgm(lr={shown}, momentum={show(beta1)})")


def _step_fused_(optimizer: ServerOptimizer, t: int, x: Tensor, delta: Tensor, state: dict[str, Tensor]) -> bool:
    """Take the step with the fused kernel if it supports this optimizer and these vectors; return whether it did."""
    if x.device.type != "cuda" or x.dtype != torch.float32 or find_spec("triton") is None:
        return False
    from fedcams.optimizers._fused import RULES, fused_step_

    if optimizer.name not in RULES or not all(v.is_contiguous() for v in (x, delta, *state.values())):
        return False
    fused_step_(optimizer, t, x, delta, state)
    return True


def _check(x: Tensor, others: dict[str, Tensor]) -> None:
    """Refuse an `x` that is not a float vector, and vectors whose shape, dtype or device differs from that of x."""
    if x.dim() != 1 or x.dtype not in (torch.float32, torch.float64):
        raise LayoutError(f"x is {_show(x)}; give a vector [d] of float32 or float64")
    for name, vector in others.items():
        if (vector.shape, vector.dtype, vector.device) != (x.shape, x.dtype, x.device):
            raise LayoutError(f"{name} is {_show(vector)} but x is {_show(x)}; give {name} like x")


def _show(vector: Tensor) -> str:
    return f"{vector.dtype} {list(vector.shape)} on {vector.device}"


def server(spec: str | ServerOptimizer) -> ServerOptimizer:
    """Return the server optimizer that a spec string names.

    Arguments:
        spec: such as `fedams(lr=1, eps=1e-3)`; an optimizer is returned unchanged.

    Returns:
        The optimizer. It holds no state: `init(x)` makes one, and `step_(state, x, delta)` returns the next.

    Raises:
        SpecError: for an unknown name or key, or a value out of range; it suggests the nearest name.

    Examples:
        >>> import fedcams, torch
        >>> optimizer = fedcams.server("fedavg(lr=1/2)")
        >>> x = torch.zeros(2)
        >>> x, state = optimizer.step_(optimizer.init(x), x, torch.tensor([1.0, 2.0]))
        >>> x
        tensor([0.5000, 1.0000])
    """
    return ServerOptimizer.parse(spec)


@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    """The base class of fedadam, fedyogi, fedamsgrad and fedams: their hyperparameters and their bias correction.

    An `eps` below 1e-30 is refused: it could become zero in float32, and a coordinate without updates would give 0/0.
    """

    lr: Number = number(0.1, low=0, open="low", doc="server learning rate")
    beta1: Number = number(0.9, low=0, high=1, open="high", doc="the weight of the old m in the new m")
    beta2: Number = number(0.99, low=0, high=1, open="high", doc="the weight of the old v in the new v")
    eps: Number = number(0.1, low=1e-30, doc="limits the step of coordinates with small updates")
    bias_correction: bool = flag(False, doc="divide m by 1-beta1^t and √v by √(1-beta2^t)")

    def rates(self, t: int) -> tuple[float, float]:
        """Return `lr` and `eps` for step t, adjusted for the bias correction, which then needs no work on vectors.

        With `c1 = 1-β1^t` and `c2 = √(1-β2^t)`: `lr (m/c1)/(√v/c2 + ε) = (lr c2/c1) m/(√v + c2 ε)`.
        """
        lr, eps = float(self.lr), float(self.eps)
        if not self.bias_correction:
            return lr, eps
        c1, c2 = 1 - float(self.beta1) ** t, math.sqrt(1 - float(self.beta2) ** t)
        return lr * c2 / c1, eps * c2

    def floor(self, t: int) -> float:
        """Return the second moment at which its root and `eps` are equal in step t."""
        return self.rates(t)[1] ** 2

    def off_floor(self, state: State) -> Tensor | None:
        vectors = state._asdict()
        second: Tensor = vectors.get("vhat", vectors["v"])
        return second > self.floor(state.t)

    def twin(self, digits: int = 9) -> ServerOptimizer | None:
        if self.schedules():
            return None
        rate = float(self.lr) / math.sqrt(self.floor(10**9))
        if not self.bias_correction:
            return momentum_twin(rate, self.beta1, digits)
        level = f"{rate * (1 - float(self.beta1)):.{digits}g}"
        beta2 = self.beta2 if self.floor(1) == self.floor(2) else 0  # √(1-β2^t) cancels where ε is corrected too
        warm = f"bias_correction({level}, beta1={show(self.beta1)}, beta2={show(beta2)})"
        return momentum_twin(warm, self.beta1, digits)
