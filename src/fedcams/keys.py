"""Randomness as a function of (seed, purpose, round, client), so that no generator is shared."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Sequence
from operator import index
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import device

_TURNS = threading.RLock()
"""All threads share torch's generator."""


def derive(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """Return a 64-bit key for one use; changing any argument gives an unrelated key.

    Arguments:
        seed: that of the run.
        purpose: what the key is for, such as `cohort`.
        round: the round, from 1.
        client: the client's number.

    Returns:
        The key.

    Examples:
        >>> from fedcams.keys import derive
        >>> derive(1, "cohort", round=3) == derive(1, "cohort", round=3)
        True
        >>> derive(1, "cohort", round=3) == derive(1, "cohort", round=4)
        False
    """
    numbers = b"".join(index(number).to_bytes(16, "little", signed=True) for number in (seed, round, client))
    return int.from_bytes(
        hashlib.blake2b(numbers + purpose.encode(), digest_size=8, person=b"fedcams.key").digest(), "little"
    )


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """Return a new counter-based generator, seeded with the key that `derive` gives for these arguments.

    Arguments:
        seed: that of the run.
        purpose: what the numbers are for.
        round: the round, from 1.
        client: the client's number.

    Returns:
        NumPy's Philox generator.

    Examples:
        >>> from fedcams.keys import generator
        >>> int(generator(1, "example").integers(10)) == int(generator(1, "example").integers(10))
        True
    """
    return np.random.Generator(np.random.Philox(key=derive(seed, purpose, round, client)))


def permutations(
    count: int, n: int, seed: int, purpose: str, round: int = 0, client: int = 0
) -> list[NDArray[np.int64]]:
    """Return random orders of 0 … n-1: those of `generator(...).permutation(n)`, without its start-up cost.

    Arguments:
        count: how many orders.
        n: how many numbers in each.
        seed: that of the run.
        purpose: what the orders are for.
        round: the round, from 1.
        client: the client's number.

    Returns:
        `count` arrays `[n]`.

    Examples:
        >>> from fedcams.keys import permutations
        >>> [sorted(order.tolist()) for order in permutations(2, 3, seed=1, purpose="example")]
        [[0, 1, 2], [0, 1, 2]]
    """
    _REUSED.rekey(derive(seed, purpose, round, client))
    return [_REUSED.rng.permutation(n) for _ in range(count)]


@contextlib.contextmanager
def torch_generator(devices: Sequence[device] = ()) -> Iterator[None]:
    """Use torch's global generator, and those of these GPUs, exclusively; their state is restored afterwards.

    Random layers and initial weights draw from it. Threads take turns.

    Arguments:
        devices: GPUs whose generators are restored too.

    Returns:
        A context manager.

    Examples:
        >>> import torch
        >>> from fedcams.keys import torch_generator
        >>> before = torch.get_rng_state()
        >>> with torch_generator():
        ...     drawn = torch.rand(3)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    with _TURNS, torch.random.fork_rng(devices=list(devices)):
        yield


def seed_torch(seed: int, device: device) -> None:
    """Seed the generators that a model on this device draws from; use it inside `torch_generator`.

    `torch.manual_seed` would seed those of all devices, and first load torch's compiler, which takes seconds.

    Arguments:
        seed: a key, such as `derive` returns.
        device: where the model is.

    Returns:
        Nothing.

    Examples:
        >>> import torch
        >>> from fedcams.keys import seed_torch, torch_generator
        >>> with torch_generator():
        ...     seed_torch(7, torch.device("cpu"))
        ...     first = torch.rand(3)
        ...     seed_torch(7, torch.device("cpu"))
        ...     torch.equal(torch.rand(3), first)
        True
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


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
