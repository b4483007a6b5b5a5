"""Partitions, one per file: every module in this folder is imported, which registers its partition."""

from fedcams.partition.base import Partition, label_histogram, partition, take_fraction
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["Partition", "label_histogram", "partition", "take_fraction"]
