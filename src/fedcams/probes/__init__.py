"""Probes of a round, one file each: whatever lies in this folder is imported and thereby registered."""

from fedcams.probes.base import Leftovers, Probe, mean_before
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["Leftovers", "Probe", "mean_before"]
