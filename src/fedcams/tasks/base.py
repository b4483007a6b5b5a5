"""What a task is: examples to train and to test on, a loss and a metric. It knows nothing of models and federation."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from fedcams.errors import DataError
from fedcams.registry import Spec, resolve
from fedcams.tasks.augment import Augmentation

Score = Callable[[Tensor, Tensor], Tensor]
"""Outputs `[n, ...]` and targets `[n]` -> a tensor."""


@dataclass(frozen=True, eq=False)
class TaskData:
    """A loaded task.

    Images are uint8 `[n, c, h, w]`, other features float32 `[n, ...]`; targets are int64 `[n]`. Keep examples as they
    are, augment them if `augment` is there, and give the model what `prepare` makes of them.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    loss: Score
    """One for each example, `[n]`."""
    metric: Score
    """One score for each example, `[n]`, larger is better: 1.0 where the class is right."""
    mean: Tensor | None = None
    """`[c, 1, 1]`, on the scale of pixels from 0 to 1; None leaves that scale as it is."""
    std: Tensor | None = None
    augment: Augmentation | None = None
    groups: Tensor | None = None
    """`[n]`, whose each training example is by nature, for the partition `natural`; None where the data do not say."""

    def __post_init__(self) -> None:
        check_examples("train", self.train_x, self.train_y, self.shape, self.classes)
        check_examples("test", self.test_x, self.test_y, self.shape, self.classes)
        if self.groups is not None and (self.groups.shape != self.train_y.shape or self.groups.dtype != torch.int64):
            found = f"{self.groups.dtype} {list(self.groups.shape)}"
            raise DataError(f"train: the groups are {found}; expected: int64 {list(self.train_y.shape)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.train_x.shape[1:])

    def prepare(self, x: Tensor) -> Tensor:
        """`[..., *shape]` as the model takes it: pixels to float32 and normalised, floats as they are."""
        if x.dtype != torch.uint8:
            return x
        if self.mean is None or self.std is None:
            return x.float() / 255
        # A GPU divides by a number by multiplying with its inverse; division by a tensor rounds alike everywhere.
        mean, std = self.mean.to(x.device), self.std.to(x.device)
        return (x.float() - 255 * mean) / (255 * std)

    def to(self, device: torch.device | str) -> TaskData:
        """The same with all tensors on a device."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **moved)


def check_examples(where: str, x: Tensor, y: Tensor, shape: tuple[int, ...], classes: int) -> None:
    """Refuses examples that are not `[n, *shape]` of uint8 or float32 with n > 0 targets from 0 to classes-1."""
    if len(x) == 0 or tuple(x.shape[1:]) != shape or x.dtype not in (torch.uint8, torch.float32):
        expected = f"uint8 or float32 [n, {', '.join(map(str, shape))}], n > 0"
        raise DataError(f"{where}: the examples are {x.dtype} {list(x.shape)}; expected: {expected}")
    if y.shape != (len(x),) or y.dtype != torch.int64:
        raise DataError(f"{where}: the targets are {y.dtype} {list(y.shape)}; expected: int64 [{len(x)}]")
    low, high = (int(end) for end in y.aminmax())
    if low < 0 or high >= classes:
        raise DataError(f"{where}: targets reach from {low} to {high}; allowed: 0 to {classes - 1}")


class Task(Spec, ABC):
    """The root of all tasks. Subclasses write `load`."""

    kind = "task"
    reference: ClassVar[str] = ""
    """Where the data or the problem come from."""
    model: ClassVar[str]
    """The spec of a model that fits."""

    @abstractmethod
    def load(self, folder: Path | None = None) -> TaskData:
        """The data, on the CPU; `folder` is where downloaded files lie, by default `FEDCAMS_DATA`, else `data`."""


def task(spec: str | Task) -> Task:
    """The task that a spec string such as `cifar10` spells."""
    return cast(Task, resolve("task", spec))


def data_folder(folder: Path | None) -> Path:
    """Where downloaded data lie: as told, else as the environment says, else `data` in the working directory."""
    return Path(os.environ.get("FEDCAMS_DATA", "data")) if folder is None else Path(folder)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """`[n, classes, ...]` and `[n, ...]` -> the loss of each target."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """`[n, classes, ...]` and `[n, ...]` -> 1.0 where the largest output is the target, else 0.0."""
    return (outputs.argmax(1) == targets).float()
