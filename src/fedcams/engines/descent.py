"""The step of stochastic gradient descent on all rows of a matrix at once."""

from __future__ import annotations

from torch import Tensor

from fedcams.local import SGD


def descend(local: SGD, parameters: Tensor, direction: Tensor | None, gradient: Tensor, received: Tensor) -> None:
    """What `SGD` says, on rows `[G, d]`; parameters and direction, which only momentum has, change in place."""
    if local.prox:
        gradient.add_(parameters - received, alpha=float(local.prox))
    if local.clip is not None:
        norms = gradient.norm(dim=-1, keepdim=True)
        gradient.mul_((float(local.clip) / (norms + 1e-6)).clamp_(max=1.0))  # as torch.nn.utils.clip_grad_norm_ does
    if local.weight_decay:
        gradient.add_(parameters, alpha=float(local.weight_decay))
    if direction is not None:
        gradient = direction.mul_(float(local.momentum)).add_(gradient)
    parameters.sub_(gradient, alpha=float(local.lr))
