"""Federations in this process: typical apps, a node for every site, and whole runs of a method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedcams import Method
from fedcams.engines import Problem, engine
from fedcams.experiment import Experiment, build
from fedcams.flower import FedCAMS, uplink
from fedcams.flower.arrays import ArrayNames
from fedcams.flower.checkpoint import read_ledger
from fedcams.flower.mod import Initial
from fedcams.rounds import ServerState
from fedcams.simulation import RoundRecord
from flower_grid import Fault, LocalGrid

CLIENTS, ROUNDS = 4, 4
Train = Callable[[Message, Context], Message]
Change = Callable[[Problem], None]
"""What is done to the data or the model before anything else."""
Log = dict[tuple[int, int], Tensor]
"""(client, round) -> what its training changed."""


class Waits:
    """A clock that runs only while a round waits: however slow the machine, a deadline comes when nothing else does."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Return at once: on these grids, nothing is under way in the meantime."""
        self.now += seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between two looks at the grid, where nothing is under way, and no waiting for the disk.

    To sync files matters when the machine fails, which no test here pretends; a kill leaves what was written.
    """
    monkeypatch.setattr("fedcams.flower.grid_round.time", Waits())
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr("os.fdatasync", lambda descriptor: None)
    for module in ("grid_round", "replies", "roster"):
        monkeypatch.setattr(f"fedcams.flower.{module}.PAUSE", 0.01)


def experiment(**changes: Any) -> Experiment:
    """A run that takes a moment, with some values changed."""
    values: dict[str, Any] = {
        "task": "quadratic",
        "model": "point",
        "clients": CLIENTS,
        "sampler": "uniform(n=3)",
        "server": "fedams(lr=0.1, eps=1e-3)",
        "uplink": "topk(ratio=1/8)",
        "local": "sgd(lr=0.05, steps=5, batch=8)",
        "rounds": ROUNDS,
        "engine": "loop",
        "seed": 3,
    }
    return Experiment.from_dict({**values, **changes})


# -- an app that trains like the simulator -----------------------------------------------------------------------------


def train_with(problem: Problem, log: Log | None = None) -> Train:
    """An app as people write them: it loads the arrays, trains, and returns the whole model."""

    def train(message: Message, context: Context) -> Message:
        arrays, config = message.content.array_records, message.content.config_records["config"]
        problem.model.load_state_dict(arrays["arrays"].to_torch_state_dict())
        client, round, seed = (int(config[key]) for key in ("client", "server-round", "seed"))  # type: ignore[arg-type]
        shift = shift_in(arrays, problem)
        rate = float(config["local-rate"])  # type: ignore[arg-type]
        update = engine("loop").train(problem, *problem.read(), [client], round, seed, rate=rate, shift=shift)
        if log is not None:
            log[client, round] = update.delta[0].double()
        told = {"num-examples": update.examples[0], "num-steps": update.steps[0], "train_loss": float(update.loss[0])}
        metrics = MetricRecord(told if shift is None else {**told, "shift-applied": 1})
        content = RecordDict({"arrays": ArrayRecord(problem.model.state_dict()), "metrics": metrics})
        return Message(content, reply_to=message)

    return train


def shift_in(arrays: Any, problem: Problem) -> Tensor | None:
    """What the method's control variates add to every gradient, `[1, d]`; None for a method without them."""
    if "fedcams.shift" not in arrays:
        return None
    parts = arrays["fedcams.shift"].to_torch_state_dict()
    return torch.cat([parts[name].reshape(-1) for name in problem.layout.names])[None]


def client_app(folder: Path, train: Train, spec: str | None = None, initial: Initial | None = None) -> ClientApp:
    """An app with the mod."""
    app = ClientApp(mods=[uplink(spec, state_dir=folder, initial=initial)])
    app.train()(train)
    return app


# -- federations of an experiment --------------------------------------------------------------------------------------


def federation(
    tmp_path: Path,
    what: Experiment,
    fault: Fault | None = None,
    log: Log | None = None,
    change: Change = lambda problem: None,
    initial: Initial | None = None,
    **options: Any,
) -> tuple[LocalGrid, FedCAMS, ArrayRecord]:
    """Nodes 100, 101, ... are sites 0, 1, ...; each call knows nothing of the one before but what is on disk."""
    problem = build(what).simulation.problem
    change(problem)
    arrays = ArrayRecord(problem.model.state_dict())
    arrays = ArrayRecord({name: Array(array.numpy().copy()) for name, array in arrays.items()})
    app = client_app(tmp_path / "sites", train_with(problem, log), initial=initial)
    nodes = {100 + site: {"site-id": site} for site in range(what.clients)}
    grid = LocalGrid(dict.fromkeys(nodes, app), nodes, fault)
    chosen = {"sampler": what.sampler, "clients": what.clients, "seed": what.seed, "min_available": what.clients}
    given = {**chosen, "model": problem.model, "checkpoint": tmp_path / "checkpoint", **options}
    return grid, FedCAMS(what.method, **given), arrays


def run(grid: LocalGrid, strategy: FedCAMS, arrays: ArrayRecord, rounds: int = ROUNDS, timeout: float = 5.0) -> Any:
    """What the strategy's `start` returns."""
    return strategy.start(grid, arrays, rounds, timeout=timeout)


def simulated(what: Experiment) -> tuple[Tensor, Tensor | None]:
    """The model and its buffers after the last round in the simulator."""
    state, _ = simulation(what)
    return state.x, state.buffers


def simulation(what: Experiment, change: Change = lambda problem: None) -> tuple[ServerState, list[RoundRecord]]:
    """The state after the last round in the simulator, and the records."""
    built = build(what)
    change(built.simulation.problem)
    state, records = built.state, []
    for _ in range(what.rounds):
        state, record = built.simulation.advance_(state)
        records.append(record)
    return state, records


def vector(arrays: ArrayRecord, what: Experiment) -> Tensor:
    """The parameters of a model `[d]`."""
    return vectors(arrays, what)[0]


def vectors(arrays: ArrayRecord, what: Experiment) -> tuple[Tensor, Tensor | None]:
    """The parameters and the buffers of a model."""
    names = ArrayNames.of(arrays, build(what).simulation.problem.model)
    return names.vectors(ArrayRecord(dict(arrays)))


# -- for tests of single methods ---------------------------------------------------------------------------------------


class Federated(NamedTuple):
    """How a run over the in-process grid ended."""

    x: Tensor
    """`[d]`"""
    buffers: Tensor | None
    averaged: Tensor | None
    """The averaged model `[d]`, if the method has one."""
    ledger: list[dict[str, Any]]


class Stopped(BaseException):
    """Ends a server between two rounds."""


def run_method(
    folder: Path,
    method: Method | None = None,
    *,
    restarts: tuple[int, ...] = (),
    fault: Fault | None = None,
    change: Change = lambda problem: None,
    **changes: Any,
) -> Federated:
    """Run a method over Flower's grid in this process; it ends in the model of `simulation(experiment(**changes))`.

    `changes` are keys of the experiment, the method's among them, and win. The server and all clients end after each
    of the rounds in `restarts`, and others go on from what is on disk.
    """
    what = experiment(**{**({} if method is None else method.to_dict()), **changes})
    for stop in restarts:
        with pytest.raises(Stopped):
            started(what, federation(folder, what, fault, change=change), stop)
    strategy, result = started(what, federation(folder, what, fault, change=change), None)
    x, buffers = vectors(result.arrays, what)
    averaged = None if strategy.averaged_arrays is None else vector(strategy.averaged_arrays, what)
    return Federated(x, buffers, averaged, read_ledger(folder / "checkpoint"))


def started(what: Experiment, parts: tuple[LocalGrid, FedCAMS, ArrayRecord], stop: int | None) -> tuple[FedCAMS, Any]:
    """The strategy and its result; ends by Stopped after round `stop`, which is on disk by then."""

    def evaluate(round: int, arrays: ArrayRecord) -> None:
        if round == stop:
            raise Stopped

    grid, strategy, arrays = parts
    return strategy, strategy.start(grid, arrays, what.rounds, timeout=5.0, evaluate_fn=evaluate)
