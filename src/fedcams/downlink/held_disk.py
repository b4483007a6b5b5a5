"""Models that clients hold, as files.

`<client>.held` is, little-endian: magic `FCHM`, format version (4), layout id (8), version (8), digest (16), d (8), and
d float32 values. `<client>.staged` is a message as it came. Both are written whole or not at all; a damaged file shows
by the digest of what is made from it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from fedcams.downlink.held import HeldStore
from fedcams.downlink.message import Message
from fedcams.downlink.versions import DIGEST, Held
from fedcams.durable import os_errors, write_whole
from fedcams.errors import ResidualError, WireError
from fedcams.layout import Layout

_HEADER = struct.Struct(f"<4sI8sQ{DIGEST}sQ")
_MAGIC, _VERSION = b"FCHM", 1
_os_errors = functools.partial(os_errors, ResidualError)


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
