"""The examples of a client as tensors, from any common form of data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Reader:
    """How data becomes examples: inputs and targets `[n, ...]`.

    Columns are taken as they are: `(x, y)`, `(a, b, y)` or a dict of tensors, arrays, lists or pandas Series, or of
    tuples and dicts of them. Rows, a list or a map-style dataset of such tuples or dicts, are stacked, by `collate` if
    it is given. The last part of a tuple is the target. Of dicts, inputs are the values under `keys` (None: all), and
    the whole dict is the target.

    With `classes`, targets must be integers below it, and become int64. Floats that have no precision of their own,
    those of Python and NumPy's default float64, get `dtype`. `like` is the name of data that all other data must
    resemble, with the shapes of its tensors.
    """

    classes: int | None = None
    collate: Collate | None = None
    keys: Collection[str] | None = None
    dtype: torch.dtype = torch.float32
    like: tuple[str, Mapping[str, list[int]]] | None = None

    def read(self, data: Any, name: str) -> Examples:
        """Return the inputs and the targets in some data.

        Refuses data without examples, with different numbers of inputs and targets, whose examples do not stack, or
        whose form differs from that of `like`; errors start with `name`.
        """
        x, y = _split(self._batch(data, name), name, self.keys)
        _check_sizes(x, y, name)
        if self.like is not None:
            _check_form(shapes(x, y), name, *self.like)
        if self.classes is not None and isinstance(y, torch.Tensor):
            check_targets(y, name, self.classes)
            y = y.long()
        return x, y

    def _batch(self, data: Any, name: str) -> Any:
        """Return all examples as one tuple or dict of trees."""
        if self.collate is not None:
            batch = self.collate(_rows(data, name))
            return dict(batch) if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, list) else batch
        if isinstance(data, Mapping):
            return {key: self._column(value, f"{name}, key {key!r}") for key, value in data.items()}
        if _has_columns(data):
            return tuple(self._column(part, name) for part in data)
        rows = _rows(data, name)
        if rows and isinstance(rows[0], list | tuple):
            rows = [tuple(row) if isinstance(row, list) else row for row in rows]
        elif rows and not isinstance(rows[0], Mapping):
            kind = type(rows[0]).__name__
            raise SpecError(f"{name}: an example is a {kind}; make it a pair (input, target) or a dict")
        return self._stack(rows, name) if rows else (torch.empty(0), torch.empty(0))

    def _column(self, values: Any, name: str) -> Tree:
        """Return one row per example from a tensor, an array, a list, a Series, or a tuple or dict of them."""
        if isinstance(values, Mapping):
            return {key: self._column(value, name) for key, value in values.items()}
        if isinstance(values, tuple):
            return tuple(self._column(value, name) for value in values)
        if hasattr(values, "to_numpy"):
            values = values.to_numpy()
        if isinstance(values, torch.Tensor) or (isinstance(values, np.ndarray) and values.dtype != object):
            return self._number(values, name)
        if not isinstance(values, Iterable):
            raise SpecError(f"{name}: a column is {values!r}; give a tensor, an array or a list with a row per example")
        rows = list(values)
        return self._stack(rows, name) if rows else torch.empty(0)

    def _stack(self, rows: Sequence[Any], name: str) -> Tree:
        """Return one tree from a list of them, with a row for each."""
        first = rows[0]
        if isinstance(first, Mapping):
            _check_keys(rows, name)
            return {key: self._stack([row[key] for row in rows], f"{name}, key {key!r}") for key in first}
        if isinstance(first, tuple):
            if strange := [i for i, row in enumerate(rows) if not isinstance(row, tuple) or len(row) != len(first)]:
                raise SpecError(
                    f"{name}: example {strange[0]} differs in length from example 0; give all examples the same length"
                )
            return tuple(self._stack(parts, name) for parts in zip(*rows, strict=True))
        tensors = [self._number(row, name) for row in rows]
        try:
            return torch.stack(tensors)
        except RuntimeError as error:
            fix = "pad them to one shape, or give collate="
            raise SpecError(f"{name}: its examples do not stack into one tensor ({error}); {fix}") from None

    def _number(self, row: Any, name: str) -> Tensor:
        """Return a number or an array as a tensor; refuses what holds something else."""
        if isinstance(row, np.ndarray) and row.dtype == object:
            row = row.tolist()  # numbers of several types, such as those of a frame with numbers and booleans
        try:
            return self._tensor(row)
        except (RuntimeError, TypeError, ValueError) as error:
            if isinstance(row, list | tuple):  # nested lists that are ragged, or that hold something else
                fix = "make them numbers of one shape, or give collate="
                raise SpecError(f"{name}: its examples do not stack into one tensor ({error}); {fix}") from None
            kind = "text" if isinstance(row, str | bytes) else f"a {getattr(row, 'dtype', type(row).__name__)}"
            raise SpecError(f"{name} holds {kind}; turn it into numbers, remove it, or give collate=") from None

    def _tensor(self, values: Any) -> Tensor:
        """Return values as a contiguous tensor, with this reader's `dtype` for floats without a precision of their own.

        Models may call `view`, which a part of a larger tensor refuses.
        """
        if isinstance(values, np.ndarray) and not values.flags.writeable:
            values = values.copy()  # torch warns of memory that it must not write to, such as that of pandas
        tensor = torch.as_tensor(values)
        chosen = isinstance(values, torch.Tensor) or getattr(values, "dtype", np.float64) != np.float64
        if tensor.is_floating_point() and not chosen:
            tensor = torch.as_tensor(values, dtype=self.dtype)
        return tensor.contiguous()


def count_examples(data: Any) -> int:
    """Return how many examples a client's data has, without loading them."""
    while isinstance(data, Mapping) or _has_columns(data):
        data = next(iter(data.values()), ()) if isinstance(data, Mapping) else data[0]
    return len(data)


def _has_columns(data: Any) -> bool:
    """Return whether data is a pair of columns, or a longer tuple of them, and not a list of examples.

    A tensor, an array or a Series is never an example by itself, so a part that is one tells that all are columns.
    """
    if not isinstance(data, tuple | list) or len(data) < 2 or not (isinstance(data, tuple) or len(data) == 2):
        return False
    sure = [isinstance(part, torch.Tensor | np.ndarray) or hasattr(part, "to_numpy") for part in data]
    return any(sure) or all(isinstance(part, list) for part in data)


def _rows(data: Any, name: str) -> list[Any]:
    if isinstance(data, torch.Tensor | np.ndarray) or hasattr(data, "to_numpy") or not hasattr(data, "__getitem__"):
        fix = "give a pair of tensors, a dict of them, or a dataset with len() and []"
        fix = "give its .dataset" if hasattr(data, "dataset") else fix  # as a DataLoader has
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


def shapes(x: Tree, y: Tree) -> dict[str, list[int]]:
    """Return the shape of every tensor of some examples by its path, such as `inputs` or `targets/labels`."""
    return {path: list(each.shape) for path, each in (*named_tensors(x, "inputs"), *named_tensors(y, "targets"))}


def _check_form(found: Mapping[str, list[int]], name: str, first: str, known: Mapping[str, list[int]]) -> None:
    """Refuse examples that have no tensor in common with the first ones, or one with a different number of axes.

    More or fewer axes might broadcast. Lengths along an axis may differ, as those of padded texts do, and so may the
    keys that a loss does not need.
    """
    common = known.keys() & found.keys()
    if not common:
        raise SpecError(
            f"{name} has {', '.join(found)}, but {first} has {', '.join(known)}; give both examples in the same form"
        )
    for path in (path for path in known if path in common and len(known[path]) != len(found[path])):
        both = f"the shape of {path} is {found[path]}, but {known[path]} for {first}"
        raise SpecError(f"{name}: {both}; give both the same number of axes")


def _check_sizes(x: Tree, y: Tree, name: str) -> None:
    """Refuse empty data, and tensors that differ in their number of examples."""
    known = shapes(x, y)
    if alone := [path for path, shape in known.items() if not shape]:
        raise SpecError(f"{name}: {alone[0]} is one number; give it one row per example")
    sizes = {path: shape[0] for path, shape in known.items()}
    if sizes and min(sizes.values()) == max(sizes.values()) > 0:
        return
    if list(sizes) == ["inputs", "targets"]:
        have, fix = "{inputs} inputs and {targets} targets".format(**sizes), "one target per input"
    else:
        have, fix = ", ".join(f"{count} {path}" for path, count in sizes.items()), "equally many of each"
    raise SpecError(f"{name} has {have or '0 inputs'}; give at least one, and {fix}")


def check_targets(y: Tensor, name: str, classes: int) -> None:
    """Refuse targets that are not class numbers for a model with this many classes."""
    low, high = y.min().item(), y.max().item()
    if y.is_floating_point():
        kind = str(y.dtype).removeprefix("torch.")
        raise SpecError(
            f"{name} has targets from {low} to {high} of type {kind}, but the default loss, the cross entropy, needs "
            f"integers from 0 to {classes - 1}; convert them, or give your own loss, such as torch.nn.MSELoss()"
        )
    if not 0 <= low <= high < classes:
        raise SpecError(
            f"{name} has targets from {low} to {high}; allowed: integers from 0 to {classes - 1}, the outputs of the "
            "model; for other targets give your own loss"
        )


def _check_keys(rows: Sequence[Any], name: str) -> None:
    """Refuse examples whose keys differ."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or row.keys() != rows[0].keys():
            found = ", ".join(map(str, row)) if isinstance(row, Mapping) else f"a {type(row).__name__}"
            expected = ", ".join(map(str, rows[0]))
            raise SpecError(
                f"{name}: example {number} has the keys {found}, but example 0 has {expected}; give all the same keys"
            )
