"""Probes, one file each: every module in this folder is imported, which registers what it defines."""

from fedcams.probes.base import Leftovers, Probe, mean_before
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["Leftovers", "Probe", "mean_before"]
