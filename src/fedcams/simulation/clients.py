"""Clients given as lists of tensors, map-style datasets, or a mapping that loads them on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcams.engines import Examples
from fedcams.errors import SpecError


class Clients(Mapping[int, Examples]):
    """A mapping from client id to (inputs, targets).

    A client's data is looked up only when it takes part, and is not kept, so clients that are not in use cost nothing.
    """

    def __init__(self, source: Sequence[Any] | Mapping[int, Any], classes: int | None = None) -> None:
        """Wrap a list, whose places are the ids, or a mapping from integer ids to data; `as_examples` says which data.

        With `classes`, targets must be integers below it. Refuses an empty source, and ids that no message can carry.
        """
        if not isinstance(source, Mapping | Sequence):
            raise SpecError(f"clients is a {type(source).__name__}; give a list, or a mapping from id to data")
        if len(source) == 0:
            raise SpecError("clients is empty; give at least one client")
        self._source, self.classes = source, classes
        self._ids: list[Any] = list(source) if isinstance(source, Mapping) else list(range(len(source)))
        if stranger := [client for client in self._ids if not _is_id(client)]:
            raise SpecError(f"clients has the id {stranger[0]!r}; give each client an integer from 0 to 2**64 - 1")
        self._ids = sorted(map(int, self._ids))

    def __getitem__(self, client: int) -> Examples:
        return as_examples(self._source[client], f"client {client}", self.classes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def sizes(self) -> list[int] | None:
        """Return the number of examples of each client; None if that would load clients, as a mapping may do."""
        if not isinstance(self._source, list | tuple | dict):
            return None
        return [_length(self._source[client]) for client in self._ids]


def _is_id(client: Any) -> bool:
    """Return whether a client can have this id: an unsigned integer of 64 bits."""
    return isinstance(client, int | np.integer) and 0 <= int(client) < 2**64


def _length(data: Any) -> int:
    """Return how many examples a client has, without stacking them."""
    pair = isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(p, Tensor | np.ndarray) for p in data)
    return len(data[0] if pair else data)


def as_examples(data: Any, name: str, classes: int | None = None) -> Examples:
    """Return data as a pair of tensors (inputs, targets); a map-style dataset of (input, target) is stacked.

    With `classes`, targets must be integers below it, and become int64. Refuses data without examples, with another
    number of targets than inputs, or whose examples do not stack; errors start with `name`.
    """
    if (
        isinstance(data, tuple | list)
        and len(data) == 2
        and all(isinstance(part, Tensor | np.ndarray) for part in data)
    ):
        x, y = map(_tensor, data)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Tensor | np.ndarray):
        x, y = (_stack(part, name) for part in _pairs(data, name))
    else:
        raise SpecError(f"{name} is a {type(data).__name__}; give a pair of tensors or a dataset with len() and []")
    if len(x) == 0 or len(x) != len(y):
        raise SpecError(f"{name} has {len(x)} inputs and {len(y)} targets; give at least one, and one target per input")
    if classes is not None:
        _check_targets(y, name, classes)
        y = y.long()
    return x, y


def _pairs(data: Any, name: str) -> tuple[list[Any], list[Any]]:
    """Return the inputs and the targets of a dataset."""
    items = [data[i] for i in range(len(data))]
    try:
        return [item[0] for item in items], [item[1] for item in items]
    except (TypeError, LookupError):
        kind = type(items[0]).__name__
        raise SpecError(f"{name}: an example is a {kind}; make it a pair (input, target)") from None


def _check_targets(y: Tensor, name: str, classes: int) -> None:
    if y.is_floating_point() or not 0 <= int(y.min()) <= int(y.max()) < classes:
        low, high = (y.min().item(), y.max().item())
        raise SpecError(
            f"{name} has targets from {low} to {high}; allowed: integers from 0 to {classes - 1}, the outputs of the "
            "model; for other targets give your own loss"
        )


def _tensor(values: Any) -> Tensor:
    """Return values as a tensor; NumPy's float64, its default, becomes float32, the type of models."""
    tensor = torch.as_tensor(values)
    return tensor.float() if tensor.dtype == torch.float64 and not isinstance(values, Tensor) else tensor


def _stack(values: list[Any], name: str) -> Tensor:
    if not values:
        return torch.empty(0)
    try:
        return torch.stack([_tensor(value) for value in values])
    except (RuntimeError, TypeError, ValueError) as error:
        raise SpecError(f"{name}: its examples do not stack into one tensor ({error}); pad them to one shape") from None
