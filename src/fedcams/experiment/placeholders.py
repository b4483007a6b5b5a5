"""What stands in an experiment for a model and data that were given from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fedcams.errors import SpecError
from fedcams.models import Model
from fedcams.registry import register
from fedcams.tasks import Task, TaskData


@register("python")
@dataclass(frozen=True)
class PythonTask(Task):
    """Data that were given to `fedcams.simulate`. Only the program that did so can load them."""

    internal = True

    def load(self, folder: Path | None = None) -> TaskData:
        """Refuse: the data are not here."""
        raise SpecError("task=python: the data were given from Python; call fedcams.simulate, which has them")


@register("python")
@dataclass(frozen=True)
class PythonModel(Model):
    """A module that was given to `fedcams.simulate`. Only the program that did so can make it."""

    internal = True

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Refuse: the module is not here."""
        raise SpecError("model=python: the model was given from Python; call fedcams.simulate, which has it")
