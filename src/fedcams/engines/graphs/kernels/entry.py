"""Kernels that compile in parallel: a model has dozens, and one after the other they take most of a minute."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton

Calls = list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]
"""The kernel, grid, arguments and constants of each call."""
_noted: Calls | None = None
"""Calls to compile; None means that kernels are started. Shared by all threads, because autograd has its own."""


class Entry:
    """A kernel that is started from the host: `kernel[grid](...)`, as in Triton.

    The alignment of `sizes` and `rates` does not help the compiler, because only single numbers are read from them. Not
    all lanes of a cohort begin at a multiple of 16 bytes, so specializing would compile half of the kernels twice.
    """

    def __init__(self, function: Any) -> None:
        self.jitted = triton.jit(function, do_not_specialize_on_alignment=("sizes", "rates"))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if _noted is None:
            return self.jitted[grid]
        noted = _noted
        return lambda *arguments, **constants: noted.append((self.jitted, grid, arguments, constants))


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Start no kernels inside the `with` block; at its end, compile those that were called, with one thread per core.

    Results inside the block are meaningless; only the calls matter. Triton releases the interpreter lock for most of
    its work: 8 kernels took 7.2 s one after the other and 3.7 s on two cores.
    """
    global _noted
    calls = _noted = []
    try:
        yield
    finally:
        _noted = None
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        _compile(calls)
    if [kernel for kernel, *_ in calls if _forget_failed(kernel)]:
        _compile(calls)  # on one thread: Python 3.11 before 3.11.8 sometimes fails to parse on several threads


def _compile(calls: Calls) -> None:
    for kernel, grid, arguments, constants in calls:
        kernel.warmup(*arguments, grid=grid, **constants)


def _forget_failed(kernel: Any) -> bool:
    """Remove failed compilations, which Triton caches and raises at every start; return whether there were any."""
    caches = [cache for cache, *_ in kernel.device_caches.values()]
    failed = [(cache, key) for cache in caches for key, each in cache.items() if _has_failed(each)]
    for cache, key in failed:
        del cache[key]
    return bool(failed)


def _has_failed(compiled: Any) -> bool:
    future = vars(compiled).get("future")
    return future is not None and future.exception() is not None
