"""Trackers over Flower: every round as a record of what the ledger says, with the app's metrics."""

from __future__ import annotations

import contextlib
import functools
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from fedcams.experiment import Experiment
from fedcams.flower.checkpoint import read_ledger
from fedcams.flower.hooks import MANY
from fedcams.flower.records import readable
from fedcams.runs.folder import Run
from fedcams.simulation import RoundRecord
from fedcams.trackers import Tracker, end

if TYPE_CHECKING:
    from fedcams.flower.strategy import FedCAMS

COUNTED = ("round", "cohort", "train_loss", "delta_norm", "wire_up", "wire_down", "refused")
"""What the ledger says of a round that is a field of records."""
Log = Callable[[Mapping[str, Any], Result, float], None]
"""Passes a round on: its line in the ledger, the metrics so far, and how many seconds it took."""
logger = logging.getLogger("flwr.fedcams")


class FlowerRecord(RoundRecord):
    """The record of a round over Flower; its probes are the numbers of clients and the app's metrics."""

    @classmethod
    def of(cls, line: Mapping[str, Any], result: Result | None = None) -> RoundRecord:
        """Return the record of a round from its line in the ledger and the metrics in a result."""
        counts = {name: len(line[name]) for name in ("accepted", "absent")}
        metrics = {} if result is None else _metrics(result, line["round"])
        return cls.from_dict({**{name: line[name] for name in COUNTED}, **counts, **metrics})

    def to_dict(self) -> dict[str, Any]:
        """Return all values by name, without those that only a simulation counts."""
        return {name: value for name, value in super().to_dict().items() if name in COUNTED or name in self.probes}


def _metrics(result: Result, round: int) -> dict[str, float]:
    """Return the metrics of a round: those of training and evaluation on clients, and those of the server."""
    kinds: dict[str, Mapping[int, MetricRecord]] = {
        "train": result.train_metrics_clientapp,
        "evaluate": result.evaluate_metrics_clientapp,
        "server": result.evaluate_metrics_serverapp,
    }
    return {
        f"{kind}/{readable(name)}": value
        for kind, found in kinds.items()
        for name, value in found.get(round, MetricRecord()).items()
        if isinstance(value, int | float)
    }


@contextlib.contextmanager
def tracking(strategy: FedCAMS, name: str, done: int, rounds: int) -> Iterator[Log]:
    """Let the strategy's trackers follow its run by this name, after round `done`; yield what reports a round to them.

    A tracker that cannot start is an error, before any round is run. One that fails later is only named in the log:
    clients choose the names of their metrics, and a federation should not stop because a service cannot be reached.
    """
    trackers = strategy.trackers if done < rounds else []

    def log(line: Mapping[str, Any], result: Result, seconds: float) -> None:
        for each in trackers:
            with _naming(each):
                each.log(FlowerRecord.of(line, result), {"round": line["round"], "seconds": seconds})

    with contextlib.ExitStack() as stack:
        for each in trackers:
            stack.push(functools.partial(_end, each))
            each.start(_run(strategy, name, rounds))
        yield log


@dataclass(frozen=True)
class FlowerRun(Run):
    """A run over Flower, whose folder may be `checkpoint` in every run; trackers show the name that clients know."""

    name: str = ""


def _run(strategy: FedCAMS, name: str, rounds: int) -> FlowerRun:
    """Return the run as trackers know runs; its folder is that of the checkpoint."""
    experiment = Experiment.from_python(
        strategy.method,
        label=strategy.run_name,
        clients=strategy.clients or _fewest(strategy),
        sampler=strategy.sampler,
        rounds=rounds,
        seed=strategy.seed,
        probes=(),
    )
    records = [FlowerRecord.of(line) for line in read_ledger(strategy.checkpoint)]
    return FlowerRun(strategy.checkpoint, experiment, records, [], {}, [], name=name)


def _fewest(strategy: FedCAMS) -> int:
    """Return how many clients a round needs at least, where it is not known how many there are."""
    needed, sampler = float(strategy.method.min_replies), strategy.sampler
    return bisect_left(range(MANY), needed, lo=max(strategy.min_available, sampler.min_population), key=sampler.largest)


def _end(tracker: Tracker, *raised: Any) -> None:
    with _naming(tracker):
        end(tracker, *raised)


@contextlib.contextmanager
def _naming(tracker: Tracker) -> Iterator[None]:
    """Log an error of a tracker instead of ending the run."""
    try:
        yield
    except Exception as error:
        logger.warning("tracker %s failed: %s", type(tracker).__module__, readable(repr(error)))
