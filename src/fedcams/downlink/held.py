"""HeldStore: what a client keeps between contacts, its model and maybe buffers, and the message that may replace it.

On disk, `<client>.held` is little-endian: magic `FCHM`, format version (4 bytes), layout id (8), version (8), digest
(16), d (8), and d float32 values. With buffers, d counts both, their values follow the model's, and the id is that of
one layout for both. `<client>.staged` is the message as received; with buffers, the model's and theirs, each preceded
by its length (8). Both files are written completely or not at all. The digest of the result detects
damage.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np
import torch

from fedcams.downlink.message import (
    BUFFERS,
    DIGEST,
    MODEL,
    Held,
    Message,
    digest_of,
    join_payloads,
    split_payloads,
)
from fedcams.durable import os_errors, private_folder, write_whole
from fedcams.errors import LayoutError, ResidualError, WireError
from fedcams.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

_HEADER = struct.Struct(f"<4sI8sQ{DIGEST}sQ")
_MAGIC, _VERSION = b"FCHM", 1
_os_errors = functools.partial(os_errors, ResidualError)
_reading = functools.partial(_os_errors, "read", fix="restore it, or delete it to receive the model again")


class HeldStore(ABC):
    """One model `[d]`, maybe with buffers, its version, and at most one staged message, per client id.

    A process that is one client uses one id; a process that simulates many clients uses many. What cannot be read back
    completely counts as missing, and the client then asks for the dense model.

    Arguments:
        layout: the layout of the model.
        buffer_layout: the layout of buffers that clients keep too, for methods that compress them both ways.

    Examples:
        >>> import fedcams, torch
        >>> store = fedcams.HeldStore.in_memory(fedcams.Layout.flat(2))  # or on_disk(layout, folder)
        >>> store.start(client=0, model=torch.tensor([1.0, 2.0]))
        >>> store.model(0)
        tensor([1., 2.])
    """

    def __init__(self, layout: Layout, buffer_layout: Layout | None = None) -> None:
        self.layouts = {MODEL: layout} | ({} if buffer_layout is None else {BUFFERS: buffer_layout})

    @staticmethod
    def in_memory(layout: Layout, buffer_layout: Layout | None = None) -> HeldStore:
        """Return a store in memory; after a restart, the next contact sends the dense model.

        `buffer_layout` is for methods that compress buffers in both directions, which clients then keep too.
        """
        return MemoryHeld(layout, buffer_layout)

    @staticmethod
    def on_disk(layout: Layout, folder: str | os.PathLike[str], buffer_layout: Layout | None = None) -> HeldStore:
        """Return a store of files in a folder, which is created if missing; models survive the process, even a kill.

        `buffer_layout` as for `in_memory`.
        """
        return DiskHeld(layout, folder, buffer_layout)

    def start(self, client: int, model: Tensor, buffers: Tensor | None = None) -> None:
        """Record that the client has the initial model `[d]`; with `warm=true`, a first contact does not send it.

        Raises:
            LayoutError: for vectors of other layouts than the store's.
        """
        given = {MODEL: model} | ({} if buffers is None else {BUFFERS: buffers})
        if given.keys() != self.layouts.keys():
            raise LayoutError(f"got {' and '.join(given)}; this store keeps {' and '.join(self.layouts)}, give these")
        for name, layout in self.layouts.items():
            layout.check(given[name])
        self.keep(client, Held(0, digest_of(*given.values())), {name: v.clone() for name, v in given.items()})

    def model(self, client: int) -> Tensor:
        """Return the model `[d]` that the client holds; do not change it. Refuses a client that holds none."""
        return self.vectors(client)[MODEL]

    @abstractmethod
    def held(self, client: int) -> Held | None:
        """Return the name of what the client holds; None if it holds nothing."""

    @abstractmethod
    def vectors(self, client: int) -> dict[str, Tensor]:
        """Return what the client holds, name -> `[d]`; do not change it. Refuses a client that holds nothing."""

    @abstractmethod
    def staged(self, client: int) -> dict[str, Message] | None:
        """Return the last messages received that are not yet part of what is held, by name; None if there are none."""

    @abstractmethod
    def keep(self, client: int, held: Held, vectors: Mapping[str, Tensor]) -> None:
        """Make this what the client holds, and drop the staged messages. The store takes over the tensors."""

    @abstractmethod
    def stage(self, client: int, messages: Mapping[str, Message]) -> None:
        """Keep the messages of one instruction in addition to what is held; they replace those staged before."""


@final
class MemoryHeld(HeldStore):
    """Models in host memory; made by `HeldStore.in_memory`."""

    def __init__(self, layout: Layout, buffer_layout: Layout | None) -> None:
        super().__init__(layout, buffer_layout)
        self._held: dict[int, tuple[Held, dict[str, Tensor]]] = {}
        self._staged: dict[int, dict[str, Message]] = {}

    def held(self, client: int) -> Held | None:
        return self._held[client][0] if client in self._held else None

    def vectors(self, client: int) -> dict[str, Tensor]:
        return self._held[client][1]

    def staged(self, client: int) -> dict[str, Message] | None:
        return self._staged.get(client)

    def keep(self, client: int, held: Held, vectors: Mapping[str, Tensor]) -> None:
        self._held[client] = held, dict(vectors)
        self._staged.pop(client, None)

    def stage(self, client: int, messages: Mapping[str, Message]) -> None:
        self._staged[client] = dict(messages)


@final
class DiskHeld(HeldStore):
    """Two files per client; made by `HeldStore.on_disk`. Only one process may write to a folder."""

    def __init__(self, layout: Layout, folder: str | os.PathLike[str], buffer_layout: Layout | None) -> None:
        super().__init__(layout, buffer_layout)
        self._joint = layout if buffer_layout is None else layout + buffer_layout
        self.folder = Path(folder)
        with _os_errors("make the folder", self.folder):
            private_folder(self.folder)

    def held(self, client: int) -> Held | None:
        path = self._path(client, "held")
        with _reading(path), contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            header = file.read(_HEADER.size)
            whole = os.fstat(file.fileno()).st_size == _HEADER.size + 4 * self._joint.d
            if whole and (found := _HEADER.unpack(header))[:3] == (_MAGIC, _VERSION, self._joint.id):
                return Held(found[3], found[4])
        return None

    def vectors(self, client: int) -> dict[str, Tensor]:
        path = self._path(client, "held")
        with _reading(path):
            values = torch.from_numpy(np.fromfile(path, "<f4", offset=_HEADER.size))
        parts = values.split([layout.d for layout in self.layouts.values()])
        return dict(zip(self.layouts, parts, strict=True))

    def staged(self, client: int) -> dict[str, Message] | None:
        path = self._path(client, "staged")
        with _reading(path), contextlib.suppress(FileNotFoundError, WireError):
            data = path.read_bytes()
            parts = [data] if len(self.layouts) == 1 else split_payloads(data)
            if len(parts) == len(self.layouts):
                return {name: Message.from_bytes(part) for name, part in zip(self.layouts, parts, strict=True)}
        return None

    def keep(self, client: int, held: Held, vectors: Mapping[str, Tensor]) -> None:
        """Write what is held, then remove the staged messages; a kill in between leaves some that no longer apply."""
        path = self._path(client, "held")
        data = [vectors[name].cpu().contiguous().numpy().astype("<f4", copy=False).data for name in self.layouts]
        with _os_errors("write", path):
            write_whole(path, _HEADER.pack(_MAGIC, _VERSION, self._joint.id, *held, self._joint.d), *data)
            self._path(client, "staged").unlink(missing_ok=True)

    def stage(self, client: int, messages: Mapping[str, Message]) -> None:
        path = self._path(client, "staged")
        parts = [messages[name].to_bytes() for name in self.layouts]
        with _os_errors("write", path):
            write_whole(path, *(parts if len(parts) == 1 else join_payloads(parts)))

    def _path(self, client: int, kind: str) -> Path:
        return self.folder / f"{client}.{kind}"
