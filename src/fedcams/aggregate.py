"""The mean of the clients' updates, bit for bit the same in whatever order they arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedcams.bits.vectors import divide
from fedcams.compress import Code, Compressor
from fedcams.errors import LayoutMismatch, UpdateError, WireError
from fedcams.layout import Layout
from fedcams.wire import Payload, unpack


def mean_of_rows(compressor: Compressor, code: Code, layout: Layout, weights: Sequence[float]) -> Tensor:
    """What an `Aggregator` makes of a cohort's code `[C, ...]` in ascending client id, without taking it apart."""
    total = torch.zeros(layout.d, device=next(iter(code.values())).device)
    compressor.add_rows_to(total, code, layout, weights)
    divide(total, sum(weights))
    layout.check_finite(total, "mean of the updates")
    return total


class Aggregator:
    """Collects one round's updates; `mean` decodes them in ascending client id into one float32 sum and divides once.

    Updates are held as checked codes, never as dense vectors.
    """

    def __init__(self, layout: Layout, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.device = device
        self._updates: dict[int, tuple[Compressor, Code, float]] = {}

    def __len__(self) -> int:
        return len(self._updates)

    @property
    def ids(self) -> list[int]:
        """The clients whose updates are in, ascending."""
        return sorted(self._updates)

    def add(self, client_id: int, payload: bytes | Payload, weight: float = 1.0) -> None:
        """Takes a client's payload in, or says what is wrong with it and leaves the sum as it was."""
        try:
            payload = payload if isinstance(payload, Payload) else unpack(payload, self.layout)
            if payload.layout_id != self.layout.id:
                raise LayoutMismatch(
                    f"a payload read with layout {payload.layout_id.hex()}, not {self.layout.id.hex()}"
                )
        except WireError as error:
            raise type(error)(f"client {client_id}: {error}") from None
        self.add_code(client_id, payload.compressor, payload.code, weight)

    def add_code(self, client_id: int, compressor: Compressor, code: Code, weight: float = 1.0) -> None:
        """The same for a code of this layout that never was bytes."""
        if client_id in self._updates:
            raise UpdateError(f"client {client_id} is in this round already; one update a client and round")
        if not (math.isfinite(weight) and weight > 0):
            raise UpdateError(f"client {client_id}: weight={weight}; allowed: a finite number above 0")
        self._updates[client_id] = (compressor, code, weight)

    def mean(self, out: Tensor | None = None) -> Tensor:
        """The weighted mean `[d]`, in new memory or in `out`, which saves the price of new pages every round."""
        if not self._updates:
            raise UpdateError("no update was added; a mean needs at least one")
        total = torch.zeros(self.layout.d, device=self.device) if out is None else out.zero_()
        for client_id in self.ids:
            compressor, code, weight = self._updates[client_id]
            compressor.add_to(total, {name: t.to(self.device) for name, t in code.items()}, self.layout, weight)
        divide(total, sum(self._updates[client_id][2] for client_id in self.ids))
        self.layout.check_finite(total, "mean of the updates")
        return total
