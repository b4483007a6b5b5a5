"""Trackers: services that follow a run while it goes on."""

from fedcams.errors import SpecError
from fedcams.registry.params import nearest
from fedcams.trackers.base import Tracker
from fedcams.trackers.tensorboard import TensorBoard

TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard}


def tracker(name: str) -> Tracker:
    """A new tracker of that name."""
    if name not in TRACKERS:
        raise SpecError(f"no tracker is named {name!r}{nearest(name, TRACKERS)}; known: {', '.join(TRACKERS)}")
    return TRACKERS[name]()


__all__ = ["TRACKERS", "TensorBoard", "Tracker", "tracker"]
