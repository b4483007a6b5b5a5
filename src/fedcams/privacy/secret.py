"""Secret randomness: noise and cohorts from a key that does not travel, unlike the run's seed.

Bits come from SHAKE-256, keyed by its first bytes; without the key, they cannot be distinguished from random ones. They
depend only on the key and their purpose, so a run that continues after a stop repeats them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedcams.errors import SpecError

KEY_BYTES = 32
PIECE = 1 << 16
"""Coordinates of noise that are drawn at a time."""
UNIT = 2.0**-53


def new_key() -> str:
    """Return a new key from the operating system, as 64 hexadecimal digits."""
    return secrets.token_hex(KEY_BYTES)


def client_key(secret: str, client: int) -> str:
    """Return the key of a simulated client's noise, from the secret key of the simulation; a site has its own."""
    return _bits(secret, "client", client.to_bytes(8, "little"), KEY_BYTES // 8).tobytes().hex()


def gaussian(key: str, purpose: str, round: int, about: bytes, count: int) -> NDArray[np.float64]:
    """Return `count` standard normal numbers, float64, for one use of the key.

    Another round, or other bytes in `about`, give unrelated numbers.
    """
    out = np.empty(count)
    for piece, start in enumerate(range(0, count, PIECE)):
        part = out[start : start + PIECE]
        part[:] = _normal(_bits(key, f"{purpose} {round} {piece}", about, 2 * ((len(part) + 1) // 2)))[: len(part)]
    return out


def chosen(key: str, round: int, ids: Sequence[int], p: float) -> list[int]:
    """Return the ids that take part in a round, each with probability p, independently of all others.

    Whether an id is chosen does not depend on which others there are.
    """
    threshold = round_down(p)
    words = (int(_bits(key, f"cohort {round}", id.to_bytes(8, "little"), 1)[0]) for id in ids)
    return [id for id, word in zip(ids, words, strict=True) if word < threshold]


def round_down(p: float) -> int:
    """Return how many of the 2^64 words mean that a client takes part; never more than p of them."""
    return int(p * 2**64)


def _bits(key: str, purpose: str, about: bytes, words: int) -> NDArray[np.uint64]:
    """Return pseudorandom words for one use; refuses a missing key."""
    if len(raw := bytes.fromhex(key)) != KEY_BYTES:
        raise SpecError(f"a secret key of {len(raw)} bytes; give {KEY_BYTES}, as fedcams.privacy.secret.new_key does")
    used = purpose.encode()
    data = hashlib.shake_256(raw + len(used).to_bytes(8, "little") + used + about).digest(8 * words)
    return np.frombuffer(data, np.dtype("<u8"))


def _normal(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return as many standard normal numbers as there are words, an even number, by the Box-Muller transform."""
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * UNIT  # strictly between 0 and 1
    radius, angle = np.sqrt(-2 * np.log(uniform[::2])), 2 * np.pi * uniform[1::2]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
