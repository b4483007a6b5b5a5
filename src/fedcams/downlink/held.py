"""HeldStore: the model that a client keeps from one contact to the next, and the message that may replace it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import final

from torch import Tensor

from fedcams.downlink.message import Message
from fedcams.downlink.versions import Held, digest_of
from fedcams.layout import Layout


class HeldStore(ABC):
    """By client id: one model `[d]` with its version, and at most one staged message.

    A client's own process uses it for one id; a process that plays many clients, for many. What cannot be read back
    whole counts as not there, and the client then asks for the dense model.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @staticmethod
    def in_memory(layout: Layout) -> HeldStore:
        """Models that end with the process; the next contact is then dense."""
        return MemoryHeld(layout)

    @staticmethod
    def on_disk(layout: Layout, folder: str | os.PathLike[str]) -> HeldStore:
        """Models as files in a folder (made where missing); they outlive the process, however it ends."""
        from fedcams.downlink.held_disk import DiskHeld

        return DiskHeld(layout, folder)

    def start(self, client: int, model: Tensor) -> None:
        """The client has the initial model already: a first contact need not send it (`warm=true`)."""
        self.layout.check(model)
        self.keep(client, Held(0, digest_of(model)), model.clone())

    @abstractmethod
    def held(self, client: int) -> Held | None:
        """What the client holds; None for nothing."""

    @abstractmethod
    def model(self, client: int) -> Tensor:
        """That model `[d]`; only to be read."""

    @abstractmethod
    def staged(self, client: int) -> Message | None:
        """The message that was received last, if it is not yet part of what is held."""

    @abstractmethod
    def keep(self, client: int, held: Held, model: Tensor) -> None:
        """From now on the client holds this model, and no message is staged. Takes the tensor over."""

    @abstractmethod
    def stage(self, client: int, message: Message) -> None:
        """Keeps a message beside what is held, in place of the one before."""


@final
class MemoryHeld(HeldStore):
    """In host memory."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._models: dict[int, tuple[Held, Tensor]] = {}
        self._staged: dict[int, Message] = {}

    def held(self, client: int) -> Held | None:
        return self._models[client][0] if client in self._models else None

    def model(self, client: int) -> Tensor:
        return self._models[client][1]

    def staged(self, client: int) -> Message | None:
        return self._staged.get(client)

    def keep(self, client: int, held: Held, model: Tensor) -> None:
        self._models[client] = held, model
        self._staged.pop(client, None)

    def stage(self, client: int, message: Message) -> None:
        self._staged[client] = message
