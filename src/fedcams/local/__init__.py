"""Local training: rules, one file each, and the order of batches. Every module in this folder is imported."""

from fedcams.local.base import Local, Rate, Slots, local
from fedcams.local.order import BatchOrder, batch_order, batches, step_count
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["BatchOrder", "Local", "Rate", "Slots", "batch_order", "batches", "local", "step_count"]
