"""All clients of a cohort in one block of memory: parameters, their gradients, their batch-norm statistics.

Every tensor is stored aligned, with channels last; a packing converts to the layout's order and back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from fedcams.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

ALIGN = 64
"""Elements: tensors start at multiples of 256 bytes of float32, so that loads are wide."""


class Place(NamedTuple):
    """Where a tensor is stored in a row of the block."""

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
    """Where the tensors that are not weights of convolutions begin; they come last."""

    @classmethod
    def of(cls, layout: Layout, orders: Mapping[str, tuple[int, ...]]) -> Packing:
        """Return the places of all tensors; `orders` names weights of convolutions and the order of their axes."""
        places, start, rest = {}, 0, 0
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        for name in sorted(shapes, key=lambda name: name not in orders):
            shape = shapes[name]
            order = orders.get(name, tuple(range(len(shape))))
            order = order if len(order) == len(shape) else tuple(range(len(shape)))  # linear layers keep their order
            places[name] = Place(start, tuple(shape[axis] for axis in order), order)
            start += -(-math.prod(shape) // ALIGN) * ALIGN
            rest = start if name in orders else rest
        return cls(layout, places, start, rest)

    def view(self, block: Tensor, name: str) -> Tensor:
        """Return one tensor of a block `[C, width]` as `[C, *shape]`, without a copy."""
        start, shape, _ = self.places[name]
        return block[:, start : start + math.prod(shape)].unflatten(1, shape) if shape else block[:, start]

    def pack(self, rows: Tensor, block: Tensor) -> None:
        """Copy `rows [C, d]` into `block [C, width]`; the gaps between tensors do not change."""
        for part, target in self._pairs(rows, block):
            target.copy_(part)

    def unpack(self, block: Tensor, rows: Tensor) -> None:
        """Copy `block [C, width]` into `rows [C, d]`."""
        for part, source in self._pairs(rows, block):
            part.copy_(source)

    def _pairs(self, rows: Tensor, block: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of each tensor in both, with the same axes."""
        for name, part in self.layout.split(rows).items():
            order = self.places[name].order
            yield part.permute(0, *(axis + 1 for axis in order)), self.view(block, name)


@dataclass(frozen=True)
class Block:
    """Row i is the i-th client; `compute` is `values` in the precision of the kernels, or `values` itself."""

    packing: Packing
    values: Tensor
    """`[C, width]`, the master weights."""
    compute: Tensor
    gradient: Tensor
    buffers: Tensor | None
    """`[C, b]`, in the order of the layout of the buffers."""
    buffer_layout: Layout | None
    sizes: Tensor
    """int32 `[C]`, how many examples of the batch are real; zero for a client that is done."""
    rates: Tensor
    """`[C]`, the learning rates of the round, read at every step."""

    @classmethod
    def empty(
        cls, packing: Packing, buffer_layout: Layout | None, clients: int, device: torch.device,
        dtype: torch.dtype, compute: torch.dtype, train: bool = True,
    ) -> Block:  # fmt: skip
        """Return a block of zeros; the gaps between tensors must be finite, because they are stepped and copied too."""
        values = torch.zeros(clients, packing.width, device=device, dtype=dtype)
        copy = values if compute == dtype else torch.zeros_like(values, dtype=compute)
        gradient = torch.zeros_like(values) if train else values
        size = 0 if buffer_layout is None else buffer_layout.d
        buffers = None if buffer_layout is None else torch.zeros(clients, size, device=device, dtype=dtype)
        sizes = torch.zeros(clients, device=device, dtype=torch.int32)
        rates = torch.zeros(clients, device=device, dtype=dtype)
        return cls(packing, values, copy, gradient, buffers, buffer_layout, sizes, rates)

    def lane(self, clients: slice) -> Block:
        """Return the block of some of the clients, in the same memory."""
        values = self.values[clients]
        compute = values if self.compute is self.values else self.compute[clients]
        buffers = None if self.buffers is None else self.buffers[clients]
        return replace(
            self, values=values, compute=compute, gradient=self.gradient[clients], buffers=buffers,
            sizes=self.sizes[clients], rates=self.rates[clients],
        )  # fmt: skip

    def load(self, rows: Tensor, buffers: Tensor | None) -> None:
        """Read rows `[C, d]` and `[C, b]` in the layouts' order; one row expanded to many is packed once."""
        if rows.stride(0) == 0:
            self.packing.pack(rows[:1], self.values[:1])
            self.values[1:].copy_(self.values[:1].expand(len(self.values) - 1, -1))
        else:
            self.packing.pack(rows, self.values)
        self.refresh_()
        if self.buffers is not None and buffers is not None:
            self.buffers.copy_(buffers)

    def refresh_(self) -> None:
        """Copy the master weights to where the kernels read them."""
        if self.compute is not self.values:
            self.compute.copy_(self.values)

    def buffer(self, name: str) -> Tensor:
        """Return a view `[C, k]` of one statistic."""
        assert self.buffers is not None
        assert self.buffer_layout is not None
        return self.buffer_layout.split(self.buffers)[name]

    def weight(self, name: str) -> Tensor:
        """Return a parameter `[C, ...]` as the kernels read it."""
        return self.packing.view(self.compute, name)

    def master(self, name: str) -> Tensor:
        """Return a parameter `[C, ...]` in full precision."""
        return self.packing.view(self.values, name)

    def slot(self, name: str) -> Tensor:
        """Return where the gradient of a parameter is written, `[C, ...]`."""
        return self.packing.view(self.gradient, name)
