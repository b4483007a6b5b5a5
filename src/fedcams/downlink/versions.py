"""Versions: by which server and client name the model that a client holds."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from torch import Tensor

from fedcams.errors import FedcamsError

DIGEST = 16


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
    """Sixteen bytes that stand for all bits of a model `[d]`."""
    data = model.detach().cpu().contiguous().numpy()
    return hashlib.blake2b(data.data, digest_size=DIGEST, person=b"fedcams.model").digest()
