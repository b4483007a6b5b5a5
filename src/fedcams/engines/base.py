"""The base class of engines: how a cohort's local training is computed. All engines give the same updates."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fedcams.engines.problem import Problem
from fedcams.engines.trees import Tree, call
from fedcams.errors import SpecError
from fedcams.registry import Spec

if TYPE_CHECKING:
    from torch import Tensor


class CohortUpdate(NamedTuple):
    """The result of training, for each client of the cohort."""

    delta: Tensor
    """`[C, d]`, the change of the parameters."""
    buffers: Tensor | None
    """`[C, b]`, the floating-point buffers; None if the model has none."""
    loss: Tensor
    """`[C]`, mean over the examples seen."""
    examples: list[int]
    """The number of examples each client has."""
    steps: list[int]
    """The number of steps each client took."""
    rate: float
    """The local learning rate that was used."""


class Engine(Spec, ABC):
    """The base class of all engines; `loop` is the reference, and every other engine is tested against it.

    Examples:
        >>> import torch
        >>> from fedcams.engines import Problem, engine
        >>> from fedcams.local import local
        >>> examples = {0: (torch.ones(4, 2), torch.zeros(4, dtype=torch.long))}
        >>> problem = Problem(torch.nn.Linear(2, 3), torch.nn.functional.cross_entropy, examples, local("sgd"))
        >>> engine("loop").supports(problem)  # no reason to refuse
        ''
    """

    kind = "engine"
    reference: ClassVar[str] = ""
    needs_cuda: ClassVar[bool] = False
    priority: ClassVar[int] = 0
    """`auto` asks the engines with higher numbers first."""
    needs_trial: ClassVar[bool] = False
    """Whether only a trial shows if a model trains correctly; `auto` then compares one step with that of `loop`."""

    @abstractmethod
    def train(
        self, problem: Problem, start: Tensor, buffers: Tensor | None, cohort: Sequence[int], round: int, seed: int,
        *, rate: float | None = None, shift: Tensor | None = None,
    ) -> CohortUpdate:  # fmt: skip
        """Train the clients of the cohort from `start [d]` or `[C, d]` and `buffers [b]` or `[C, b]`.

        `rate` is the local learning rate of the round (None: `problem.local.lr`); `shift [C, d]` is added to every
        gradient. Returns the update; refuses what `supports` names, and clients without examples.
        """

    @abstractmethod
    def supports(self, problem: Problem) -> str:
        """Return why this engine cannot train the problem, and what to do; an empty string if it can."""

    def declines(self, problem: Problem) -> str:
        """Return why `auto` should pass over this engine although it can train the problem; usually an empty string."""
        return ""

    def on_trial(self) -> Engine:
        """Return the form of this engine that `auto` tries: one that starts quickly and has small rounding errors."""
        return self

    @contextlib.contextmanager
    def drawing(self, problem: Problem, client: int, round: int, seed: int) -> Iterator[None]:
        """Make random layers inside draw what this engine draws in a client's first step, if it draws from keys.

        `auto` runs `loop` like this to compare the two.
        """
        yield

    def tuned(self, problem: Problem, rounds: int, size_varies: bool) -> Engine:
        """Return the same engine with the settings that are fastest for a run of this many rounds.

        `size_varies` says that cohorts differ in size. The answer depends only on the machine and the arguments.
        """
        return self

    def predictor(self, problem: Problem, x: Tensor, buffers: Tensor | None) -> Callable[[Tree], Any]:
        """Return the model `x [d]` with these buffers as a function of raw inputs `[n, ...]`, until the next call."""
        model = problem.load(x, buffers)
        if model.training:
            model.eval()
        return lambda inputs: call(model, problem.prepare(inputs))


def engine(spec: str | Engine) -> Engine:
    """Return the engine that a spec string names.

    Arguments:
        spec: such as `stacked`; an engine is returned unchanged.

    Returns:
        The engine. `choose` also accepts `auto` and checks that the engine can train the problem.

    Raises:
        SpecError: for an unknown name or key, or a value out of range.

    Examples:
        >>> from fedcams.engines import engine
        >>> str(engine("loop"))
        'loop'
    """
    return Engine.parse(spec)


def rows(vector: Tensor, cohort: Sequence[int]) -> Tensor:
    """Return `[C, d]` from `[d]`, the same for every client, or from `[C, d]`; nothing is copied."""
    return vector.expand(len(cohort), -1)


def local_rate(problem: Problem, rate: float | None) -> float:
    """Return the learning rate of a round: the one given, or that of the local rule; refuses a schedule."""
    value = problem.local.lr if rate is None else rate
    if not isinstance(value, Real):
        raise SpecError(f"local: lr={value} changes from round to round; give the round's rate as rate=")
    if not 0 <= value < math.inf:
        raise SpecError(f"rate={value}; give a local learning rate of at least 0")
    return float(value)
