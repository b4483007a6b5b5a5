"""What stands in an experiment for a model that was given from Python."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedcams.errors import SpecError
from fedcams.models.base import Model
from fedcams.registry import register


@register("python")
@dataclass(frozen=True)
class PythonModel(Model):
    """A module that was given to `fedcams.simulate`. Only the program that did so can make it."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        raise SpecError("model=python: the model was given from Python; call fedcams.simulate, which has it")
