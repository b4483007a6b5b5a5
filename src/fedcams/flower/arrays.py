"""Convert a model between the app's named arrays and the core's flat vectors."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedcams.bits.parallel import map_threads
from fedcams.errors import LayoutError, UpdateError
from fedcams.flower.records import from_array, to_array
from fedcams.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor, nn

STATISTICS = ("*running_mean", "*running_var")
"""The names that batch-norm layers give to the buffers that are averaged."""


@dataclass(frozen=True)
class ArrayNames:
    """Which arrays train, which are averaged, and the order in which the app expects them all.

    All other arrays, such as integer counters, go to the clients unchanged and do not come back.
    """

    order: tuple[str, ...]
    layout: Layout
    buffer_layout: Layout | None
    ties: Mapping[str, str] = field(default_factory=dict)
    """Other name of a tensor -> its name in a layout. Tied weights travel once; the app gets them under all names."""

    @classmethod
    def of(
        cls, arrays: ArrayRecord, model: nn.Module | None = None, averaged: Sequence[str] = STATISTICS
    ) -> ArrayNames:
        """Sort an app's initial arrays, by the model if it is given, otherwise by their types and names.

        Without a model, floating-point arrays train, except those whose names match a pattern in `averaged`.
        """
        values = {name: from_array(array) for name, array in arrays.items()}
        if model is not None:
            layout, buffers = Layout.of(model), Layout.of_buffers(model)
            for name in (*layout.names, *(buffers.names if buffers else ())):
                if name not in values:
                    raise LayoutError(
                        f"the model's tensor {name!r} is not among the initial arrays; give its state_dict"
                    )
            return cls(tuple(values), layout, buffers, _ties(model, layout, buffers))
        floats = [name for name, value in values.items() if value.dtype.kind == "f"]
        apart = {name for name in floats if any(fnmatch.fnmatchcase(name, pattern) for pattern in averaged)}
        trained = _layout([name for name in floats if name not in apart], values)
        if trained is None:
            raise LayoutError(
                "no array of floating-point numbers among the initial arrays; give the model's state_dict"
            )
        return cls(tuple(values), trained, _layout([name for name in floats if name in apart], values))

    # -- over the wire -------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return the names as text for the clients, which know only their app."""
        layouts = [None if part is None else [part.names, part.shapes] for part in (self.layout, self.buffer_layout)]
        ties = [self.ties] if self.ties else []
        return json.dumps([self.order, *layouts, *ties], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ArrayNames:
        """Return the names that `to_json` wrote."""
        order, trained, buffers, *ties = json.loads(text)
        layouts = [None if part is None else Layout(tuple(part[0]), _shapes(part[1])) for part in (trained, buffers)]
        if layouts[0] is None:
            raise LayoutError("the instruction names no array that trains")
        return cls(tuple(order), layouts[0], layouts[1], *ties)

    # -- arrays to vectors and back ------------------------------------------------------------------------------

    def rest(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return those of an app's arrays that are in neither vector."""
        known = {*self.layout.names, *(self.buffer_layout.names if self.buffer_layout else ()), *self.ties}
        return ArrayRecord({name: array for name, array in arrays.items() if name not in known})

    def join(self, x: Tensor, buffers: Tensor | None, rest: ArrayRecord) -> ArrayRecord:
        """Return the app's arrays in its order; this copies the model once."""
        values = dict(self.layout.split(x))
        if self.buffer_layout is not None and buffers is not None:
            values |= self.buffer_layout.split(buffers)
        names = _largest_first(values)
        made = dict(zip(names, map_threads(names, lambda name: to_array(values[name].numpy())), strict=True))
        made |= {other: made[name] for other, name in self.ties.items()}
        return ArrayRecord({name: made[name] if name in made else rest[name] for name in self.order})

    def trained(self, vector: Tensor) -> ArrayRecord:
        """Return a vector `[d]` as the arrays that train."""
        return ArrayRecord({name: to_array(part.numpy()) for name, part in self.layout.split(vector.cpu()).items()})

    def vectors(self, arrays: ArrayRecord) -> tuple[Tensor, Tensor | None]:
        """Return the parameters `[d]` and the buffers of an app's arrays; removes the arrays from the record."""
        buffers = self.buffer_layout
        return _take(self.layout, arrays), None if buffers is None else _take(buffers, arrays)

    def change(self, arrays: ArrayRecord, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return what training changed, `arrays - x [d]`, and the buffers; removes the arrays from the record.

        The change is computed in `out` if it is given, which may be x itself.
        """
        buffers = self.buffer_layout
        return _take(self.layout, arrays, x, out), None if buffers is None else _take(buffers, arrays)


def _take(layout: Layout, arrays: ArrayRecord, minus: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return the layout's arrays as one vector, minus another if given; works on several threads."""
    if out is None:
        out = torch.from_numpy(np.empty(layout.d, np.float32))  # NumPy asks for large pages: fewer page faults
    base = None if minus is None else layout.split(minus)

    def fill(name: str, target: Tensor) -> None:
        if name not in arrays:
            raise UpdateError(f"the array {name!r} is missing; return the whole model")
        values = from_array(arrays.pop(name))
        if values.dtype.kind != "f" or values.shape != tuple(target.shape):
            raise UpdateError(
                f"the array {name!r} is {values.dtype} {values.shape}; expected float {tuple(target.shape)}"
            )
        if base is None:
            np.copyto(target.numpy(), values, casting="same_kind")
        else:
            np.subtract(values, base[name].numpy(), out=target.numpy(), casting="same_kind")

    targets = layout.split(out)
    map_threads(_largest_first(targets), lambda name: fill(name, targets[name]))
    return out


def _ties(model: nn.Module, *layouts: Layout | None) -> dict[str, str]:
    """Return other name -> name in a layout, for the tensors of a model that have several names."""
    named = model.state_dict(keep_vars=True)
    known = {id(named.get(name)): name for layout in layouts if layout is not None for name in layout.names}
    return {name: known[id(each)] for name, each in named.items() if known.get(id(each), name) != name}


def _largest_first(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names by descending size, the order in which threads share the work best."""
    return sorted(tensors, key=lambda name: -tensors[name].numel())


def _layout(names: Sequence[str], values: Mapping[str, NDArray[Any]]) -> Layout | None:
    """The layout of these arrays; None if all are empty."""
    found = Layout(tuple(names), tuple(values[name].shape for name in names))
    return found if found.d else None


def _shapes(shapes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape in shapes)
