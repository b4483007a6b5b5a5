"""Versions: by which server and client name the model that a client holds."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from torch import Tensor

from fedcams.bits.parallel import map_threads
from fedcams.errors import FedcamsError

DIGEST = 16
PIECE = 2**18
"""Values of a model that are hashed as one."""


class Held(NamedTuple):
    """A model that a client holds: the round it came in (0: before the first), and what it is, bit for bit."""

    version: int
    digest: bytes

    def __str__(self) -> str:
        return f"version {self.version} ({self.digest.hex()[:8]})"


class OutOfStep(FedcamsError):
    """A message for a client that holds something else than the message builds on; the dense model helps."""

    def __init__(self, text: str, held: Held | None) -> None:
        super().__init__(text)
        self.held = held
        """What the client does hold; None for nothing, or nothing sound."""


def digest_of(model: Tensor) -> bytes:
    """Sixteen bytes that stand for all bits of a model `[d]`: BLAKE2b of those of its pieces, found side by side."""
    data = model.detach().cpu().contiguous().numpy().data
    pieces = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
    return _digest(b"".join(map_threads(pieces, lambda piece: _digest(piece, b"fedcams.piece"))), b"fedcams.model")


def _digest(data: bytes | memoryview, purpose: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST, person=purpose).digest()
