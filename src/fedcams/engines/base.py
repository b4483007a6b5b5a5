"""Engines: how a cohort's local training is carried out. All give the same updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, cast

from torch import Tensor

from fedcams.engines.problem import Problem, Update
from fedcams.registry import Spec, resolve


class Engine(Spec, ABC):
    """The root of all engines; `loop` defines the truth and every other one is tested by equality with it."""

    kind = "engine"
    reference: ClassVar[str] = ""
    needs_cuda: ClassVar[bool] = False

    @abstractmethod
    def train(
        self, problem: Problem, start: Tensor, buffers: Tensor | None, cohort: Sequence[int], round: int, seed: int
    ) -> Update:
        """Trains the clients of the cohort from `start [d]` or `[C, d]` and `buffers [b]` or `[C, b]`."""

    def predictor(self, problem: Problem, x: Tensor, buffers: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The model `x [d]` with these buffers as a function of raw inputs `[n, ...]`; holds until the next call."""
        model = problem.load(x, buffers)
        if model.training:
            model.eval()
        return lambda inputs: model(problem.prepare(inputs))


def engine(spec: str | Engine) -> Engine:
    """The engine that a spec string spells."""
    return cast(Engine, resolve("engine", spec))


def rows(vector: Tensor, cohort: Sequence[int]) -> Tensor:
    """`[d]` or `[C, d]` -> `[C, d]`, without a copy."""
    return vector.expand(len(cohort), -1)
