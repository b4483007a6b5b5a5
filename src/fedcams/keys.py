"""Randomness as a function of (seed, purpose, round, client): no generator is ever shared."""

from __future__ import annotations

import hashlib
import threading

import numpy as np
from numpy.typing import NDArray


def derive(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """A 64-bit key for one use; any change of an argument gives an unrelated key."""
    numbers = b"".join(number.to_bytes(16, "little", signed=True) for number in (seed, round, client))
    return int.from_bytes(
        hashlib.blake2b(numbers + purpose.encode(), digest_size=8, person=b"fedcams.key").digest(), "little"
    )


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """A fresh counter-based generator for that key."""
    return np.random.Generator(np.random.Philox(key=derive(seed, purpose, round, client)))


def permutations(
    count: int, n: int, seed: int, purpose: str, round: int = 0, client: int = 0
) -> list[NDArray[np.int64]]:
    """What so many calls of `generator(...).permutation(n)` give, without the price of a new generator."""
    _REUSED.rekey(derive(seed, purpose, round, client))
    return [_REUSED.rng.permutation(n) for _ in range(count)]


class _Reused(threading.local):
    """One generator a thread, set to the state of a fresh one of another key each time it is used."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._fresh = self._bits.state
        self.rng = np.random.Generator(self._bits)

    def rekey(self, key: int) -> None:
        self._fresh["state"]["key"][0] = key
        self._bits.state = self._fresh


_REUSED = _Reused()
