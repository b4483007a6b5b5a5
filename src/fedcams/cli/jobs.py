"""Carry out several runs: in this process one after the other, or at once in workers that each take one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self

from fedcams.cli.progress import Screen
from fedcams.cli.session import AGAIN, Settings, run_so_far
from fedcams.errors import FedcamsError, UpdateError
from fedcams.experiment import Experiment
from fedcams.runs import Run, RunError, read_run
from fedcams.simulation import RoundRecord


class Outcome(NamedTuple):
    """The outcome of an experiment in its folder: the finished run, or the error that ended it."""

    path: Path
    experiment: Experiment
    run: Run | None
    error: FedcamsError | None = None

    def finished(self) -> Run:
        """Return the finished run, or raise the error that ended it."""
        if self.error is not None:
            raise self.error
        assert self.run is not None
        return self.run


class Worker:
    """A process that carries out runs, one after the other."""

    def __init__(self, settings: Settings, threads: int) -> None:
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}  # a number that the user has set takes precedence
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedcams.cli.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env=environment,
            process_group=0,  # Ctrl-C reaches this process alone, which then stops the workers
        )
        self._write(settings.to_json())

    def carry_out(self, experiment: Experiment, folder: Path, screen: Screen) -> Run:
        """Run an experiment in its folder, or continue it there; return the finished run, or raise what ended it."""
        self._write(json.dumps({"experiment": experiment.to_dict(), "folder": str(folder)}))
        with contextlib.ExitStack() as shown:
            for event in self._events():
                if "say" in event:
                    screen.say(event["say"])
                elif "begin" in event:
                    watch = shown.enter_context(screen.follow(run_so_far(experiment, folder)))
                elif "round" in event:
                    watch(RoundRecord.from_dict(event["round"]), event["timing"])
                elif "error" in event:
                    raise (UpdateError if event["diverged"] else RunError)(event["error"])
                else:
                    return read_run(folder)
        raise RunError(f"its process ended early ({self._ending()}); {AGAIN}")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading shows how it ended
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _events(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        return (json.loads(line) for line in self._process.stdout if line.endswith("\n"))

    def _ending(self) -> str:
        code = self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    @property
    def is_alive(self) -> bool:
        """Whether the process can take another run."""
        return self._process.poll() is None

    def stop(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Ask the process to stop, as Ctrl-C would, or kill it; its run can be continued in both cases."""
        self._process.send_signal(by)  # does nothing if it has ended

    def close(self) -> None:
        """End the process once it is idle, and wait for it."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass
class Workers:
    """As many workers as there are jobs, each started when it is first needed, and replaced when it dies."""

    settings: Settings
    jobs: int
    screen: Screen
    _idle: list[Worker] = field(default_factory=list)
    _all: list[Worker] = field(default_factory=list)
    _stopped: bool = False
    _lock: Lock = field(default_factory=Lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._all:
            worker.close()

    def carry_out(self, experiment: Experiment, folder: Path) -> Run:
        """Run an experiment in an idle worker; return the finished run, or report and raise the error that ended it."""
        worker = self._take()
        try:
            return worker.carry_out(experiment, folder, self.screen)
        except FedcamsError as error:
            if not self._stopped:
                self.screen.say(f"{self.screen.title(folder, experiment)}: {failure(error)}")
            raise
        except BaseException:  # of the screen: the worker goes on with this run, and must not get another one
            self.stop()
            raise
        finally:
            with self._lock:  # `_take` replaces the list
                self._idle.append(worker)

    def _take(self) -> Worker:
        with self._lock:
            if self._stopped:
                raise RunError("stopped before it started")
            self._idle = [worker for worker in self._idle if worker.is_alive]
            if not self._idle:
                self._idle.append(Worker(self.settings, threads_each(self.jobs)))
                self._all.append(self._idle[-1])
            return self._idle.pop()

    def stop(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Stop all runs, and begin no other."""
        with self._lock:
            self._stopped = True
            for worker in self._all:
                worker.stop(by)


def failure(error: FedcamsError) -> str:
    """Return in words how an error ended a run."""
    return f"diverged, {error}" if isinstance(error, UpdateError) else f"failed, {error}"


def threads_each(jobs: int) -> int:
    """Return the number of torch's threads with which `jobs` processes use every core once."""
    return max(1, (os.cpu_count() or 1) // jobs)


def carry_out_at_once(
    tasks: Mapping[Path, Experiment], settings: Settings, jobs: int, screen: Screen
) -> Generator[Outcome]:
    """Run experiments in their folders, `jobs` at once, and yield the outcome of each, in the order given.

    A run that fails does not stop the others; closing the generator, like Ctrl-C, stops all of them, and a second
    Ctrl-C kills them.
    """
    with Workers(settings, jobs, screen) as workers, ThreadPoolExecutor(jobs) as threads:
        futures = [threads.submit(workers.carry_out, experiment, path) for path, experiment in tasks.items()]
        try:
            for (path, experiment), future in zip(tasks.items(), futures, strict=True):
                yield _outcome(path, experiment, future)
        except BaseException:
            workers.stop()
            try:
                threads.shutdown(cancel_futures=True)
            except KeyboardInterrupt:
                workers.stop(by=signal.SIGKILL)
            raise


def _outcome(path: Path, experiment: Experiment, future: Future[Run]) -> Outcome:
    try:
        return Outcome(path, experiment, future.result())
    except FedcamsError as error:
        return Outcome(path, experiment, None, error)


def carry_out_in_turn(tasks: Mapping[Path, Experiment], settings: Settings, screen: Screen) -> Generator[Outcome]:
    """Run experiments in their folders in this process, and yield the outcome of each.

    A run that diverges does not stop the others; any other error is raised, because it usually affects all of them.
    """
    session = settings.session(screen)
    for path, experiment in tasks.items():
        try:
            yield Outcome(path, experiment, session.carry_out(experiment, path))
        except UpdateError as error:
            screen.say(f"{screen.title(path, experiment)}: {failure(error)}")
            yield Outcome(path, experiment, None, error)
