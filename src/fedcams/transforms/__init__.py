"""Transforms of updates and means, one file each: whatever lies in this folder is imported and thereby registered."""

from fedcams.registry import import_folder
from fedcams.transforms.base import Facts, Transform

import_folder(__name__, __path__)

__all__ = ["Facts", "Transform"]
