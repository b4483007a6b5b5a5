"""What engines do with a user's module: call it with tensors other than its own, and copy it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fedcams.engines.trees import Tree, arguments

if TYPE_CHECKING:
    from torch import Tensor, nn


def call_with(model: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Tree) -> Any:
    """Call a model with other parameters and buffers than its own; buffers change in place.

    A model may put a new tensor in place of a buffer, as `self.seen = self.seen + 1` does.
    """
    tensors = {**parameters, **buffers}
    outputs = torch.func.functional_call(model, tensors, *arguments(inputs))  # leaves in `tensors` what is there then
    changed = [
        (buffer, tensors[name].detach().clone()) for name, buffer in buffers.items() if tensors[name] is not buffer
    ]
    for buffer, value in changed:  # all are cloned first, as one may be what another buffer held
        buffer.copy_(value)
    return outputs


def hooked_parameter(model: nn.Module) -> str:
    """Return the name of a parameter with a hook, which no tensor in its place would call; empty if there is none."""
    return next((name for name, p in model.named_parameters() if p._backward_hooks), "")


def copied(model: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """Return a deep copy of a model, which uses the `shared` tensors themselves.

    What a `forward` left in an attribute, such as a map of attention, has a graph or belongs to a transform that is
    over, and torch refuses to copy it. The copy gets its values, or an empty tensor if these are gone.
    """
    known = {id(tensor): tensor for tensor in shared}
    attributes = (value for module in model.modules() for value in vars(module).values())
    left = {id(value): _values(value) for value in attributes if isinstance(value, torch.Tensor) and _is_left(value)}
    return copy.deepcopy(model, {**left, **known})


def _is_left(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except NotImplementedError:  # it was made inside torch.func
        return True
    return not tensor.is_leaf


def _values(tensor: Tensor) -> Tensor:
    try:
        return tensor.detach().clone()
    except RuntimeError:
        return torch.empty(0)
