"""Clients as people have them: lists of tensors, map-style datasets, or a mapping that loads them when asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcams.engines import Examples
from fedcams.errors import SpecError


class Clients(Mapping[int, Examples]):
    """id -> (inputs, targets). A client is looked up only when it takes part and is not kept, so many cost nothing."""

    def __init__(self, source: Sequence[Any] | Mapping[int, Any], classes: int | None = None) -> None:
        """With `classes`, targets must be integers below it."""
        if len(source) == 0:
            raise SpecError("clients is empty; give at least one client")
        self._source, self._classes = source, classes
        self._ids = sorted(source) if isinstance(source, Mapping) else list(range(len(source)))

    def __getitem__(self, client: int) -> Examples:
        x, y = as_examples(self._source[client], f"client {client}")
        if self._classes is not None and not 0 <= int(y.min()) <= int(y.max()) < self._classes:
            found = f"targets from {int(y.min())} to {int(y.max())}"
            raise SpecError(f"client {client} has {found}; allowed: 0 to {self._classes - 1}, the outputs of the model")
        return x, y

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


def as_examples(data: Any, name: str) -> Examples:
    """A pair of tensors as it is; a map-style dataset of (input, target) stacked into one."""
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        x, y = data
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        items = [data[i] for i in range(len(data))]
        x, y = (_stack([item[part] for item in items], name) for part in (0, 1))
    else:
        raise SpecError(f"{name} is a {type(data).__name__}; give a pair of tensors or a dataset with len() and []")
    if len(x) == 0 or len(x) != len(y):
        raise SpecError(f"{name} has {len(x)} inputs and {len(y)} targets; give one or more, and a target for each")
    return x, y


def _stack(values: list[Any], name: str) -> Tensor:
    if not values:
        return torch.empty(0)
    try:
        return torch.stack([torch.as_tensor(value) for value in values])
    except (RuntimeError, TypeError, ValueError) as error:
        raise SpecError(f"{name}: its examples do not stack into one tensor ({error}); pad them to one shape") from None
