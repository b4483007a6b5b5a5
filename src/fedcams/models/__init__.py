"""Models, one file each: whatever lies in this folder is imported and thereby registered."""

import importlib
import pkgutil

from fedcams.models.base import Model, build, model

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Model", "build", "model"]
