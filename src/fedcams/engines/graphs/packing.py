"""How an engine stores parameters: every tensor aligned and channels last, and back to the layout's order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fedcams.layout import Layout

ALIGN = 64
"""Elements: tensors start at multiples of 256 bytes of float32, so that loads are wide."""


class Place(NamedTuple):
    """Where a tensor lies in a row of the block."""

    start: int
    shape: tuple[int, ...]
    """Its shape there, axes already reordered."""
    order: tuple[int, ...]
    """Axis i in memory is axis order[i] of the model's tensor."""


@dataclass(frozen=True)
class Packing:
    """Rows `[C, d]` in the layout's order <-> rows `[C, width]` in an engine's own."""

    layout: Layout
    places: Mapping[str, Place]
    width: int
    rest: int
    """Where those begin that are not weights of convolutions: they come last."""

    @classmethod
    def of(cls, layout: Layout, orders: Mapping[str, tuple[int, ...]]) -> Packing:
        """The places of all tensors; `orders` names the weights of convolutions and how their axes are ordered."""
        places, start, rest = {}, 0, 0
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        for name in sorted(shapes, key=lambda name: name not in orders):
            shape = shapes[name]
            order = orders.get(name, tuple(range(len(shape))))
            order = order if len(order) == len(shape) else tuple(range(len(shape)))  # linear layers: as they are
            places[name] = Place(start, tuple(shape[axis] for axis in order), order)
            start += -(-math.prod(shape) // ALIGN) * ALIGN
            rest = start if name in orders else rest
        return cls(layout, places, start, rest)

    def view(self, block: Tensor, name: str) -> Tensor:
        """`[C, width] -> [C, *shape]` of one tensor, nothing copied."""
        start, shape, _ = self.places[name]
        return block[:, start : start + math.prod(shape)].unflatten(1, shape) if shape else block[:, start]

    def pack(self, rows: Tensor, block: Tensor) -> None:
        """Copies `rows [C, d]` into `block [C, width]`; what lies between tensors stays as it is."""
        for part, target in self._pairs(rows, block):
            target.copy_(part)

    def unpack(self, block: Tensor, rows: Tensor) -> None:
        """Copies `block [C, width]` into `rows [C, d]`."""
        for part, source in self._pairs(rows, block):
            part.copy_(source)

    def _pairs(self, rows: Tensor, block: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of each tensor in both, axes alike."""
        for name, part in self.layout.split(rows).items():
            order = self.places[name].order
            yield part.permute(0, *(axis + 1 for axis in order)), self.view(block, name)
