"""What a model is: a module made from the shape of an example, the number of classes and a seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from fedcams import keys
from fedcams.errors import SpecError
from fedcams.registry import Spec

if TYPE_CHECKING:
    from torch import nn


class Model(Spec, ABC):
    """Base class of all models. A subclass implements `build`.

    Modules run under `torch.func`: nothing in place, no control flow that depends on data. They use no operation whose
    gradient on a GPU depends on the order of threads, so adaptive pooling is written as a mean.

    Examples:
        >>> from fedcams.models import model
        >>> sum(p.numel() for p in model("linear").build((8, 8), 10).parameters())
        650
    """

    kind = "model"
    reference: ClassVar[str] = ""
    """The paper that describes the model."""
    takes_tokens: ClassVar[bool] = False
    """Whether it takes sequences of integers `[n, length]`, as text, and returns `[n, length, classes]`."""

    @abstractmethod
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return a new module, `[n, *shape] -> [n, classes]`, drawn from the global generator; see `models.build`.

        A model that takes tokens returns `[n, length, classes]`; its tokens are integers below `classes`.
        """

    def image_channels(self, shape: tuple[int, ...], smallest: int = 1) -> int:
        """Return the channels of an image `[c, h, w]`; refuse other shapes and sides shorter than `smallest`."""
        if len(shape) != 3 or min(shape[1:]) < smallest:
            raise SpecError(
                f"{self}: an example has shape {list(shape)}; it takes images [channels, height, width] "
                f"of at least {smallest}x{smallest}; mlp and linear take every shape"
            )
        return shape[0]

    def sequence_length(self, shape: tuple[int, ...]) -> int:
        """Return the length of a sequence of tokens `[length]`; refuse other shapes."""
        if len(shape) != 1:
            raise SpecError(
                f"{self}: an example has shape {list(shape)}; it takes sequences of tokens [length], such as those of "
                "the task shakespeare"
            )
        return shape[0]


def model(spec: str | Model) -> Model:
    """Return the model that a spec string names.

    Arguments:
        spec: such as `mlp(hidden=64)`; a model is returned unchanged.

    Returns:
        The model, a frozen dataclass; `build` makes the module.

    Raises:
        SpecError: for an unknown name or key, or a value out of range.

    Examples:
        >>> from fedcams.models import model
        >>> model("mlp(hidden=64)").hidden
        64
    """
    return Model.parse(spec)


def build(spec: str | Model, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """Return the module for a spec, on the CPU; it depends on the arguments only and leaves global generators alone.

    Arguments:
        spec: a model, or its spec string such as `mlp(hidden=64)`.
        shape: the shape of one example.
        classes: the number of outputs.
        seed: seeds the initial weights.

    Returns:
        A new module.

    Raises:
        SpecError: for an unknown model, or one that does not fit the shape.

    Examples:
        >>> from fedcams.models import build
        >>> sum(p.numel() for p in build("linear", shape=(8, 8), classes=10, seed=1).parameters())
        650
    """
    if not shape or min(shape) < 1 or classes < 1:
        raise SpecError(f"{spec}: shape={list(shape)}, classes={classes}: give sizes of at least 1")
    with keys.torch_generator(), torch.device("cpu"):
        # torch.manual_seed would seed the generators of every GPU as well, which the fork does not bring back.
        torch.default_generator.manual_seed(keys.derive(seed, "model"))
        return model(spec).build(tuple(shape), classes)
