"""Tasks, one file each: whatever lies in this folder is imported and thereby registered."""

import importlib
import pkgutil

from fedcams.tasks.augment import Augmentation, CropFlip
from fedcams.tasks.base import Task, TaskData, accuracy, cross_entropy, task

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Augmentation", "CropFlip", "Task", "TaskData", "accuracy", "cross_entropy", "task"]
