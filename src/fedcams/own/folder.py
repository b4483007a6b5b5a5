"""The folder of a run that was started from Python: what `fedcams run` writes, plus what identifies the run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedcams.engines import Examples
from fedcams.engines.trees import named_tensors
from fedcams.experiment import Experiment
from fedcams.method import method_of
from fedcams.rounds import ServerState
from fedcams.runs.checkpoint import differences, saved_round
from fedcams.runs.execute import make_folder, refuse_taken, write_about
from fedcams.runs.files import end_of, locked, write_public
from fedcams.runs.folder import (
    CHECKPOINT,
    EXPERIMENT,
    PYTHON,
    ROUNDS,
    STOPPED,
    RunError,
    is_run,
    read_experiment,
    read_object,
    read_run,
)
from fedcams.runs.journal import Journal, to_json
from fedcams.simulation import RoundRecord, Simulation
from fedcams.simulation.clients import Clients
from fedcams.simulation.evaluate import SCORE
from fedcams.tasks import Task
from fedcams.trackers import Tracker, end

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RunFolder:
    """A run of `fedcams.simulate` with its folder."""

    path: Path
    simulation: Simulation
    label: str
    engine: str
    checkpoint_every: int
    theory_every: int = 0

    def open(self, start: ServerState) -> tuple[ServerState, list[RoundRecord], bool]:
        """Begin the run, or load it; return the state, the records, and whether it was stopped early.

        `start` is the state before the first round. Refuses a folder of another run, naming what differs, and does not
        change it.
        """
        experiment = self._experiment()
        if not is_run(self.path):
            self._begin(experiment)
            return start, [], False
        with locked(self.path):
            self._compare(read_object(self.path / PYTHON, "restore it, or give another folder"))
            self._check_rounds()
            journal = self._journal
            state = journal.load(start)
            journal.check_theory(state.round)
            if read_experiment(self.path) != experiment:
                self._describe(experiment)
            return (
                state,
                self._records(state.round, journal.checkpoint.lines),
                read_object(self.path / STOPPED).get("round") == state.round,
            )

    def rounds(self, state: ServerState, trackers: Sequence[Tracker]) -> Generator[tuple[ServerState, RoundRecord]]:
        """Run the rounds after this state, write them to the folder and the trackers, and yield states and records.

        Refuses a folder in which another process has run rounds meanwhile.
        """
        with locked(self.path), contextlib.ExitStack() as stack:
            if (saved_round(self.path / CHECKPOINT, self._identity) or 0) != state.round:
                raise RunError(f"{self.path}: another history has continued this run; call simulate again to load it")
            (self.path / STOPPED).unlink(missing_ok=True)  # left by a stop whose checkpoint was lost in a kill
            for tracker in trackers:
                stack.push(functools.partial(end, tracker))
                tracker.start(read_run(self.path))
            steps = stack.enter_context(contextlib.closing(self._journal.rounds(state)))
            for step in steps:
                for tracker in trackers:
                    tracker.log(step.record, step.timing)
                try:
                    yield step.state, step.record
                except GeneratorExit:  # trackers hear of it, unless the run is over
                    if step.state.round < self.simulation.rounds and not (self.path / STOPPED).exists():
                        raise
                    return

    def stop(self, round: int) -> None:
        """Record that a callback stopped the run after this round, so that it counts as finished."""
        write_public(self.path / STOPPED, to_json({"round": round, "why": "a callback stopped the run"}))

    # -- what the run is ---------------------------------------------------------------------------------------------

    @property
    def _journal(self) -> Journal:
        return Journal(
            self.path,
            self.simulation,
            self._identity,
            self.checkpoint_every,
            keep_rows=True,
            theory_every=self.theory_every,
        )

    def _begin(self, experiment: Experiment) -> None:
        make_folder(self.path)
        with locked(self.path):
            refuse_taken(self.path)
            self._describe(experiment)

    def _describe(self, experiment: Experiment) -> None:
        """Write the description of the run; one that continues may have more rounds or other probes than before."""
        about = {"call": self._call(), "names": self._names(), "identity": self._identity, "examples": self._examples}
        write_public(self.path / PYTHON, to_json(about))
        if is_run(self.path):
            write_public(self.path / EXPERIMENT, experiment.to_toml().encode())
        else:
            write_about(self.path, experiment, self.simulation, [])

    def _check_rounds(self) -> None:
        """Refuse to shorten a run, and to restart a finished run whose checkpoint is gone; a longer run goes on."""
        here, there = self.simulation.rounds, read_experiment(self.path).rounds
        if here > there:
            (self.path / STOPPED).unlink(missing_ok=True)  # who asks for more rounds wants them, after a stop too
        if here < there:
            raise RunError(
                f"{self.path}: rounds={here}, but the run there has rounds={there}; give at least as many, or "
                "another folder"
            )
        if not (self.path / CHECKPOINT).exists() and read_run(self.path).finished:
            raise RunError(
                f"{self.path}: the run is finished, but its checkpoint with the model was deleted; restore it, or "
                "give another folder"
            )

    def _records(self, count: int, digest: str) -> list[RoundRecord]:
        """Return the records of the first `count` rounds, which have this digest; later lines are not read."""
        path = self.path / ROUNDS
        lines = path.read_bytes()[: end_of(path, count, digest)].splitlines() if count else []
        return [RoundRecord.from_json(line.decode()) for line in lines]

    def _compare(self, known: Mapping[str, Any]) -> None:
        if not known and read_experiment(self.path).task != Task.parse("python"):
            raise RunError(f"{self.path} holds a run of `fedcams run`; use `fedcams resume`, or give another folder")
        if not {"identity", "names"} <= known.keys():
            raise RunError(f"{self.path / PYTHON}: missing or damaged; restore it, or give another folder")
        if found := differences(self._identity, known["identity"]):
            raise RunError(f"{self.path} holds another run: {found}; call it as before, or give another folder")
        if changed := differences(self._names(), known["names"]):
            warnings.warn(f"{self.path}: continuing with different functions from before: {changed}", stacklevel=6)
        if known.get("examples", self._examples) != self._examples:
            fix = "give another folder to run with these"
            warnings.warn(f"{self.path}: the first client has different examples from before; {fix}", stacklevel=6)

    def _experiment(self) -> Experiment:
        simulation = self.simulation
        return Experiment.from_python(
            simulation.server.method,
            label=self.label,
            clients=len(simulation.problem.clients),
            sampler=simulation.sampler,
            rounds=simulation.rounds,
            seed=simulation.server.seed,
            engine=self.engine,
            evaluate_every=simulation.evaluate_every,
            probes=simulation.probes,
            theory_every=self.theory_every,
        )

    @functools.cached_property  # computed once, before training changes buffers that do not travel
    def _identity(self) -> dict[str, Any]:
        """Everything that decides what the rounds compute, by name; a run continues only if it is the same."""
        simulation, problem = self.simulation, self.simulation.problem
        method = simulation.server.method
        layouts = [layout and layout.id.hex() for layout in (problem.layout, problem.buffer_layout)]
        parameters = dict(problem.model.named_parameters())
        return {
            **method.to_dict(),
            **({"rounds": simulation.rounds} if method.depends_on_rounds else {}),
            "cohort": str(simulation.sampler),
            "seed": simulation.server.seed,
            "model": layouts,
            "frozen parameters": _digest({n: p for n, p in parameters.items() if not p.requires_grad}),
            "buffers that do not travel": _digest(problem.at_home),
            "clients": _digest_of_clients(problem.clients),
            "test set": None if simulation.test is None else _digest(_named(simulation.test)),
        }

    @functools.cached_property
    def _examples(self) -> str:
        """Return a digest of the first client's examples; loading all clients could take too long.

        A different digest only causes a warning, since a dataset may draw its examples at random.
        """
        clients = self.simulation.problem.clients
        return _digest(_named(clients[next(iter(clients))]))

    def _names(self) -> dict[str, str]:
        """Return the names of the functions that the run was given; they can only be compared by name."""
        problem = self.simulation.problem
        functions: dict[str, Any] = {"loss": problem.loss, "prepare": problem.prepare}
        functions |= {"metric" if name == SCORE else name: each for name, each in self.simulation.metrics.items()}
        functions |= {} if problem.augment is None else {"augment": problem.augment}
        return {key: getattr(value, "__qualname__", type(value).__qualname__) for key, value in functions.items()}

    def _call(self) -> str:
        """Return the call that continues this run."""
        method, simulation = self.simulation.server.method, self.simulation
        default = method_of(None, {}).to_dict()
        given = {key: value for key, value in method.to_dict().items() if value != default[key]}
        given |= {"rounds": simulation.rounds, "cohort": str(simulation.sampler), "seed": simulation.server.seed}
        words = ", ".join(f"{key}={value!r}" for key, value in {**given, "out": str(self.path)}.items())
        return f"fedcams.simulate(model, clients, test, {words})"


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of names, shapes, types and values, 16 hex digits."""
    found = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().cpu().contiguous()
        found.update(f"{name} {values.dtype} {tuple(values.shape)};".encode())
        found.update(values.reshape(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b"")
    return found.hexdigest()


def _named(examples: Examples) -> dict[str, Tensor]:
    x, y = examples
    return dict([*named_tensors(x, "x"), *named_tensors(y, "y")])


def _digest_of_clients(clients: Mapping[int, Examples]) -> str:
    """Return a digest of the clients' ids, and of their sizes if counting does not load the clients."""
    sizes = clients.sizes() if isinstance(clients, Clients) else None
    given = clients.given if isinstance(clients, Clients) else {}
    ids = [given[client] if isinstance(given.get(client), str) else client for client in clients]
    text = repr((ids, sizes))
    return f"{len(clients)}, {hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
