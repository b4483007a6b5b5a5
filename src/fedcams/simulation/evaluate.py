"""The evaluation of a model on the test set."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedcams.engines import Engine, Examples, Problem, engine

Metric = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> one score per example `[B]`, or their mean; several numbers each `[B, ...]` are averaged."""
BATCH = 1000


@torch.no_grad()
def evaluate(
    problem: Problem,
    x: Tensor,
    buffers: Tensor | None,
    test: Examples,
    metric: Metric,
    by: str | Engine = "loop",
) -> tuple[float, float]:
    """Return the mean loss and mean metric of the model `x [d]` with these buffers on `test`, computed by an engine."""
    predict = engine(by).predictor(problem, x, buffers)
    loss = score = torch.zeros((), dtype=torch.float64, device=problem.device)
    for inputs, targets in zip(*(part.split(BATCH) for part in test), strict=True):
        inputs, targets = inputs.to(problem.device), targets.to(problem.device)
        outputs = predict(inputs)
        loss = loss + _total(problem.losses(outputs, targets), len(inputs))
        score = score + _total(metric(outputs, targets), len(inputs))
    return float(loss) / len(test[0]), float(score) / len(test[0])


def _total(values: Tensor, examples: int) -> Tensor:
    """Return the sum over this many examples of values that are one per example, several per example, or their mean."""
    return values.sum(dtype=torch.float64) if values.dim() == 1 else values.double().mean() * examples
