"""Trackers, one per file: every module in this folder is imported, which registers its tracker."""

from fedcams.registry import import_folder
from fedcams.trackers.base import Tracker, TrackerSpec, check_trackers, end, scalars, tracker

import_folder(__name__, __path__)

__all__ = ["Tracker", "TrackerSpec", "check_trackers", "end", "scalars", "tracker"]
