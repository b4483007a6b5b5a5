"""Compiles kernels with Numba: the only module that imports it, loaded when a kernel is called for the first time."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from fedcams.bits.parallel import NO_CACHE, trailing_zeros

SETTINGS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "nsz"}}
"""Sums may be reordered within a block; nothing else is relaxed."""


def compiled(function: Callable[..., Any]) -> Any:
    """Return a loop as Numba's dispatcher, which compiles it for the types of its arguments or loads it from disk."""
    try:
        return numba.njit(cache=True, **SETTINGS)(function)
    except RuntimeError:  # Numba can write neither next to the function's file nor to the home folder
        _say_that_nothing_is_kept()
        return numba.njit(**SETTINGS)(function)


@functools.cache  # warns once: Python forgets its past warnings whenever filters change between two kernels
def _say_that_nothing_is_kept() -> None:
    warnings.warn(NO_CACHE, stacklevel=1)


def _trailing_zeros(typing: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], cgutils.false_bit)

    return types.int64(types.uint64), generate


_instruction: Any = intrinsic(_trailing_zeros)


@overload(trailing_zeros)
def _in_one_instruction(word: Any) -> Any:
    def count(word: Any) -> Any:  # Numba wants the same signature, with its annotations
        return _instruction(word)

    return count
