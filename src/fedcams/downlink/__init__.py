"""Downlinks, one file each: whatever lies in this folder is imported and thereby registered."""

from fedcams.downlink.base import Broadcast, Delivery, Downlink, Sent, downlink
from fedcams.downlink.held import HeldStore
from fedcams.downlink.versions import Held, OutOfStep
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = ["Broadcast", "Delivery", "Downlink", "Held", "HeldStore", "OutOfStep", "Sent", "downlink"]
