"""Batches of any shape: a tensor, or tuples and dicts of them, whose tensors all have one row per example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

Tree = Any
"""A tensor, or a tuple or dict of trees."""


def map_tensors(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Return the tree with `function` applied to every tensor; other leaves, such as None, stay as they are."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return _like(tree, {key: map_tensors(function, value) for key, value in tree.items()})
    if isinstance(tree, tuple):
        return tuple(map_tensors(function, value) for value in tree)
    return tree


def _like(tree: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return the values as a mapping of the same class: outputs of a model may be read by attributes."""
    return values if type(tree) is dict else type(tree)(**values)


def take(tree: Tree, which: Any) -> Tree:
    """Return some examples, chosen by an index, a slice or a tensor of places."""
    if isinstance(which, torch.Tensor):
        return map_tensors(lambda part: part.index_select(0, which), tree)  # copies whole rows, unlike indexing
    return map_tensors(lambda part: part[which], tree)


def named_tensors(tree: Tree, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the tensor of every leaf, such as `x/input_ids`."""
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, Mapping | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from named_tensors(value, f"{name}/{key}" if name else str(key))


def described(tree: Tree) -> str:
    """Return the types and shapes of all tensors in a tree, such as `float32 [2, 5]`, for errors."""
    named = [(name, f"{dtype_name(tensor)} {list(tensor.shape)}") for name, tensor in named_tensors(tree)]
    return ", ".join(f"{name}: {said}" if name else said for name, said in named) or type(tree).__name__


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's type, such as `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def size(tree: Tree) -> int:
    """Return the number of examples: the length of the first tensor, 0 if there is none."""
    return next((len(tensor) for _, tensor in named_tensors(tree)), 0)


def numbers_per_example(tree: Tree) -> int:
    """Return how many numbers one example has."""
    return sum(tensor[:1].numel() for _, tensor in named_tensors(tree))


def concatenate(trees: Sequence[Tree]) -> Tree:
    """Return the examples of several trees of the same shape as one tree; scalars are stacked.

    What is not a tensor becomes None. Raises RuntimeError if examples differ in shape or in their keys.
    """
    first = trees[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(trees)) if first.dim() else torch.stack(list(trees))
    if isinstance(first, Mapping):
        if other := [tree for tree in trees if tree.keys() != first.keys()]:
            raise RuntimeError(f"the keys are {', '.join(map(str, first))} and {', '.join(map(str, other[0]))}")
        return _like(first, {key: concatenate([tree[key] for tree in trees]) for key in first})
    return tuple(map(concatenate, zip(*trees, strict=True))) if isinstance(first, tuple) else None


def arguments(inputs: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of a model: a dict is passed by keywords, a tuple one by one."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), {}


def call(model: Callable[..., Any], inputs: Tree) -> Any:
    """Call a model with inputs: `model(x)`, `model(a, b)` for a tuple, `model(key=...)` for a dict."""
    positional, named = arguments(inputs)
    return model(*positional, **named)
