"""Libraries that only some things need, loaded when they do and not before."""

from __future__ import annotations

import importlib
from typing import Any

from fedcams.errors import FedcamsError


class ExtraMissing(FedcamsError, ImportError):
    """A library of one of the package's extras is not installed."""


def load(module: str, *, what: str, extra: str) -> Any:
    """The module, or an error that says what needs it and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ExtraMissing(f"{what} needs {module} ({error}); pip install 'fedcams[{extra}]'") from None
