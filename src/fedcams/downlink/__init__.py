"""Downlinks, one file each: every module in this folder is imported, which registers what it defines."""

from fedcams.downlink.base import REPLICA, Broadcast, Delivery, Downlink, DownlinkCost, Sent, downlink
from fedcams.downlink.held import HeldStore
from fedcams.downlink.message import Held, OutOfStep
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = [
    "REPLICA",
    "Broadcast",
    "Delivery",
    "Downlink",
    "DownlinkCost",
    "Held",
    "HeldStore",
    "OutOfStep",
    "Sent",
    "downlink",
]
