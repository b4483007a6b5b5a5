"""Folders of registered pieces: a file becomes known by lying there."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable


def import_folder(package: str, path: Iterable[str]) -> None:
    """Imports every module of a package, so that what it registers is known; those named `_...` are left alone."""
    for module in pkgutil.iter_modules(path):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package}.{module.name}")
