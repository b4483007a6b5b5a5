"""What stands in an experiment for a model and data that were given from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedcams.errors import SpecError
from fedcams.registry import register
from fedcams.tasks.base import Task, TaskData


@register("python")
@dataclass(frozen=True)
class PythonTask(Task):
    """Data that were given to `fedcams.simulate`. Only the program that did so can load them."""

    def load(self, folder: Path | None = None) -> TaskData:
        raise SpecError("task=python: the data were given from Python; call fedcams.simulate, which has them")
