"""No compression: everybody gets the dense model in every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedcams.compress import compressor
from fedcams.downlink.base import Downlink
from fedcams.layout import Layout
from fedcams.registry import register
from fedcams.wire import pack, size, unpack

DENSE = compressor("identity")


@register("none")
@dataclass(frozen=True)
class NoDownlink(Downlink):
    """The model as float32, to every client in every round; nothing is kept."""

    examples = ("none",)

    def init(self, x: Tensor) -> None:
        return None

    def send(self, state: None, x: Tensor, layout: Layout, clients: Sequence[int]) -> tuple[dict[int, bytes], None]:
        layout.check_finite(x, "model")
        return dict.fromkeys(clients, pack(DENSE, {"values": x}, layout)), None  # not encode, which copies x first

    def deliver(self, state: None, x: Tensor, layout: Layout, clients: Sequence[int]) -> tuple[Tensor, list[int], None]:
        return x, [size(DENSE, {"values": x}, layout)] * len(clients), None

    def paper_bits(self, layout: Layout) -> int:
        return DENSE.paper_bits(layout)

    def receive(self, data: bytes, layout: Layout, held: Tensor | None = None) -> Tensor:
        payload = unpack(data, layout)
        return payload.code["values"] if payload.compressor == DENSE else payload.decode()  # as read: one copy less
