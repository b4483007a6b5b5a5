"""The base class of tasks: examples for training and testing, a loss, a metric, and perhaps an augmentation.

Augmentation draws random numbers on the host, and changes images on the device that they are on.
"""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch

from fedcams.errors import DataError, SpecError
from fedcams.registry import Spec

if TYPE_CHECKING:
    from torch import Tensor

Score = Callable[["Tensor", "Tensor"], "Tensor"]
"""Outputs `[n, ...]` and targets `[n]` -> a tensor."""


@dataclass(frozen=True, eq=False)
class TaskData:
    """The data of a task.

    Images are uint8 `[n, c, h, w]`, tokens of text int64 `[n, length]`, other features float32 `[n, ...]`. Targets are
    int64 `[n]`, or `[n, length]` for tokens; those of a regression are float32 `[n]`. Store examples as they are,
    augment them if `augment` is given, and pass the model what `prepare` returns.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    """The number of outputs of a model: 1 for regression."""
    loss: Score
    """Returns one loss per example, `[n]`."""
    metric: Score
    """Returns one score per example, `[n]`, larger is better: 1.0 if the class is right."""
    mean: Tensor | None = None
    """`[c, 1, 1]`, on the scale of pixels from 0 to 1; None keeps that scale."""
    std: Tensor | None = None
    augment: Augmentation | None = None
    groups: Tensor | None = None
    """`[n]`, the group (writer, user) of each training example, for the partition `natural`; None if unknown."""

    def __post_init__(self) -> None:
        check_examples("train", self.train_x, self.train_y, self.shape, self.classes)
        check_examples("test", self.test_x, self.test_y, self.shape, self.classes)
        count = len(self.train_y)
        if self.groups is not None and (self.groups.shape != (count,) or self.groups.dtype != torch.int64):
            found = f"{self.groups.dtype} {list(self.groups.shape)}"
            raise DataError(f"train: the groups are {found}; expected: int64 [{count}]")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.train_x.shape[1:])

    @property
    def has_tokens(self) -> bool:
        """Whether examples are sequences of integers, as text is."""
        return self.train_x.dtype == torch.int64

    @property
    def labels(self) -> Tensor:
        """Return the label of each example for partitions, `[n]`: its class; without one its group, or 0 for all."""
        if self.train_y.dim() == 1 and self.train_y.dtype == torch.int64:
            return self.train_y
        return torch.zeros(len(self.train_y), dtype=torch.int64) if self.groups is None else self.groups

    def prepare(self, x: Tensor) -> Tensor:
        """Return `x [..., *shape]` as the model takes it: pixels as normalised float32, floats and tokens unchanged."""
        if x.dtype != torch.uint8:
            return x
        if self.mean is None or self.std is None:
            return x.float() / 255
        # a GPU divides by a number by multiplying with its inverse; division by a tensor rounds the same everywhere
        mean, std = self.mean.to(x.device), self.std.to(x.device)
        return (x.float() - 255 * mean) / (255 * std)

    def to(self, device: torch.device | str) -> TaskData:
        """Return the same data with all tensors on a device."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)
        }
        return dataclasses.replace(self, **moved)


def check_examples(where: str, x: Tensor, y: Tensor, shape: tuple[int, ...], classes: int) -> None:
    """Refuse x unless it is `[n, *shape]`, n > 0, and y unless it is n targets below `classes`.

    x is of uint8 or float32, or int64 for tokens, which may have a target each. With one class, for regression, targets
    may be finite floats.
    """
    if len(x) == 0 or tuple(x.shape[1:]) != shape or x.dtype not in (torch.uint8, torch.float32, torch.int64):
        expected = f"uint8 or float32 [n, {', '.join(map(str, shape))}], n > 0"
        raise DataError(f"{where}: the examples are {x.dtype} {list(x.shape)}; expected: {expected}")
    if classes == 1 and y.dtype == torch.float32 and y.shape == (len(x),):
        if not bool(y.isfinite().all()):
            raise DataError(f"{where}: the targets have NaN or infinity; leave such examples out")
        return
    one_each = x.dtype == torch.int64 and y.shape == x.shape
    if not (y.shape == (len(x),) or one_each) or y.dtype != torch.int64:
        wanted = "int64 or float32" if classes == 1 else "int64"
        raise DataError(f"{where}: the targets are {y.dtype} {list(y.shape)}; expected: {wanted} [{len(x)}]")
    low, high = (int(end) for end in y.aminmax())
    if low < 0 or high >= classes:
        raise DataError(f"{where}: targets range from {low} to {high}; allowed: 0 to {classes - 1}")


class Task(Spec, ABC):
    """The base class of all tasks. A subclass implements `load`.

    Examples:
        >>> from fedcams.tasks import task
        >>> task("digits").load().train_x.shape[1:]
        torch.Size([1, 8, 8])
    """

    kind = "task"
    reference: ClassVar[str] = ""
    """The paper that describes the data or the problem."""
    model: ClassVar[str]
    """The spec of a model that fits the data."""

    @abstractmethod
    def load(self, folder: Path | None = None) -> TaskData:
        """Return the data, on the CPU. `folder` holds downloaded files; default: `FEDCAMS_DATA`, else `data`."""


def task(spec: str | Task) -> Task:
    """Return the task that a spec string names.

    Arguments:
        spec: such as `cifar10`; a task is returned unchanged.

    Returns:
        The task, a frozen dataclass; `load` reads its data.

    Raises:
        SpecError: for an unknown name or key, or a value out of range.

    Examples:
        >>> from fedcams.tasks import task
        >>> str(task("digits"))
        'digits'
    """
    return Task.parse(spec)


def data_folder(folder: Path | None) -> Path:
    """Return the folder of downloaded data: the given one, else `FEDCAMS_DATA`, else `data` in this directory."""
    return Path(os.environ.get("FEDCAMS_DATA", "data")) if folder is None else Path(folder)


def class_axis(outputs: Tensor, targets: Tensor) -> int:
    """Return the axis of the classes: -1 for outputs `[n, T, classes]` with targets `[n, T]`, otherwise 1.

    Arguments:
        outputs: scores.
        targets: class numbers.

    Returns:
        The axis; where both fit, it is 1, as in torch.

    Examples:
        >>> import torch
        >>> from fedcams.tasks import class_axis
        >>> class_axis(torch.zeros(2, 5, 3), torch.zeros(2, 5))
        -1
    """
    last = outputs.dim() > 2 and outputs.shape[:-1] == targets.shape and outputs.shape[2:] != targets.shape[1:]
    return -1 if last else 1


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each target.

    Arguments:
        outputs: scores `[n, classes, ...]` or `[n, ..., classes]`.
        targets: class numbers `[n, ...]`.

    Returns:
        The losses `[n, ...]`.

    Examples:
        >>> import torch
        >>> from fedcams.tasks import cross_entropy
        >>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor([1.3863, 1.3863])
    """
    return torch.nn.functional.cross_entropy(
        outputs.movedim(class_axis(outputs, targets), 1), targets, reduction="none"
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1.0 where the largest output is the target, else 0.0.

    Arguments:
        outputs: scores, in the shapes that `cross_entropy` takes.
        targets: class numbers.

    Returns:
        One number per target.

    Examples:
        >>> import torch
        >>> from fedcams.tasks import accuracy
        >>> accuracy(torch.eye(2), torch.tensor([0, 0]))
        tensor([1., 0.])
    """
    return (outputs.argmax(class_axis(outputs, targets)) == targets).float()


# -- augmentation ------------------------------------------------------------------------------------------------


class Augmentation(Protocol):
    """A random change of images, separate from its random numbers: equal draws give equal images."""

    def draw(self, rng: np.random.Generator, n: int) -> Tensor:
        """Draw one row of integers for each of n examples."""

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        """Return the examples `[n, ...]`, changed as the draws say."""


@dataclass(frozen=True)
class CropFlip:
    """Crop the original size out of the image with a black border, then mirror it half of the time."""

    padding: int = 4

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise SpecError(f"padding={self.padding}; give 0 or more pixels")

    def draw(self, rng: np.random.Generator, n: int) -> Tensor:
        """Draw int64 `[n, 3]`: first row and first column of the crop, from 0 to 2·padding, and 1 for a flip."""
        side = 2 * self.padding + 1
        return torch.from_numpy(rng.integers(0, (side, side, 2), size=(n, 3)))

    def apply(self, x: Tensor, draws: Tensor) -> Tensor:
        """Return `x [..., n, c, h, w]`, cropped and flipped by `draws [..., n, 3]` on its device, before `prepare`."""
        top, left, flip = draws.unsqueeze(-2).unbind(-1)  # each [..., n, 1]
        height, width = x.shape[-2:]
        across = torch.arange(width, device=x.device)
        rows = top + torch.arange(height, device=x.device)
        columns = left + torch.where(flip == 1, width - 1 - across, across)
        # One gather over the pixels of the padded planes, [..., n, c, (h+2p)·(w+2p)].
        places = rows.unsqueeze(-1) * (width + 2 * self.padding) + columns.unsqueeze(-2)
        planes = torch.nn.functional.pad(x, [self.padding] * 4).flatten(-2)
        index = places.flatten(-2).unsqueeze(-2).expand(*x.shape[:-2], -1)
        return planes.gather(-1, index).view(x.shape)
