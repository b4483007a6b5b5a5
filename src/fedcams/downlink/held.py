"""HeldStore: the model that a client keeps from one contact to the next, and the message that may replace it.

On disk `<client>.held` is, little-endian: magic `FCHM`, format version (4), layout id (8), version (8), digest (16),
d (8), and d float32 values. `<client>.staged` is a message as it came. Both are written whole or not at all; a damaged
file shows by the digest of what is made from it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from abc import ABC, abstractmethod
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from fedcams.downlink.message import DIGEST, Held, Message, digest_of
from fedcams.durable import os_errors, write_whole
from fedcams.errors import ResidualError, WireError
from fedcams.layout import Layout

_HEADER = struct.Struct(f"<4sI8sQ{DIGEST}sQ")
_MAGIC, _VERSION = b"FCHM", 1
_os_errors = functools.partial(os_errors, ResidualError)


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


@final
class DiskHeld(HeldStore):
    """Two files a client. One process writes a folder."""

    def __init__(self, layout: Layout, folder: str | os.PathLike[str]) -> None:
        super().__init__(layout)
        self.folder = Path(folder)
        with _os_errors("make the folder", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)

    def held(self, client: int) -> Held | None:
        path = self._path(client, "held")
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            header = file.read(_HEADER.size)
            whole = os.fstat(file.fileno()).st_size == _HEADER.size + 4 * self.layout.d
            if whole and (found := _HEADER.unpack(header))[:3] == (_MAGIC, _VERSION, self.layout.id):
                return Held(found[3], found[4])
        return None

    def model(self, client: int) -> Tensor:
        path = self._path(client, "held")
        with _os_errors("read", path, "restore it, or delete it to get the model anew"):
            data = np.fromfile(path, "<f4", offset=_HEADER.size)
        return torch.from_numpy(data)

    def staged(self, client: int) -> Message | None:
        with contextlib.suppress(FileNotFoundError, WireError):
            return Message.from_bytes(self._path(client, "staged").read_bytes())
        return None

    def keep(self, client: int, held: Held, model: Tensor) -> None:
        """A kill between the two steps leaves a staged message that builds on something else: it is of no use then."""
        path = self._path(client, "held")
        data = model.cpu().contiguous().numpy().astype("<f4", copy=False)
        with _os_errors("write", path):
            write_whole(path, _HEADER.pack(_MAGIC, _VERSION, self.layout.id, *held, self.layout.d), data.data)
            self._path(client, "staged").unlink(missing_ok=True)

    def stage(self, client: int, message: Message) -> None:
        path = self._path(client, "staged")
        with _os_errors("write", path):
            write_whole(path, message.to_bytes())

    def _path(self, client: int, kind: str) -> Path:
        return self.folder / f"{client}.{kind}"
