"""The examples of a client as tensors, from any common form of data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedcams.engines import Examples
from fedcams.engines.trees import Tree, named_tensors
from fedcams.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

Collate = Callable[[list[Any]], Any]
"""A list of examples -> one batch, as `torch.utils.data.DataLoader` has it."""


def as_examples(
    data: Any,
    name: str,
    classes: int | None = None,
    collate: Collate | None = None,
    keys: Collection[str] | None = None,
) -> Examples:
    """Return a client's data as inputs and targets `[n, ...]`.

    Columns are taken as they are: `(x, y)`, `(a, b, y)` or a dict of tensors, arrays, lists or pandas Series. Rows, a
    list or a map-style dataset of such tuples or dicts, are stacked, by `collate` if it is given. The last part of a
    tuple is the target. Of dicts, inputs are the values under `keys` (None: all), and the whole dict is the target.

    With `classes`, targets must be integers below it, and become int64. Refuses data without examples, with another
    number of targets than inputs, or whose examples do not stack; errors start with `name`.
    """
    x, y = _split(_batch(data, name, collate), name, keys)
    _check_sizes(x, y, name)
    if classes is not None and isinstance(y, torch.Tensor):
        _check_targets(y, name, classes)
        y = y.long()
    return x, y


def count_examples(data: Any) -> int:
    """Return how many examples a client's data has, without loading them."""
    if isinstance(data, Mapping):
        return len(next(iter(data.values()), ()))
    return len(data[0] if _has_columns(data) else data)


def _batch(data: Any, name: str, collate: Collate | None) -> Any:
    """Return all examples as one tuple or dict of trees."""
    if collate is not None:
        batch = collate(_rows(data, name))
        return dict(batch) if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, list) else batch
    if isinstance(data, Mapping):
        return {key: _column(value, f"{name}, key {key!r}") for key, value in data.items()}
    if _has_columns(data):
        return tuple(_column(part, name) for part in data)
    rows = _rows(data, name)
    if rows and isinstance(rows[0], list | tuple):
        rows = [tuple(row) if isinstance(row, list) else row for row in rows]
    elif rows and not isinstance(rows[0], Mapping):
        kind = type(rows[0]).__name__
        raise SpecError(f"{name}: an example is a {kind}; make it a pair (input, target) or a dict")
    return _stack(rows, name)


def _has_columns(data: Any) -> bool:
    """Return whether data is a pair of columns, or a longer tuple of them, and not a list of examples."""
    if not isinstance(data, tuple | list) or len(data) < 2 or not (isinstance(data, tuple) or len(data) == 2):
        return False
    return all(isinstance(part, torch.Tensor | np.ndarray | list) or hasattr(part, "to_numpy") for part in data)


def _rows(data: Any, name: str) -> list[Any]:
    if isinstance(data, torch.Tensor | np.ndarray) or hasattr(data, "to_numpy") or not hasattr(data, "__getitem__"):
        fix = "give a pair of tensors, a dict of them, or a dataset with len() and []"
        raise SpecError(f"{name} is a {type(data).__name__}; {fix}")
    if not hasattr(data, "__len__"):
        raise SpecError(f"{name} is a {type(data).__name__} without len(); give a map-style dataset")
    return [data[i] for i in range(len(data))]


def _split(batch: Any, name: str, keys: Collection[str] | None) -> Examples:
    """Return the inputs and the targets of all examples."""
    if isinstance(batch, Mapping):
        inputs = {key: value for key, value in batch.items() if keys is None or key in keys}
        if not inputs:
            takes, has = ", ".join(keys or ()), ", ".join(map(str, batch))
            raise SpecError(
                f"{name}: the model takes {takes or 'nothing'}, but examples have {has}; rename one of them"
            )
        return inputs, dict(batch)
    if not isinstance(batch, tuple) or len(batch) < 2:
        raise SpecError(f"{name}: collate returns a {type(batch).__name__}; make it a pair (inputs, targets) or a dict")
    return batch[0] if len(batch) == 2 else batch[:-1], batch[-1]


def _check_sizes(x: Tree, y: Tree, name: str) -> None:
    """Refuse examples of which there are none, or not equally many in every tensor."""
    tensors = [*named_tensors(x, "inputs"), *named_tensors(y, "targets")]
    if alone := [path for path, tensor in tensors if tensor.dim() == 0]:
        raise SpecError(f"{name}: {alone[0]} is one number; give it one row per example")
    sizes = {path: len(tensor) for path, tensor in tensors}
    if sizes and min(sizes.values()) == max(sizes.values()) > 0:
        return
    if list(sizes) == ["inputs", "targets"]:
        have, fix = "{inputs} inputs and {targets} targets".format(**sizes), "one target per input"
    else:
        have, fix = ", ".join(f"{count} {path}" for path, count in sizes.items()), "equally many of each"
    raise SpecError(f"{name} has {have or '0 inputs'}; give at least one, and {fix}")


def _check_targets(y: Tensor, name: str, classes: int) -> None:
    if y.is_floating_point() or not 0 <= int(y.min()) <= int(y.max()) < classes:
        low, high = (y.min().item(), y.max().item())
        raise SpecError(
            f"{name} has targets from {low} to {high}; allowed: integers from 0 to {classes - 1}, the outputs of the "
            "model; for other targets give your own loss"
        )


# -- tensors ---------------------------------------------------------------------------------------------------------


def _column(values: Any, name: str) -> Tree:
    """Return one row per example from a tensor, an array, a list, a Series, or a tuple or dict of them."""
    if isinstance(values, Mapping):
        return {key: _column(value, name) for key, value in values.items()}
    if isinstance(values, tuple):
        return tuple(_column(value, name) for value in values)
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    if isinstance(values, torch.Tensor) or (isinstance(values, np.ndarray) and values.dtype != object):
        return _tensor(values)
    return _stack(list(values), name)


def _stack(rows: Sequence[Any], name: str) -> Tree:
    """Return one tree from a list of them, with a row for each."""
    if not rows:
        return (torch.empty(0), torch.empty(0))
    first = rows[0]
    if isinstance(first, Mapping):
        _check_keys(rows, name)
        return {key: _stack([row[key] for row in rows], f"{name}, key {key!r}") for key in first}
    if isinstance(first, tuple):
        if strange := [i for i, row in enumerate(rows) if not isinstance(row, tuple) or len(row) != len(first)]:
            raise SpecError(
                f"{name}: example {strange[0]} differs in length from example 0; give all examples the same length"
            )
        return tuple(_stack(parts, name) for parts in zip(*rows, strict=True))
    if isinstance(first, str | bytes):
        raise SpecError(f"{name} holds text; turn it into numbers, remove it, or give collate=")
    try:
        return torch.stack([_tensor(row) for row in rows])
    except (RuntimeError, TypeError, ValueError) as error:
        fix = "pad them to one shape, or give collate="
        raise SpecError(f"{name}: its examples do not stack into one tensor ({error}); {fix}") from None


def _check_keys(rows: Sequence[Any], name: str) -> None:
    """Refuse examples whose keys differ."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or row.keys() != rows[0].keys():
            found = ", ".join(map(str, row)) if isinstance(row, Mapping) else f"a {type(row).__name__}"
            expected = ", ".join(map(str, rows[0]))
            raise SpecError(
                f"{name}: example {number} has the keys {found}, but example 0 has {expected}; give all the same keys"
            )


def _tensor(values: Any) -> Tensor:
    """Return values as a tensor; NumPy's float64, its default, becomes float32, the type of models."""
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        values = values.copy()  # torch warns of memory that it must not write to, such as that of pandas
    tensor = torch.as_tensor(values)
    return tensor.float() if tensor.dtype == torch.float64 and not isinstance(values, torch.Tensor) else tensor
