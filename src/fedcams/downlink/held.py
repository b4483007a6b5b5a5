"""HeldStore: the model that a client keeps between contacts, and the message that may replace it.

On disk, `<client>.held` is little-endian: magic `FCHM`, format version (4 bytes), layout id (8), version (8), digest
(16), d (8), and d float32 values. `<client>.staged` is a message as received. Both are written completely or not at
all. The digest of the resulting model detects damage.
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
    """One model `[d]` with its version, and at most one staged message, per client id.

    A process that is one client uses one id; a process that simulates many clients uses many. What cannot be read back
    completely counts as missing, and the client then asks for the dense model.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @staticmethod
    def in_memory(layout: Layout) -> HeldStore:
        """Return a store in memory; after a restart, the next contact sends the dense model."""
        return MemoryHeld(layout)

    @staticmethod
    def on_disk(layout: Layout, folder: str | os.PathLike[str]) -> HeldStore:
        """Return a store of files in a folder, which is created if missing; models survive the process, even a kill."""
        return DiskHeld(layout, folder)

    def start(self, client: int, model: Tensor) -> None:
        """Record that the client has the initial model `[d]`; with `warm=true`, a first contact does not send it."""
        self.layout.check(model)
        self.keep(client, Held(0, digest_of(model)), model.clone())

    @abstractmethod
    def held(self, client: int) -> Held | None:
        """Return the name of the model that the client holds; None if it holds none."""

    @abstractmethod
    def model(self, client: int) -> Tensor:
        """Return the model `[d]` that the client holds; do not change it. Refuses a client that holds none."""

    @abstractmethod
    def staged(self, client: int) -> Message | None:
        """Return the last message received that is not yet part of the held model; None if there is none."""

    @abstractmethod
    def keep(self, client: int, held: Held, model: Tensor) -> None:
        """Make this the model that the client holds, and drop the staged message. The store takes over the tensor."""

    @abstractmethod
    def stage(self, client: int, message: Message) -> None:
        """Keep a message in addition to the held model, in place of the one staged before."""


@final
class MemoryHeld(HeldStore):
    """Models in host memory; made by `HeldStore.in_memory`."""

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
    """Two files per client; made by `HeldStore.on_disk`. Only one process may write to a folder."""

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
        with _os_errors("read", path, "restore it, or delete it to receive the model again"):
            data = np.fromfile(path, "<f4", offset=_HEADER.size)
        return torch.from_numpy(data)

    def staged(self, client: int) -> Message | None:
        with contextlib.suppress(FileNotFoundError, WireError):
            return Message.from_bytes(self._path(client, "staged").read_bytes())
        return None

    def keep(self, client: int, held: Held, model: Tensor) -> None:
        """Write the model, then remove the staged message; a kill in between leaves one that no longer applies."""
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
