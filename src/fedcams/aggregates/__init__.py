"""Aggregates, one file each: every module in this folder is imported, which registers what it defines."""

from fedcams.aggregates.base import Aggregate
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["Aggregate"]
