"""Models, one per file: every module in this folder is imported, which registers its model."""

from fedcams.models.base import Model, build, model
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["Model", "build", "model"]
