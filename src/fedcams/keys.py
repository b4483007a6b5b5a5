"""Randomness as a function of (seed, purpose, round, client), so that no generator is shared."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import device

_TURNS = threading.RLock()
"""All threads share torch's generator."""


def derive(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """Return a 64-bit key for one use; changing any argument gives an unrelated key."""
    numbers = b"".join(number.to_bytes(16, "little", signed=True) for number in (seed, round, client))
    return int.from_bytes(
        hashlib.blake2b(numbers + purpose.encode(), digest_size=8, person=b"fedcams.key").digest(), "little"
    )


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """Return a new counter-based generator, seeded with the key that `derive` gives for these arguments."""
    return np.random.Generator(np.random.Philox(key=derive(seed, purpose, round, client)))


def permutations(
    count: int, n: int, seed: int, purpose: str, round: int = 0, client: int = 0
) -> list[NDArray[np.int64]]:
    """Return `count` random orders of 0 … n-1: those of `generator(...).permutation(n)`, without its start-up cost."""
    _REUSED.rekey(derive(seed, purpose, round, client))
    return [_REUSED.rng.permutation(n) for _ in range(count)]


@contextlib.contextmanager
def torch_generator(devices: Sequence[device] = ()) -> Iterator[None]:
    """Have torch's global generator, and those of these GPUs, to yourself; afterwards they are as they were before.

    Random layers and initial weights draw from it. Threads take turns.
    """
    with _TURNS, torch.random.fork_rng(devices=list(devices)):
        yield


class _Reused(threading.local):
    """One generator per thread; before each use it is reset to the state of a new one with the given key."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._fresh = self._bits.state
        self.rng = np.random.Generator(self._bits)

    def rekey(self, key: int) -> None:
        self._fresh["state"]["key"][0] = key
        self._bits.state = self._fresh


_REUSED = _Reused()
