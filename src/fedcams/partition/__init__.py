"""Partitions, one file each: whatever lies in this folder is imported and thereby registered."""

import importlib
import pkgutil

from fedcams.partition.base import Partition, label_histogram, partition, take_fraction

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Partition", "label_histogram", "partition", "take_fraction"]
