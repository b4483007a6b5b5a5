"""The mean of the clients' updates, bit for bit the same in any order of arrival."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fedcams.bits.vectors import divide_
from fedcams.compress import Code, Compressor
from fedcams.errors import LayoutMismatch, UpdateError, WireError
from fedcams.layout import Layout
from fedcams.wire import Payload, unpack

if TYPE_CHECKING:
    from torch import Tensor


class Aggregator:
    """Collects one round's updates; `mean` adds them in ascending client id into one float32 sum and divides once.

    Updates are held as checked codes, never as dense vectors. With `in_order` they must arrive in ascending client id
    and are added immediately, so memory does not grow with their number. The mean is the same, bit for bit, but it
    reuses the memory of the sum: afterwards the aggregator is empty.

    Arguments:
        layout: the layout of the updates.
        device: where the sum is computed.
        in_order: whether updates arrive in ascending client id.

    Examples:
        >>> import fedcams, torch
        >>> aggregator = fedcams.Aggregator(fedcams.Layout.flat(2))
        >>> aggregator.add(7, fedcams.encode("identity", torch.tensor([1.0, 0.0])))
        >>> aggregator.add(3, fedcams.encode("identity", torch.tensor([3.0, 2.0])))
        >>> aggregator.ids, aggregator.mean()
        ([3, 7], tensor([2., 1.]))
    """

    def __init__(self, layout: Layout, device: torch.device | str = "cpu", in_order: bool = False) -> None:
        self.layout = layout
        self.device = device
        self.in_order = in_order
        self._weights: dict[int, float] = {}
        self._codes: dict[int, tuple[Compressor, Code]] = {}
        self._total: Tensor | None = None

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def ids(self) -> list[int]:
        """The clients whose updates were added, ascending."""
        return sorted(self._weights)

    def add(self, client_id: int, payload: bytes | Payload, weight: float = 1.0) -> None:
        """Add a client's payload, given as bytes or already unpacked, with this weight.

        Raises:
            WireError: for a damaged payload, or one of another layout; the sum then stays as it was.
            UpdateError: for a client that was added before, or a weight that is not a finite number above 0.
        """
        try:
            payload = payload if isinstance(payload, Payload) else unpack(payload, self.layout)
            # the sender chooses the layout id, so check d too: a code of another length must not reach a kernel
            if (payload.layout_id, payload.layout.d) != (self.layout.id, self.layout.d):
                raise LayoutMismatch(
                    f"a payload read with layout {payload.layout_id.hex()} and d={payload.layout.d}, "
                    f"not {self.layout.id.hex()} and d={self.layout.d}"
                )
        except WireError as error:
            raise type(error)(f"client {client_id}: {error}") from None
        self.add_code(client_id, payload.compressor, payload.code, weight)

    def add_code(self, client_id: int, compressor: Compressor, code: Code, weight: float = 1.0) -> None:
        """Add one client's code, tensors `[columns]`, with this weight; refuses what `add_rows` refuses."""
        self.add_rows([client_id], compressor, {name: tensor[None] for name, tensor in code.items()}, [weight])

    def add_rows(self, ids: Sequence[int], compressor: Compressor, code: Code, weights: Sequence[float]) -> None:
        """Add the code `[C, columns]` of several clients in ascending id, with one weight each: all of it or nothing.

        Refuses a client that was added before, a weight that is not a finite number above 0, a code of another layout
        or number of rows and, with `in_order`, an id below the last one.
        """
        self._check(ids, weights)
        compressor.check_lengths(code, self.layout, rows=len(ids))
        if self.in_order:
            self._total = self._zeros() if self._total is None else self._total
            compressor.add_rows_to_(self._total, self._on_device(code), self.layout, weights)
        else:
            for place, client_id in enumerate(ids):
                self._codes[client_id] = (compressor, {name: tensor[place] for name, tensor in code.items()})
        self._weights |= dict(zip(ids, weights, strict=True))

    def _check(self, ids: Sequence[int], weights: Sequence[float]) -> None:
        last, seen = next(reversed(self._weights), -1), set[int]()  # in order, the last one added is the largest
        for client_id, weight in zip(ids, weights, strict=True):
            if client_id in self._weights or client_id in seen:
                raise UpdateError(
                    f"client {client_id} already has an update in this round; send one per client and round"
                )
            if not (math.isfinite(weight) and weight > 0):
                raise UpdateError(f"client {client_id}: weight={weight}; allowed: a finite number above 0")
            if self.in_order and client_id < last:
                raise UpdateError(f"client {client_id} came after client {last}; in_order=True needs ascending ids")
            last = client_id
            seen.add(client_id)

    def mean(self, out: Tensor | None = None) -> Tensor:
        """Return the weighted mean `[d]`, in new memory or in `out`, which saves allocating new pages every round.

        Raises:
            UpdateError: without any update, or if the mean is not finite.
        """
        if not self._weights:
            raise UpdateError("no update was added; a mean needs at least one")
        weight = sum(self._weights[client_id] for client_id in self.ids)
        total = self._sum(out)
        if not math.isfinite(divide_(total, weight)):
            self.layout.check_finite(total, "mean of the updates")
        return total

    def _sum(self, out: Tensor | None) -> Tensor:
        if self._total is not None:
            total, self._total = self._total, None  # the mean is formed in its memory
            self._weights.clear()
            return total if out is None else out.copy_(total)
        total = self._zeros() if out is None else out.zero_()
        for compressor, ids in itertools.groupby(sorted(self._codes), lambda client_id: self._codes[client_id][0]):
            self._add_(total, compressor, list(ids))
        return total

    def _zeros(self) -> Tensor:
        return torch.zeros(self.layout.d, dtype=torch.float32, device=self.device)

    def _on_device(self, code: Code) -> Code:
        return {name: tensor.to(self.device) for name, tensor in code.items()}

    def _add_(self, total: Tensor, compressor: Compressor, ids: Sequence[int]) -> None:
        codes = [self._on_device(self._codes[client_id][1]) for client_id in ids]
        compressor.add_codes_to_(total, codes, self.layout, [self._weights[client_id] for client_id in ids])
