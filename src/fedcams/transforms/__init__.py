"""Transforms, one file each: every module in this folder is imported, which registers what it defines."""

from fedcams.registry import import_folder
from fedcams.transforms.base import Facts, Transform

import_folder(__name__, __path__)

__all__ = ["Facts", "Transform"]
