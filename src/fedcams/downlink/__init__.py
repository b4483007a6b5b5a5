"""Downlinks, one file each: every module in this folder is imported, which registers what it defines."""

from fedcams.downlink.base import REPLICA, ROWS, Broadcast, Delivery, Downlink, DownlinkCost, Part, Sent, downlink
from fedcams.downlink.held import HeldStore
from fedcams.downlink.message import BUFFERS, MODEL, Held, OutOfStep
from fedcams.registry import import_folder

import_folder(__name__, __path__)

__all__ = [
    "BUFFERS",
    "MODEL",
    "REPLICA",
    "ROWS",
    "Broadcast",
    "Delivery",
    "Downlink",
    "DownlinkCost",
    "Held",
    "HeldStore",
    "OutOfStep",
    "Part",
    "Sent",
    "downlink",
]
