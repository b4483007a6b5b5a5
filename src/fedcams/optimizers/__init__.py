"""Server optimizers, one file each: every module in this folder is imported, which registers what it defines."""

from fedcams.optimizers.base import ServerOptimizer, State, server
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["ServerOptimizer", "State", "server"]
