"""Tasks, one file each: whatever lies in this folder is imported and thereby registered."""

from fedcams.registry import import_folder
from fedcams.tasks.augment import Augmentation, CropFlip
from fedcams.tasks.base import Task, TaskData, accuracy, cross_entropy, task

import_folder(__name__, __path__)

__all__ = ["Augmentation", "CropFlip", "Task", "TaskData", "accuracy", "cross_entropy", "task"]
