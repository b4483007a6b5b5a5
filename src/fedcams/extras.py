"""Optional libraries, imported only when something needs them."""

from __future__ import annotations

import importlib
from typing import Any

from fedcams.errors import FedcamsError


class ExtraMissing(FedcamsError, ImportError):
    """A library that one of the package's extras provides is not installed."""


def load(module: str, *, what: str, extra: str) -> Any:
    """Import and return a module; if it is missing, the error says `what` needs it and which `extra` installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ExtraMissing(f"{what} needs {module} ({error}); pip install 'fedcams[{extra}]'") from None
