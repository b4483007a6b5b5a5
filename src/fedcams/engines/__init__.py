"""Engines, one file each: every module in this folder is imported, which registers what it defines."""

from fedcams.engines.base import CohortUpdate, Engine, engine
from fedcams.engines.choice import choose
from fedcams.engines.problem import Examples, Loss, Pool, Problem, Shards
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["CohortUpdate", "Engine", "Examples", "Loss", "Pool", "Problem", "Shards", "choose", "engine"]
