"""Engines, one file each: every module in this folder is imported, which registers what it defines."""

from fedcams.engines.base import CohortUpdate, Engine, engine
from fedcams.engines.choice import Choice, choose, choose_with_reason
from fedcams.engines.problem import Examples, Loss, Pool, Problem, Shards
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = [
    "Choice",
    "CohortUpdate",
    "Engine",
    "Examples",
    "Loss",
    "Pool",
    "Problem",
    "Shards",
    "choose",
    "choose_with_reason",
    "engine",
]
