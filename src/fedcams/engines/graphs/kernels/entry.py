"""Kernels that can be compiled side by side: a model has dozens, and one after the other they take most of a minute."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton

Calls = list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]
"""Kernel, grid, arguments and constants of each."""
_noted: Calls | None = None
"""Calls that wait to be compiled; None: kernels are started. For all threads, since autograd has one of its own."""


class Entry:
    """A kernel that is started from the host: `kernel[grid](...)`, as Triton has it.

    Where `sizes` and `rates` lie is of no use to the compiler: only single numbers are read there, and not all lanes of
    a cohort begin at a multiple of 16 bytes, so that half the kernels would be compiled twice.
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
    """Inside, no kernel is started; at the end those that would have been are compiled, a thread for each core.

    What is computed inside means nothing, only which kernels it takes. Triton releases the interpreter lock for most of
    its work: 8 kernels took 7.2 s one after the other and 3.7 s on two cores.
    """
    global _noted
    if not hasattr(triton, "AsyncCompileMode"):  # before Triton 3.5 kernels are compiled as they come
        yield
        return
    calls = _noted = []
    try:
        yield
    finally:
        _noted = None
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        _compile(calls)
    if [kernel for kernel, *_ in calls if _forget_failed(kernel)]:
        _compile(calls)  # alone: releases of Python 3.11 before 3.11.8 now and then refuse to parse on several threads


def _compile(calls: Calls) -> None:
    for kernel, grid, arguments, constants in calls:
        kernel.warmup(*arguments, grid=grid, **constants)


def _forget_failed(kernel: Any) -> bool:
    """Whether something was to be forgotten: Triton keeps what failed, and fails with it whenever it is started."""
    caches = [cache for cache, *_ in kernel.device_caches.values()]
    failed = [(cache, key) for cache in caches for key, each in cache.items() if _has_failed(each)]
    for cache, key in failed:
        del cache[key]
    return bool(failed)


def _has_failed(compiled: Any) -> bool:
    future = vars(compiled).get("future")
    return future is not None and future.exception() is not None
