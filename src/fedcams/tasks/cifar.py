"""CIFAR-10 and CIFAR-100, read from the official files for Python.

The files are pickles, and a pickle can call any function of any module. The reader below maps the five names that
arrays need to stand-ins and refuses every other name, so no code from a file is executed.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from fedcams.errors import DataError
from fedcams.registry import flag, register
from fedcams.tasks.base import CropFlip, Task, TaskData, accuracy, check_examples, cross_entropy, data_folder

if TYPE_CHECKING:
    from torch import Tensor

SHAPE = (3, 32, 32)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # for both, as in the paper's experiments
SOURCE = "https://www.cs.toronto.edu/~kriz/cifar.html"


@dataclass(frozen=True)
class Cifar(Task):
    """What CIFAR-10 and CIFAR-100 share; a subclass names its files."""

    augment: bool = flag(True, doc="random crops with 4 pixels of padding and horizontal flips")

    reference = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"
    model = "resnet18"
    classes: ClassVar[int]
    subfolder: ClassVar[str]
    train_files: ClassVar[tuple[str, ...]]
    test_files: ClassVar[tuple[str, ...]]
    label_key: ClassVar[bytes]

    def load(self, folder: Path | None = None) -> TaskData:
        train, test = (self._read(data_folder(folder), names) for names in (self.train_files, self.test_files))
        return TaskData(
            *train,
            *test,
            classes=self.classes,
            loss=cross_entropy,
            metric=accuracy,
            mean=torch.tensor(MEAN).view(3, 1, 1),
            std=torch.tensor(STD).view(3, 1, 1),
            augment=CropFlip() if self.augment else None,
        )

    def _read(self, folder: Path, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Return the images uint8 `[n, 3, 32, 32]` and labels int64 `[n]` of some files together."""
        paths = [folder / self.subfolder / name for name in names]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise DataError(
                f"{self.name}: {folder / self.subfolder} has no {', '.join(missing)}; unpack the Python version from "
                f"{SOURCE} into {folder}, or name another folder with --data DIR or FEDCAMS_DATA=DIR"
            )
        images, labels = zip(*(self._read_file(path) for path in paths), strict=True)
        return torch.cat(images), torch.cat(labels)

    def _read_file(self, path: Path) -> tuple[Tensor, Tensor]:
        content = unpickle(path)
        if not {b"data", self.label_key} <= content.keys():
            found = ", ".join(map(repr, content)) or "nothing"
            raise DataError(f"{path} holds {found}; expected: b'data' and {self.label_key!r}")
        x, y = _images(path, content[b"data"]), self._labels(path, content[self.label_key])
        check_examples(str(path), x, y, SHAPE, self.classes)
        return x, y

    def _labels(self, path: Path, labels: object) -> Tensor:
        if not isinstance(labels, list):
            raise DataError(
                f"{path}: {self.label_key!r} has type {type(labels).__name__}; expected: a list of integers"
            )
        for row, label in enumerate(labels):
            if type(label) is not int or not 0 <= label < self.classes:
                raise DataError(f"{path}: label {label!r} in row {row}; allowed: 0 to {self.classes - 1}")
        return torch.tensor(labels, dtype=torch.int64)


def _images(path: Path, data: object) -> Tensor:
    """`[n, 3072]`, the red plane, then green, then blue -> `[n, 3, 32, 32]`."""
    if not isinstance(data, np.ndarray) or data.shape[1:] != (math.prod(SHAPE),):
        found = f"shape {list(data.shape)}" if isinstance(data, np.ndarray) else f"type {type(data).__name__}"
        raise DataError(f"{path}: b'data' has {found}; expected: an array [n, {math.prod(SHAPE)}]")
    return torch.from_numpy(data).view(-1, *SHAPE)


@register("cifar10")
@dataclass(frozen=True)
class Cifar10(Cifar):
    """CIFAR-10: 50,000 + 10,000 colour images of 3x32x32 pixels in 10 classes."""

    classes = 10
    subfolder = "cifar-10-batches-py"
    train_files = tuple(f"data_batch_{i}" for i in range(1, 6))
    test_files = ("test_batch",)
    label_key = b"labels"
    examples = ("cifar10", "cifar10(augment=false)")
    refused = (("cifar10(augment=1)", "allowed: true or false"), ("cifar10(classes=5)", "has no key 'classes'"))


@register("cifar100")
@dataclass(frozen=True)
class Cifar100(Cifar):
    """CIFAR-100: 50,000 + 10,000 colour images of 3x32x32 pixels in 100 classes (fine labels)."""

    classes = 100
    subfolder = "cifar-100-python"
    train_files = ("train",)
    test_files = ("test",)
    label_key = b"fine_labels"
    examples = ("cifar100", "cifar100(augment=false)")
    refused = (("cifar100(coarse=true)", "has no key 'coarse'"),)


# -- reading pickles of arrays -----------------------------------------------------------------------------------


class _Dtype:
    """Replaces `numpy.dtype`: keeps the name and drops byte order and the like, which single bytes do not have."""

    def __init__(self, name: Any, *options: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        pass


class _Array:
    """Stands for an array of bytes; like NumPy's it is created empty, and its state follows."""

    value = np.empty(0, np.uint8)

    def __init__(self, *options: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype) or dtype.name not in ("u1", b"u1"):
            raise ValueError("an array whose type is not uint8")
        self.value = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C").copy()


def _encode(text: str, encoding: str) -> bytes:
    """Stands for `_codecs.encode`, which Python 3 uses for bytes in the older protocols."""
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
            raise DataError(f"it refers to {module}.{name}, which a file of arrays never does; do not trust its source")
        return _STAND_INS[module, name]


def unpickle(path: Path) -> dict[Any, Any]:
    """Return the dict in a pickle: byte strings as bytes, arrays as writable uint8 arrays; runs none of its code."""
    try:
        with path.open("rb") as file:
            content = _Reader(file, encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{path} cannot be read: {str(error) or type(error).__name__}; download it again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}; expected: a dict; download it again")
    return {key: value.value if isinstance(value, _Array) else value for key, value in content.items()}
