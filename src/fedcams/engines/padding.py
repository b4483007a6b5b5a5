"""Whether padding changes what a model computes: copies of it take some examples with and without padding."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from fedcams.engines.modules import copied
from fedcams.engines.trees import call, size, take

if TYPE_CHECKING:
    from torch import Tensor

    from fedcams.engines.problem import Examples, Problem

APART, APART_IN_FLOAT32 = 0.02, 1e-3
"""How far equal steps may be apart, relative. Rounding errors are far smaller, in float32 on a CPU about 1e-6, and
errors from a lost buffer or mixed batches far larger, unless a loss only adds a small penalty on its batch."""


def most_apart(problem: Problem) -> float:
    """Return how far equal steps may be apart: a GPU may use TF32, and half precision rounds as coarsely."""
    exact = all(p.dtype in (torch.float32, torch.float64) for p in problem.model.parameters())
    return APART_IN_FLOAT32 if exact and problem.device.type == "cpu" else APART


def is_near(found: Tensor, true: Tensor, apart: float) -> bool:
    """Return whether the distance of two tensors is at most this part of the second one's norm.

    Equal infinities, such as those of a causal mask, are no distance and no part of the norm.
    """
    distance = (found - true).masked_fill(found == true, 0)
    return float(distance.norm()) <= apart * float(true.masked_fill(true.isinf(), 0).norm())


def ignores_padding(problem: Problem, examples: Examples) -> bool:
    """Return whether padding changes neither the losses and gradients of a model's other examples nor its buffers.

    Tries batches of one and of two examples, because a model may treat a single one differently. The loss function must
    return a loss for each example.
    """
    width = max(3, min(problem.local.batch, size(examples)))
    apart = most_apart(problem)
    try:
        for real in (1, 2):
            padded, exact = (_step(problem, examples, real, count) for count in (width, real))
            if not all(is_near(found, true, apart) for found, true in zip(padded, exact, strict=True)):
                return False
    except Exception:  # a model may raise anything
        return False
    return True


def _step(problem: Problem, examples: Examples, real: int, count: int) -> list[Tensor]:
    """Return losses, gradients and buffers after a batch of `real` examples, repeating the first one up to `count`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # load only where they are used

    from fedcams.engines.captured.keyed_draws import key_words, keyed_draws

    frozen = (p for p in problem.model.parameters() if not p.requires_grad)  # may be large, and are not copied
    model = copied(problem.model, frozen).train()
    places = [place if place < real else 0 for place in range(count)]
    x, y = take(examples, torch.tensor(places, device=problem.device) % size(examples))
    trained = [p for p in model.parameters() if p.requires_grad]
    draws = keyed_draws(torch.tensor(key_words(0), device=problem.device))  # the same ones for the same examples
    with warnings.catch_warnings(), torch.enable_grad(), draws, sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")  # a run shows them too
        losses = problem.losses(call(model, problem.prepare(x)), y)[:real]
        parts = torch.autograd.grad(losses.sum(), trained, allow_unused=True, materialize_grads=True)
    gradient = torch.cat([part.flatten().double() for part in parts])
    return [losses.detach().double(), gradient, *map(_wide, model.buffers())]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))  # complex numbers stay complex
