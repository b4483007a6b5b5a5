"""Libraries that only some things need, loaded when they do and not before."""

from __future__ import annotations

import importlib
from typing import Any

from fedcams.errors import FedcamsError


class ExtraMissing(FedcamsError, ImportError):
    """A library of one of the package's extras is not installed."""


def load(module: str, *, what: str, extra: str) -> Any:
    """Return a module of an extra; refuses a missing one with what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ExtraMissing(f"{what} needs {module} ({error}); pip install 'fedcams[{extra}]'") from None
