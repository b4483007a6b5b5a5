"""Threads for our kernels: compiled on first use, cached on disk, safe from several threads and after a fork.

Numba's own parallel layers are not used: one aborts when two threads enter it, the other when a process forks. Instead,
kernels release the interpreter lock, and a small pool runs them over ranges of the vector. (Torch's own operations are
safe in a forked child only with `torch.set_num_threads(1)`; this limit is torch's, not fedcams's.)
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import numpy as np
import torch

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S")
T = TypeVar("T")

BLOCK = 1 << 16
"""Ranges start at multiples of this; partial sums are per block, so results do not depend on the thread count."""

NO_CACHE = (
    "there is no writable folder for compiled kernels, so every process compiles them again, which takes seconds; "
    "set NUMBA_CACHE_DIR to a writable folder"
)
RANGES = 4  # per thread
EXTRA_THREADS = 2  # beyond one per core, for work that mostly waits

_pool: ThreadPoolExecutor | None = None


class Kernel:
    """A loop over arrays. Numba is loaded on the first call, so reports and lists, which call no kernel, skip it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Run the loop on these arguments, compiled for their types."""
        return self.compiled(*args)

    @functools.cached_property
    def compiled(self) -> Any:
        """The loop as Numba's dispatcher."""
        from fedcams.bits.compiling import compiled

        return compiled(self._function)

    @property
    def _numba_type_(self) -> Any:
        """The type that Numba sees when another kernel calls this one."""
        return self.compiled._numba_type_


def kernel(function: F) -> F:
    """Turn a loop over arrays into a kernel."""
    return cast(F, Kernel(function))


def trailing_zeros(word: np.uint64) -> int:
    """Return how many zeros are below the lowest one of a word, or 64 if it has none; one instruction in kernels."""
    return (int(word) & -int(word)).bit_length() - 1 if word else 64


def map_ranges(size: int, work: Callable[[int, int], T], threads: int | None = None) -> list[T]:
    """Call `work(start, stop)` for block-aligned ranges of [0, size) and return the results in order.

    It uses as many threads as torch, unless `threads` is given.

    There are more ranges than threads, and each thread takes the next range when it is free. Torch's threads spin for
    milliseconds after each operation, and a range that waits for a core must not hold up the others.
    """
    threads = threads or torch.get_num_threads()
    count = min(RANGES * threads, -(-size // BLOCK)) if threads > 1 else 1
    if count <= 1:
        return [work(0, size)]
    cuts = [size * i // count // BLOCK * BLOCK for i in range(count)] + [size]
    return map_threads(range(count), lambda i: work(cuts[i], cuts[i + 1]), threads)


def map_threads(items: Sequence[S], work: Callable[[S], T], threads: int | None = None) -> list[T]:
    """Call `work(item)` for every item, on as many threads as torch has, and return the results in order."""
    threads = threads or torch.get_num_threads()
    results: dict[int, T] = {}
    turns = itertools.count()

    def run() -> None:
        while (i := next(turns)) < len(items):
            results[i] = work(items[i])

    helpers = [_workers().submit(run) for _ in range(min(threads, len(items)) - 1)]
    try:
        run()
        for helper in helpers:
            if not helper.cancel():  # cancel those that have not started: there is no work left
                helper.result()
    except BaseException:
        wait([helper for helper in helpers if not helper.cancel()])  # the caller may free the memory they use
        raise
    return [results[i] for i in range(len(items))]


def in_background(work: Callable[[], T]) -> Future[T]:
    """Call `work` on another thread and return its future at once."""
    return _workers().submit(work)


def _workers() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor((os.cpu_count() or 1) + EXTRA_THREADS, thread_name_prefix="fedcams")
    return _pool


def _forget_pool() -> None:
    """Drop the pool in a forked child, which has none of its parent's threads."""
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_pool)
