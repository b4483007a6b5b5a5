"""All clients of a cohort in one block of memory: parameters, their gradients, their batch-norm statistics."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcams.engines.graphs.packing import Packing
from fedcams.layout import Layout


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

    @classmethod
    def empty(
        cls, packing: Packing, buffer_layout: Layout | None, clients: int, device: torch.device,
        dtype: torch.dtype, compute: torch.dtype, train: bool = True,
    ) -> Block:  # fmt: skip
        """Zeros everywhere; what lies between tensors must be finite, since it is stepped and copied too."""
        values = torch.zeros(clients, packing.width, device=device, dtype=dtype)
        copy = values if compute == dtype else torch.zeros_like(values, dtype=compute)
        gradient = torch.zeros_like(values) if train else values
        size = 0 if buffer_layout is None else buffer_layout.d
        buffers = None if buffer_layout is None else torch.zeros(clients, size, device=device, dtype=dtype)
        sizes = torch.zeros(clients, device=device, dtype=torch.int32)
        return cls(packing, values, copy, gradient, buffers, buffer_layout, sizes)

    def lane(self, clients: slice) -> Block:
        """Some of the clients, in the same memory."""
        values = self.values[clients]
        compute = values if self.compute is self.values else self.compute[clients]
        buffers = None if self.buffers is None else self.buffers[clients]
        return replace(
            self, values=values, compute=compute, gradient=self.gradient[clients], buffers=buffers,
            sizes=self.sizes[clients],
        )  # fmt: skip

    def load(self, rows: Tensor, buffers: Tensor | None) -> None:
        """From rows `[C, d]` and `[C, b]` in the layouts' order; rows that are one expanded row are packed once."""
        if rows.stride(0) == 0:
            self.packing.pack(rows[:1], self.values[:1])
            self.values[1:].copy_(self.values[:1].expand(len(self.values) - 1, -1))
        else:
            self.packing.pack(rows, self.values)
        if self.compute is not self.values:
            self.compute.copy_(self.values)
        if self.buffers is not None and buffers is not None:
            self.buffers.copy_(buffers)

    def buffer(self, name: str) -> Tensor:
        """A view `[C, k]` of one statistic."""
        assert self.buffers is not None
        assert self.buffer_layout is not None
        return self.buffer_layout.split(self.buffers)[name]

    def weight(self, name: str) -> Tensor:
        """`[C, ...]` as the kernels read it."""
        return self.packing.view(self.compute, name)

    def master(self, name: str) -> Tensor:
        """`[C, ...]` in full precision."""
        return self.packing.view(self.values, name)

    def slot(self, name: str) -> Tensor:
        """Where the gradient of a tensor is written."""
        return self.packing.view(self.gradient, name)
