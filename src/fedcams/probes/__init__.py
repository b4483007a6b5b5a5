"""Probes, one file each: every module in this folder is imported, which registers what it defines."""

from fedcams.probes.base import Leftovers, Probe, mean_before
from fedcams.probes.norms import inner_products
from fedcams.registry import import_folder

import_folder(__name__, __path__)

DEFAULT = "q + floor + norms + guard"
"""What every run measures by default; together they take a few passes over data that is in memory anyway."""

__all__ = ["DEFAULT", "Leftovers", "Probe", "inner_products", "mean_before"]
