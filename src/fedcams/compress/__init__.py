"""Compressors, one file each: every module in this folder is imported, which registers what it defines."""

from fedcams.compress.base import Code, Compressor, Field, compressor
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["Code", "Compressor", "Field", "compressor"]
