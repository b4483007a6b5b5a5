"""The history of a run: its records while it runs, and its model at the end."""

from __future__ import annotations

import inspect
import logging
import math
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcams.engines import Examples
from fedcams.engines.modules import copied
from fedcams.errors import SpecError
from fedcams.extras import load
from fedcams.own.display import html_table, plot_records
from fedcams.own.folder import RunFolder
from fedcams.own.problem import test_examples
from fedcams.rounds import ServerState
from fedcams.rounds.alarm import Alarm
from fedcams.simulation import RoundRecord, Simulation
from fedcams.simulation.clients import Clients
from fedcams.simulation.evaluate import evaluate
from fedcams.trackers import Tracker

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor, nn

Callback = Callable[[RoundRecord], bool | None]
"""Called after every round with its record; True stops the run, which then counts as finished."""


logger = logging.getLogger("fedcams")
_OPEN: weakref.WeakSet[History] = weakref.WeakSet()
"""Histories of this process that hold the folders of their runs."""


class History:
    """The rounds of a run that `fedcams.simulate` started, and the resulting model.

    Nothing runs until you iterate over the history, which yields each round's `RoundRecord` as soon as it is simulated,
    or call `run()`, which simulates all remaining rounds. Everything else, such as `records`, `model` and `to_frame()`,
    is about the rounds so far.

    With `out=`, every round is written to the folder. If you stop early, `close()` saves the last round; otherwise
    that happens when the same call is made again, or when the process ends. After a kill, the same call continues
    from the last checkpoint.

    Examples:
        >>> import fedcams, torch
        >>> client = (torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
        >>> history = fedcams.simulate(torch.nn.Linear(3, 2), [client, client], rounds=2, cohort=1)
        >>> for record in history:  # each iteration runs one round
        ...     print(record.round, len(record.cohort))
        1 1
        2 1
        >>> history.model
        Linear(in_features=3, out_features=2, bias=True)
    """

    def __init__(
        self,
        simulation: Simulation,
        callbacks: Sequence[Callback] = (),
        folder: RunFolder | None = None,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        """Begin the history of a simulation, or continue the one in `folder`; `fedcams.simulate` calls it."""
        self.simulation, self.rounds, self.callbacks = simulation, simulation.rounds, tuple(callbacks)
        self.folder, self.trackers = folder, tuple(trackers)
        self.state = simulation.start()
        """The server's state after the rounds so far."""
        self.records: list[RoundRecord] = []
        """The rounds so far."""
        self.stopped = False
        """Whether a callback stopped the run."""
        if folder is not None:
            _close_others(folder.path)
            self.state, self.records, self.stopped = folder.open(self.state)
        self._steps: Generator[tuple[ServerState, RoundRecord]] | None = None
        self._failed = False
        self._alarm, self._refused, self._all_refused = Alarm(), False, False
        for record in self.records:
            self._trouble(record)

    @property
    def finished(self) -> bool:
        """Whether all rounds ran, or a callback stopped the run."""
        return self.stopped or len(self.records) >= self.rounds

    def __iter__(self) -> Iterator[RoundRecord]:
        """Yield the records of all rounds in order, those already simulated first."""
        number = 0
        while number < len(self.records) or self._advance():
            yield self.records[number]
            number += 1

    def __len__(self) -> int:
        """Return the number of rounds so far."""
        return len(self.records)

    def __bool__(self) -> bool:
        """Return True: there is a history even before its first round."""
        return True

    def __getitem__(self, place: int) -> RoundRecord:
        """Return the record of a round so far by its place: 0 is round 1, and -1 the last one."""
        if not self.records:
            raise IndexError("no round has run yet; call history.run() first")
        return self.records[place]

    def run(self) -> History:
        """Simulate the rounds that are left, and return the history itself."""
        while self._advance():
            pass
        return self

    def close(self) -> None:
        """Write a checkpoint of the rounds so far and release the run's folder; the run can continue later.

        A run without `out=` has nothing to close.
        """
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def _advance(self) -> bool:
        """Simulate one more round, if there is one; return whether there was."""
        if self.finished:
            return False
        if self._failed:
            raise SpecError(
                f"round {len(self.records) + 1} was interrupted halfway; call simulate again"
                f"{' to continue from the last checkpoint' if self.folder else ''}"
            )
        self._failed = True  # until the round completes
        self.state, record = self._step()
        self._failed = False
        self.records.append(record)
        if said := self._trouble(record):
            logger.warning(said)
        self.stopped = self._ask_callbacks(record)
        if self.stopped and self.folder is not None and len(self.records) < self.rounds:
            self.folder.stop(len(self.records))
        if self.stopped or len(self.records) >= self.rounds:
            self.close()
        return True

    def _trouble(self, record: RoundRecord) -> str:
        """Return a sentence when training explodes, or a client or all of them are refused, each once; or nothing."""
        said = self._alarm.hear(record.round, record.train_loss, record.delta_norm)
        if not record.refused:
            return said
        every = len(record.refused) == len(record.cohort)
        if self._all_refused or (self._refused and not every):
            return said
        self._refused, self._all_refused = True, every
        client, why = next(iter(record.refused.items()))
        if every:
            return f"round {record.round}: every client was refused; client {client}: {why}"
        some = f"{len(record.refused)} of {len(record.cohort)} clients refused"
        return f"round {record.round}: {some}; client {client}: {why}; records name later ones under refused"

    def _ask_callbacks(self, record: RoundRecord) -> bool:
        """Call all callbacks and return whether one stops the run; if one fails, the round is still saved."""
        try:
            answers = [_is_true(callback(record)) for callback in self.callbacks]
        except BaseException:
            self.close()  # the error may keep this history alive, and with it the lock of the folder
            raise
        return any(answers)

    def _step(self) -> tuple[ServerState, RoundRecord]:
        if self.folder is None:
            state, record = self.simulation.advance_(self.state)
            return state, record.check()
        if self._steps is None:
            self._steps = self.folder.rounds(self.state, self.trackers)
            weakref.finalize(self, self._steps.close)  # also when the process ends
            _OPEN.add(self)
        return next(self._steps)

    # -- results -----------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """A copy of the model after the rounds so far, in evaluation mode."""
        return self._model(self.state.x, self.state.buffers)

    @property
    def averaged_model(self) -> nn.Module:
        """A copy of the averaged model after the rounds so far; refused for a method without an average."""
        if self.state.average is None:
            raise SpecError("this method has no average; give average='ema(0.97)' to simulate")
        return self._model(self.state.average.x, self.state.average.buffers)

    @property
    def client_ids(self) -> list[Any]:
        """The ids of the clients as they were given; records number clients with names by their places in this list."""
        clients = self.simulation.problem.clients
        return list(clients.given.values()) if isinstance(clients, Clients) else list(clients)

    def evaluate_clients(self, data: Mapping[Any, Any] | None = None) -> dict[Any, dict[str, float | None]]:
        """Return the loss and all metrics of the model so far on each client's own examples, by client id.

        `data` gives other examples instead, by names of your choice: those of the clients, or of sites that do not
        take part. Loads the clients one after the other.
        """
        simulation, problem, x, buffers = self.simulation, self.simulation.problem, self.state.x, self.state.buffers
        metrics, engine, not_means = simulation.metrics, simulation.engine, simulation.not_means
        if not isinstance(data, Mapping | None):
            raise SpecError(f"data is a {type(data).__name__}; give a mapping from names to examples")
        found: Iterator[tuple[Any, Examples]] = zip(self.client_ids, problem.clients.values(), strict=True)
        if data is not None:
            found = ((name, test_examples(own, problem, str(name))) for name, own in data.items())
        return {name: evaluate(problem, x, buffers, own, metrics, engine, not_means) for name, own in found}

    def _model(self, x: Tensor, buffers: Tensor | None) -> nn.Module:
        return copied(self.simulation.problem.load(x, buffers)).eval()

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row per round so far, and `round` as its index; needs pandas."""
        frames = load("pandas", what="History.to_frame", extra="frame")
        rows = [record.to_dict() for record in self.records]
        frame: pd.DataFrame = frames.DataFrame(rows, columns=None if rows else ["round"])
        return frame.set_index("round")

    def report(self) -> Path:
        """Write a report of the run into its folder and return the path of its page; needs `out=`."""
        if self.folder is None:
            raise SpecError("a report needs the run's folder; give out=... to simulate")
        from fedcams.report import report

        return report([self.folder.path], self.folder.path / "report")

    def plot(self, *names: str) -> Figure:
        """Draw numbers of the records over the rounds so far, and return the figure; needs matplotlib.

        Each name, such as `test_loss`, `q` or `wire_up`, gets its own panel; by default, the training loss and the
        test score. Refuses a name that no record has.
        """
        return plot_records(self.records, names)

    def _repr_html_(self) -> str:
        """Return the last rounds as a table, for notebooks."""
        return html_table(self.records, self.rounds)

    def __repr__(self) -> str:
        last = next((score for each in reversed(self.records) if (score := each.test_accuracy) is not None), None)
        return f"History({len(self.records)} of {self.rounds} rounds, test accuracy {last})"


def _is_true(answer: Any) -> bool:
    """Return whether a callback's answer is True, as Python, NumPy or torch has it; other values and arrays are not."""
    dtype, shape = getattr(answer, "dtype", type(answer).__name__), getattr(answer, "shape", ())
    return str(dtype) in ("bool", "torch.bool") and math.prod(shape) == 1 and bool(answer)


def _close_others(folder: Path) -> None:
    """Close the histories of this process in a folder, so that a new one can continue: a notebook still has the old."""
    for other in list(_OPEN):
        busy = inspect.isgenerator(other._steps) and other._steps.gi_running  # in another thread
        if other.folder is not None and other.folder.path.resolve() == folder.resolve() and not busy:
            other.close()
