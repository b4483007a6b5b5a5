"""Reads the pickled dicts of arrays that CIFAR comes in, and runs nothing that a file asks for.

A pickle may name any function of any module and call it. Here the five names that arrays need lead to the stand-ins
below, every other name is refused, and NumPy itself never sees what the file says about types and memory.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from fedcams.errors import DataError


class _Dtype:
    """Stands for `numpy.dtype`: keeps the name and forgets byte order and the like, which single bytes do not have."""

    def __init__(self, name: Any, *options: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stands for an array of bytes; like NumPy's it is made empty, and its state follows."""

    value = np.empty(0, np.uint8)

    def __init__(self, *options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or dtype.name not in ("u1", b"u1"):
            raise ValueError("an array of another type than uint8")
        self.value = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C").copy()


def _encode(text: str, encoding: str) -> bytes:
    """Stands for `_codecs.encode`, by which Python 3 spells bytes in the older protocols."""
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise DataError(f"it asks for {module}.{name}, as no file of arrays does; do not trust where it came from")
        return _STAND_INS[module, name]


def unpickle(path: Path) -> dict[Any, Any]:
    """The dict in a file, its byte strings as bytes and its arrays as writable uint8 arrays."""
    try:
        with path.open("rb") as file:
            content = _Reader(file, encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise whatever its opcodes come upon
        raise DataError(f"{path} cannot be read: {str(error) or type(error).__name__}; download it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}; expected: a dict; download it again")
    return {key: value.value if isinstance(value, _Array) else value for key, value in content.items()}
