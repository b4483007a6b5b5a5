"""Server optimizers, one file each: whatever lies in this folder is imported and thereby registered."""

from fedcams.optimizers.base import ServerOptimizer, State, server
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["ServerOptimizer", "State", "server"]
