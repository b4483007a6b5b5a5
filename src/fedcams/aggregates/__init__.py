"""Aggregates, one file each: whatever lies in this folder is imported and thereby registered."""

from fedcams.aggregates.base import Aggregate
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["Aggregate"]
