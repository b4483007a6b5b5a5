"""The libraries of the extra `report`, loaded when a report is made and not before."""

from __future__ import annotations

import importlib
from typing import Any

from fedcams.errors import FedcamsError


class ExtraMissing(FedcamsError, ImportError):
    """A library that reports need is not installed."""


def load(module: str) -> Any:
    """The module, or an error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ExtraMissing(f'reports need {module} ({error}); install it: pip install "fedcams[report]"') from None
