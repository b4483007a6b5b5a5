"""Partitions, one file each: whatever lies in this folder is imported and thereby registered."""

from fedcams.partition.base import Partition, label_histogram, partition, take_fraction
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["Partition", "label_histogram", "partition", "take_fraction"]
