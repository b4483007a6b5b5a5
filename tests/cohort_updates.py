"""How engines are compared: where local training starts, and when two of its results are the same."""

from __future__ import annotations

import torch
from torch import Tensor

from fedcams.engines import CohortUpdate, Problem


def start_of(task: Problem) -> tuple[Tensor, Tensor | None]:
    """The model's parameters and buffers in the precision in which the problem trains."""
    layouts = (task.layout, task.buffer_layout)
    x, buffers = (
        None if layout is None else layout.read(task.model, torch.empty(layout.d, dtype=task.dtype, device=task.device))
        for layout in layouts
    )
    assert x is not None
    return x, buffers


def assert_close(ours: CohortUpdate, truth: CohortUpdate, tolerance: float) -> None:
    """The same counts and rate, and tensors that differ by at most this part of the true norm."""
    for name in ("delta", "loss", "buffers"):
        mine, his = getattr(ours, name), getattr(truth, name)
        assert (mine is None) == (his is None), name
        if his is not None:
            assert float((mine - his).norm()) <= tolerance * float(his.norm()), name
    assert (ours.examples, ours.steps, ours.rate) == (truth.examples, truth.steps, truth.rate)
