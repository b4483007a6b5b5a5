"""Models, one file each: whatever lies in this folder is imported and thereby registered."""

from fedcams.models.base import Model, build, model
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["Model", "build", "model"]
