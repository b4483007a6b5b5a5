"""Trackers: services and files that follow a run, such as TensorBoard; each is a registered piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from fedcams.errors import SpecError
from fedcams.privacy import Privacy
from fedcams.registry import Spec, resolve

if TYPE_CHECKING:
    from fedcams.runs import Run
    from fedcams.simulation import RoundRecord


class Tracker(Protocol):
    """Follows runs, one after the other: `start`, `log` after every round, `finish` even if the run fails.

    A tracker may also have a method `abort(error)`, called instead of `finish` if the run ends before its last round.
    """

    def start(self, run: Run) -> None:
        """Begin to follow a run; a resumed run already has records."""

    def log(self, record: RoundRecord, timing: Mapping[str, Any]) -> None:
        """Take the record and the timing of a finished round."""

    def finish(self) -> None:
        """Stop following the run."""


class TrackerSpec(Spec, ABC):
    """The base class of registered trackers: the settings that a spec such as `wandb(project=mine)` names.

    Examples:
        >>> import fedcams.trackers
        >>> from fedcams.registry import resolve
        >>> resolve("tracker", "wandb(project=mine)").project
        'mine'
    """

    kind = "tracker"
    reference: ClassVar[str] = ""

    @abstractmethod
    def open(self) -> Tracker:
        """Return a new tracker with these settings; refuses if the library that it needs is not installed."""


def tracker(spec: str | TrackerSpec | Tracker) -> Tracker:
    """Return a new tracker.

    Arguments:
        spec: such as `csv` or `wandb(project=mine)`; a tracker of your own is returned unchanged.

    Returns:
        The tracker.

    Raises:
        SpecError: for an unknown name or key.
        ExtraMissing: if the library that it needs is not installed.

    Examples:
        >>> from fedcams.trackers import tracker
        >>> tracker("csv").finish()  # after `start` with a run, and `log` with every round
    """
    if not isinstance(spec, str | TrackerSpec):
        return spec
    found = resolve("tracker", spec)
    assert isinstance(found, TrackerSpec)
    return found.open()


def check_trackers(trackers: Any, privacy: Privacy) -> None:
    """Refuse what is not a list of trackers, and any tracker for a run with privacy.

    A tracker would pass on losses and norms, which the run's ε does not cover.

    Arguments:
        trackers: those of the run.
        privacy: that of the method.

    Returns:
        Nothing, if they may be used.

    Raises:
        SpecError: for anything but a list of trackers, and for a tracker of a private run.

    Examples:
        >>> import fedcams
        >>> from fedcams.trackers import check_trackers
        >>> check_trackers(["csv"], fedcams.Method().privacy)
    """
    listed = isinstance(trackers, Sequence) and not isinstance(trackers, str)
    if not listed or not all(isinstance(each, str | TrackerSpec) or hasattr(each, "log") for each in trackers):
        raise SpecError(f"trackers={trackers!r}; give a list of trackers, such as ['tensorboard']")
    for each in trackers:
        _check_methods(each)
    if trackers and privacy.active:
        raise SpecError(
            f"privacy={privacy} and a tracker: it would receive losses and norms, which epsilon does not cover; "
            "leave trackers out, and read rounds.jsonl, which only its owner can"
        )


def end(
    tracker: Tracker, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> None:
    """Tell a tracker that its run is over, and what ended it early; takes what a context manager is told on its exit.

    Arguments:
        tracker: one that was asked to start.
        kind: the class of the error.
        error: what ended the run before its last round, if anything.
        trace: where it happened.

    Returns:
        Nothing.

    Examples:
        >>> from fedcams.trackers import end, tracker
        >>> end(tracker("csv"), None, None, None)
    """
    abort = getattr(tracker, "abort", None)
    if error is None or abort is None:
        tracker.finish()
    else:
        abort(error)


def _check_methods(each: Any) -> None:
    """Refuse a class, and an object that lacks a method of a tracker."""
    if isinstance(each, type):
        raise SpecError(f"trackers: {each.__name__} is a class; give an instance, such as {each.__name__}()")
    for name in ("start", "log", "finish") if not isinstance(each, str | TrackerSpec) else ():
        if not callable(getattr(each, name, None)):
            raise SpecError(f"trackers: {type(each).__name__} has no method {name!r}; it needs start, log and finish")


def scalars(record: RoundRecord, timing: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield everything in a round that can be drawn as a curve.

    Arguments:
        record: the record of a round.
        timing: its line of `timings.jsonl`.

    Returns:
        An iterator over names and values.

    Examples:
        >>> from fedcams.simulation import RoundRecord
        >>> from fedcams.trackers import scalars
        >>> dict(scalars(RoundRecord(round=1, cohort=[0], wire_up=120), {}))["wire_up"]
        120
    """
    for name, value in (*record.to_dict().items(), ("seconds", timing.get("seconds"))):
        if name != "round" and isinstance(value, int | float):
            yield name, value
