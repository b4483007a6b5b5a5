"""Downlinks, one file each: whatever lies in this folder is imported and thereby registered."""

import importlib
import pkgutil

from fedcams.downlink.base import Delivery, Downlink, Sent, Turn, downlink
from fedcams.downlink.held import HeldStore
from fedcams.downlink.versions import Held, OutOfStep

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["Delivery", "Downlink", "Held", "HeldStore", "OutOfStep", "Sent", "Turn", "downlink"]
