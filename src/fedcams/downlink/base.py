"""What clients get and hold: how the server's model reaches them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fedcams.layout import Layout
from fedcams.registry import Spec, resolve


class Downlink(Spec, ABC):
    """The root of all downlinks. State is data: `init` makes it, `send` returns the next one."""

    kind = "downlink"

    @abstractmethod
    def init(self, x: Tensor) -> Any:
        """What the server keeps between rounds, before anything was sent."""

    @abstractmethod
    def send(self, state: Any, x: Tensor, layout: Layout, clients: Sequence[int]) -> tuple[dict[int, bytes], Any]:
        """The bytes for each of these clients, and the state after them."""

    def deliver(self, state: Any, x: Tensor, layout: Layout, clients: Sequence[int]) -> tuple[Tensor, list[int], Any]:
        """What a simulation needs of `send` and `receive`: the models that these clients then hold, `[d]` where all
        hold the same and else `[C, d]`, the bytes sent to each, and the state after it."""
        sent, state = self.send(state, x, layout, clients)
        held = torch.stack([self.receive(sent[client], layout) for client in clients])
        return held, [len(sent[client]) for client in clients], state

    @abstractmethod
    def paper_bits(self, layout: Layout) -> int:
        """Bits of one client's link in a round by the paper's rule."""

    @abstractmethod
    def receive(self, data: bytes, layout: Layout, held: Tensor | None = None) -> Tensor:
        """The model `[d]` that a client holds from now on, given what it held before."""


def downlink(spec: str | Downlink) -> Downlink:
    """The downlink that a spec string spells."""
    return cast(Downlink, resolve("downlink", spec))
