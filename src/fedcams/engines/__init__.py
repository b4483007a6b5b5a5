"""Engines, one file each: whatever lies in this folder is imported and thereby registered."""

from fedcams.engines.base import Engine, engine
from fedcams.engines.choice import choose
from fedcams.engines.problem import Loss, Pool, Problem, Update
from fedcams.engines.shards import Examples, Shards
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["Engine", "Examples", "Loss", "Pool", "Problem", "Shards", "Update", "choose", "engine"]
