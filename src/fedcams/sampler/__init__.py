"""Samplers, one per file: every module in this folder is imported, which registers its sampler."""

from fedcams.registry import import_folder
from fedcams.sampler.base import Sampler, sampler

import_folder(__name__, __path__)

__all__ = ["Sampler", "sampler"]
