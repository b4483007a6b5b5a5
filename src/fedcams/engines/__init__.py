"""Engines, one file each: whatever lies in this folder is imported and thereby registered."""

import importlib
import pkgutil

from fedcams.engines.base import Engine, engine
from fedcams.engines.choice import choose
from fedcams.engines.problem import Loss, Pool, Problem, Update
from fedcams.engines.shards import Examples, Shards

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Engine", "Examples", "Loss", "Pool", "Problem", "Shards", "Update", "choose", "engine"]
