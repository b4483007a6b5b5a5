"""Trackers: services and files that follow a run, such as TensorBoard; each is a registered piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fedcams.errors import SpecError
from fedcams.privacy import Privacy
from fedcams.registry import Spec, resolve

if TYPE_CHECKING:
    from fedcams.runs import Run
    from fedcams.simulation import RoundRecord


class Tracker(Protocol):
    """Follows runs, one after the other: `start`, `log` after every round, `finish` even if the run fails."""

    def start(self, run: Run) -> None:
        """Begin to follow a run; a resumed run already has records."""

    def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
        """Take the record and the timing of a finished round."""

    def finish(self) -> None:
        """Stop following the run."""


class TrackerSpec(Spec, ABC):
    """The base class of registered trackers: the settings that a spec such as `wandb(project=mine)` names."""

    kind = "tracker"
    reference: ClassVar[str] = ""

    @abstractmethod
    def open(self) -> Tracker:
        """Return a new tracker with these settings; refuses if the library that it needs is not installed."""


def tracker(spec: str | TrackerSpec | Tracker) -> Tracker:
    """Return a new tracker for a spec such as `csv`, or your own tracker unchanged; refuses an unknown name."""
    if not isinstance(spec, str | TrackerSpec):
        return spec
    found = resolve("tracker", spec)
    assert isinstance(found, TrackerSpec)
    return found.open()


def check_trackers(trackers: Any, privacy: Privacy) -> None:
    """Refuse what is not a list of trackers, and any tracker for a run with privacy.

    It would pass on losses and norms, which the run's ε does not cover.
    """
    listed = isinstance(trackers, Sequence) and not isinstance(trackers, str)
    if not listed or not all(isinstance(each, str | TrackerSpec) or hasattr(each, "log") for each in trackers):
        raise SpecError(f"trackers={trackers!r}; give a list of trackers, such as ['tensorboard']")
    if trackers and privacy.active:
        raise SpecError(
            f"privacy={privacy} and a tracker: it would receive losses and norms, which epsilon does not cover; "
            "leave trackers out, and read rounds.jsonl, which only its owner can"
        )


def scalars(record: RoundRecord, timing: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the name and value of everything that can be drawn as a curve over rounds."""
    for name, value in (*record.to_dict().items(), ("seconds", timing.get("seconds"))):
        if name != "round" and isinstance(value, int | float):
            yield name, value
