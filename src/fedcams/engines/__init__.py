"""Engines, one file each: whatever lies in this folder is imported and thereby registered."""

from fedcams.engines.base import CohortUpdate, Engine, engine
from fedcams.engines.choice import choose
from fedcams.engines.problem import Examples, Loss, Pool, Problem, Shards
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["CohortUpdate", "Engine", "Examples", "Loss", "Pool", "Problem", "Shards", "choose", "engine"]
