"""Server optimizers, one file each: whatever lies in this folder is imported and thereby registered."""

import importlib
import pkgutil

from fedcams.optimizers.base import ServerOptimizer, State, server

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["ServerOptimizer", "State", "server"]
