"""Placeholders in an experiment for a model and data that were passed to `fedcams.simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedcams.errors import SpecError
from fedcams.models import Model
from fedcams.registry import register
from fedcams.tasks import Task, TaskData

if TYPE_CHECKING:
    from torch import nn


@register("python")
@dataclass(frozen=True)
class PythonTask(Task):
    """Data that was passed to `fedcams.simulate`; only the program that passed it can load it."""

    internal = True

    def load(self, folder: Path | None = None) -> TaskData:
        """Refuse: the data is only known to the program that called `fedcams.simulate`."""
        raise SpecError("task=python: the data was given from Python; call fedcams.simulate with it again")


@register("python")
@dataclass(frozen=True)
class PythonModel(Model):
    """A module that was passed to `fedcams.simulate`; only the program that passed it can build it."""

    internal = True

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Refuse: the module is only known to the program that called `fedcams.simulate`."""
        raise SpecError("model=python: the model was given from Python; call fedcams.simulate with it again")
