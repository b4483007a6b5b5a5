"""What a model is: a module made from the shape of an example and the number of classes, the same for the same seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, cast

import torch
from torch import nn

from fedcams import keys
from fedcams.errors import SpecError
from fedcams.registry import Spec, resolve


class Model(Spec, ABC):
    """The root of all models. Subclasses write `build`.

    Modules run under `torch.func`: nothing in place, no control flow that depends on data. They use no operation whose
    gradient on a GPU depends on the order of threads, so adaptive pooling is written as a mean.
    """

    kind = "model"
    reference: ClassVar[str] = ""
    """Where it was published."""

    @abstractmethod
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """A new module, `[n, *shape] -> [n, classes]`, initialised from the global generator: call `models.build`."""

    def image_channels(self, shape: tuple[int, ...], smallest: int = 1) -> int:
        """The channels of an image `[c, h, w]`; refuses other shapes, and sides shorter than `smallest`."""
        if len(shape) != 3 or min(shape[1:]) < smallest:
            raise SpecError(
                f"{self}: an example has shape {list(shape)}; it takes images [channels, height, width] "
                f"of at least {smallest}x{smallest}; mlp and linear take every shape"
            )
        return shape[0]


def model(spec: str | Model) -> Model:
    """The model that a spec string such as `mlp(hidden=64)` spells."""
    return cast(Model, resolve("model", spec))


def build(spec: str | Model, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """The module on the CPU, a function of its arguments alone; the global generators are left as they were."""
    if not shape or min(shape) < 1 or classes < 1:
        raise SpecError(f"{spec}: shape={list(shape)}, classes={classes}: give sizes of at least 1")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # torch.manual_seed would seed the generators of every GPU as well, which the fork does not bring back.
        torch.default_generator.manual_seed(keys.derive(seed, "model"))
        return model(spec).build(tuple(shape), classes)
