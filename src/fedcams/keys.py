"""Randomness as a function of (seed, purpose, round, client): no generator is ever shared."""

from __future__ import annotations

import hashlib

import numpy as np


def derive(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """A 64-bit key for one use; any change of an argument gives an unrelated key."""
    numbers = b"".join(number.to_bytes(16, "little", signed=True) for number in (seed, round, client))
    return int.from_bytes(
        hashlib.blake2b(numbers + purpose.encode(), digest_size=8, person=b"fedcams.key").digest(), "little"
    )


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """A fresh counter-based generator for that key."""
    return np.random.Generator(np.random.Philox(key=derive(seed, purpose, round, client)))
