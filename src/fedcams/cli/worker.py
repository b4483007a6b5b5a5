"""A worker of `fedcams run --jobs`: it carries out the runs that it reads from its input, and reports their progress.

Both are lines of JSON. The first one in is the settings, every other one a run; those out are explained in `Reporter`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fedcams.cli.main import load
from fedcams.cli.progress import title
from fedcams.cli.session import Session, Settings
from fedcams.errors import FedcamsError, UpdateError
from fedcams.experiment import Experiment

if TYPE_CHECKING:
    from fedcams.runs import Run, Watch
    from fedcams.simulation import RoundRecord


class Reporter:
    """A screen whose lines another process shows: what is said, a run that begins, its rounds, and how it ends."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def send(self, **event: Any) -> None:
        """Write one event."""
        self._out.write(json.dumps(event) + "\n")
        self._out.flush()

    def say(self, text: str) -> None:
        """Pass on one line of text."""
        self.send(say=text)

    def title(self, path: Path, experiment: Experiment) -> str:
        """Return the label and seed of a run; what is said names its folder too."""
        return title(experiment)

    @contextlib.contextmanager
    def follow(self, run: Run) -> Iterator[Watch]:
        """Pass on that a run begins, and then its rounds."""
        self.send(begin=str(run.path))

        def watch(record: RoundRecord, timing: dict[str, Any]) -> None:
            self.send(round=record.to_dict(), timing=timing)

        yield watch


def main() -> None:
    """Carry out runs until the input ends; SIGTERM stops a run as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    reporter = Reporter(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)  # what data and models print must not mix with our lines
    settings = Settings.from_json(sys.stdin.readline())
    if settings.modules:
        load(settings.modules)
    session = settings.session(reporter)
    for line in sys.stdin:
        _carry_out(session, reporter, **json.loads(line))


def _carry_out(session: Session, reporter: Reporter, experiment: dict[str, Any], folder: str) -> None:
    try:
        session.carry_out(Experiment.from_dict(experiment), Path(folder))
    except FedcamsError as error:
        reporter.send(error=str(error), diverged=isinstance(error, UpdateError))
    except BrokenPipeError:
        raise  # the parent process is gone
    except Exception as error:
        traceback.print_exc()
        reporter.send(error=f"{type(error).__name__}: {error}", diverged=False)
    else:
        reporter.send(end=folder)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main()
