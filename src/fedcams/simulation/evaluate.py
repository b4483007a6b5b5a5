"""How good a model is on the test set."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedcams.engines import Examples, Problem

Metric = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> a score for each example `[B]`, or their mean."""
BATCH = 1000


@torch.no_grad()
def evaluate(
    problem: Problem, x: Tensor, buffers: Tensor | None, test: Examples, metric: Metric
) -> tuple[float, float]:
    """Mean loss and mean metric of the model `x [d]` with these buffers."""
    model = problem.model.eval()
    problem.layout.write(x, model)
    if buffers is not None and problem.buffer_layout is not None:
        problem.buffer_layout.write(buffers, model)
    loss = score = torch.zeros((), dtype=torch.float64)
    for inputs, targets in zip(*(part.split(BATCH) for part in test), strict=True):
        inputs, targets = inputs.to(problem.device), targets.to(problem.device)
        outputs = model(problem.prepare(inputs))
        loss = loss + problem.loss(outputs, targets).double().mean().cpu() * len(inputs)
        score = score + metric(outputs, targets).double().mean().cpu() * len(inputs)
    return float(loss) / len(test[0]), float(score) / len(test[0])
