"""Tasks, one per file: every module in this folder is imported, which registers its task."""

from fedcams.registry import import_folder
from fedcams.tasks.base import Augmentation, CropFlip, Task, TaskData, accuracy, class_axis, cross_entropy, task

import_folder(__name__, __path__)

__all__ = ["Augmentation", "CropFlip", "Task", "TaskData", "accuracy", "class_axis", "cross_entropy", "task"]
