"""Simulated rounds on the digits against a loop over clients written by hand, timed alternately in one process."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedcams.bench.timing import Grid, Setup, best_of
from fedcams.engines import Examples
from fedcams.engines.compiled import has_compiler
from fedcams.experiment import Built, Experiment, build
from fedcams.local import Local
from fedcams.rounds import Client
from fedcams.rounds.server import start
from fedcams.simulation import Phases

if TYPE_CHECKING:
    from torch import Tensor

MODELS = ("mlp", "cnn")
BY_HAND = "by hand"
"""The name of the loop in a list of engines."""
PARTITIONS = ("iid", "dirichlet(alpha=0.3)")
LOCAL = "sgd(lr=0.05, epochs=3, batch=20)"
LARGE = "mlp(hidden=970, layers=2)"
"""A million parameters."""
UPLINKS = ("sign", "topk(ratio=1/64)")
OURS = ("encode", "aggregate", "record")
"""The phases that a federation without compression and records would not have."""
TIMED = 10
"""Rounds that make up one timing."""
ROUNDS, LAST = 60, 10
"""Rounds over which accuracies are compared, and how many of the last ones are averaged."""


@dataclass(frozen=True)
class Case:
    """Times of one model on one partition: 100 clients, 10 per round, 3 epochs, batches of 20."""

    model: str
    partition: str
    milliseconds: dict[str, float]
    """`train NAME` (local training of a cohort) and `round NAME` (everything), for each engine and `by hand`."""
    accuracy: dict[str, float]
    """Accuracy of FedAvg after the same number of rounds, by engine."""


@dataclass(frozen=True)
class Share:
    """What compression, byte counting and records cost in a round of a large model."""

    uplink: str
    parameters: int
    milliseconds: float
    share: float


def engines() -> tuple[str, ...]:
    """Return the engines to time; the compiled one needs a C++ compiler."""
    return ("stacked", "stacked(compile=true)") if has_compiler() else ("stacked",)


def measure(model: str, partition: str, turns: int) -> Case:
    """Time the first rounds of a run with the loop and every engine, alternately; return the best times."""
    built = {engine: _built(model, partition, engine) for engine in engines()}
    loop = _loop(built["stacked"])
    cohorts = _cohorts(built["stacked"], TIMED)
    contenders: dict[str, Setup] = {
        f"train {BY_HAND}": lambda: lambda: [loop.train(cohort) for cohort in cohorts],
        f"round {BY_HAND}": lambda: lambda: [loop.round(cohort) for cohort in cohorts],
    }
    for engine, made in built.items():
        contenders[f"train {engine}"] = functools.partial(_training, made, cohorts)
        contenders[f"round {engine}"] = functools.partial(_rounds, made)
    times = {name: elapsed / TIMED for name, elapsed in best_of(turns, contenders).items()}
    return Case(model, partition, times, _accuracies(model, partition))


def share(uplink: str, rounds: int) -> Share:
    """Return the smallest share over some rounds; the first two, which allocate memory, do not count."""
    built = _built(LARGE, "iid", "stacked", uplink=uplink)
    state, found = built.state, []
    for _ in range(rounds + 2):
        phases = Phases()
        state, _record = built.simulation.advance_(state, phases)
        total = sum(phases.seconds.values())
        found.append((sum(phases.seconds[name] for name in OURS) / total, 1000 * total))
    smallest, milliseconds = min(found[2:])
    return Share(uplink, built.simulation.server.layout.d, milliseconds, smallest)


def _built(model: str, partition: str, engine: str, **changes: Any) -> Built:
    values = {
        "task": "digits",
        "model": model,
        "partition": partition,
        "clients": 100,
        "sampler": "uniform(n=10)",
        "local": LOCAL,
        "server": "fedams(lr=0.03, eps=1e-3)",
        "uplink": "sign",
        "engine": engine,
        "rounds": ROUNDS,
    }
    return build(Experiment.from_dict(values | changes))


def _loop(built: Built) -> LoopByHand:
    problem, test = built.simulation.problem, built.simulation.test
    assert test is not None
    return LoopByHand(problem.model, list(problem.clients.values()), test, problem.local)


def _cohorts(built: Built, rounds: int) -> list[list[int]]:
    sampler, ids, seed = built.simulation.sampler, list(built.simulation.problem.clients), built.simulation.server.seed
    return [sampler.sample(ids, round, seed) for round in range(1, rounds + 1)]


def _training(built: Built, cohorts: list[list[int]]) -> Callable[[], Any]:
    run, state = built.simulation, built.state
    return lambda: [
        run.engine.train(run.problem, state.x, state.buffers, cohort, round, run.server.seed)
        for round, cohort in enumerate(cohorts, 1)
    ]


def _rounds(built: Built) -> Callable[[], Any]:
    """Rounds from the start, with fresh state, since a round consumes the state it begins with."""
    first, server = built.simulation, built.simulation.server
    client = Client(server.method, server.layout, server.buffer_layout, rounds=server.rounds)
    simulation = dataclasses.replace(first, client=client)
    state = start(server, built.state.x.clone(), built.state.buffers)

    def advance() -> None:
        now = state
        for _ in range(TIMED):
            now, _record = simulation.advance_(now)

    return advance


def _accuracies(model: str, partition: str) -> dict[str, float]:
    """Mean over the last rounds of FedAvg by the loop and by each engine."""
    found = {}
    for engine in engines():
        built = _built(model, partition, engine, server="fedavg", uplink="identity")
        state, scores = built.state, []
        for _ in range(ROUNDS):
            state, record = built.simulation.advance_(state)
            scores.append(record.test_accuracy or 0.0)
        found[engine] = fmean(scores[-LAST:])
    loop = _loop(_built(model, partition, "stacked"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found[BY_HAND] = fmean([loop.average(cohort) for cohort in _cohorts(built, ROUNDS)][-LAST:])
    return found


# -- the baseline ------------------------------------------------------------------------------------------------


class LoopByHand:
    """FedCAMS written by hand: a loop over clients with `torch.optim`, scaled sign with error feedback, AMSGrad."""

    def __init__(self, model: nn.Module, clients: Sequence[Examples], test: Examples, local: Local) -> None:
        self.model, self.clients, self.test, self.local = model, clients, test, local
        self.x = parameters_to_vector(model.parameters()).detach().clone()
        self.m, self.v, self.v_max = (torch.zeros_like(self.x) for _ in range(3))
        self.residuals: dict[int, Tensor] = {}
        self.loss = nn.CrossEntropyLoss()

    def train(self, cohort: Sequence[int]) -> list[Tensor]:
        """Train every client of a cohort and return their updates."""
        return [self._train_one(*self.clients[client]) for client in cohort]

    def average(self, cohort: Sequence[int]) -> float:
        """Run a round of FedAvg and return the accuracy."""
        self.x = self.x + torch.stack(self.train(cohort)).mean(0)
        return self._evaluate()[1]

    def round(self, cohort: Sequence[int]) -> str:
        """Run a round of FedCAMS with packed bits and return its record as a line of JSON."""
        decoded, sent = [], 0
        for client, delta in zip(cohort, self.train(cohort), strict=True):
            h = delta + self.residuals.get(client, 0)
            scale, positive = h.abs().mean(), h >= 0
            sent += len(np.packbits(positive.numpy()).tobytes()) + 4
            decoded.append(torch.where(positive, scale, -scale))
            self.residuals[client] = h - decoded[-1]
        self._step(torch.stack(decoded).mean(0))
        loss, accuracy = self._evaluate()
        return json.dumps({"cohort": list(cohort), "loss": loss, "accuracy": accuracy, "sent": sent})

    def _train_one(self, x: Tensor, y: Tensor) -> Tensor:
        vector_to_parameters(self.x.clone(), self.model.parameters())  # parameters become views of it
        optimizer = torch.optim.SGD(self.model.parameters(), float(self.local.lr))
        for _ in range(self.local.epochs or 1):
            for batch in torch.randperm(len(x)).split(self.local.batch):
                loss = self.loss(self.model(x[batch]), y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return parameters_to_vector(self.model.parameters()).detach() - self.x

    def _step(self, delta: Tensor, lr: float = 0.03, eps: float = 1e-3) -> None:
        self.m = 0.9 * self.m + 0.1 * delta
        self.v = 0.99 * self.v + 0.01 * delta**2
        self.v_max = torch.maximum(self.v_max, self.v).clamp(min=eps)
        self.x = self.x + lr * self.m / self.v_max.sqrt()

    @torch.no_grad()
    def _evaluate(self) -> tuple[float, float]:
        vector_to_parameters(self.x.clone(), self.model.parameters())  # parameters become views of it
        x, y = self.test
        outputs = self.model(x)
        return float(self.loss(outputs, y)), float((outputs.argmax(1) == y).float().mean())


# -- tables ------------------------------------------------------------------------------------------------------


def speed(cases: Sequence[Case]) -> Grid:
    """Return a table of milliseconds per round and of the speedup over the loop by hand."""
    rows = []
    for case in cases:
        for engine in case.accuracy:
            train, whole = (case.milliseconds[f"{what} {engine}"] for what in ("train", "round"))
            by_hand = [case.milliseconds[f"{what} {BY_HAND}"] for what in ("train", "round")]
            numbers = (f"{train:.2f}", f"{by_hand[0] / train:.1f}x", f"{whole:.2f}", f"{by_hand[1] / whole:.1f}x")
            rows.append((f"{case.model}, {case.partition}", engine, *numbers, f"{case.accuracy[engine]:.3f}"))
    heading = ("problem", "engine", "training ms", "faster", "whole round ms", "faster", "FedAvg's accuracy")
    return Grid("Rounds on the digits: 100 clients, 10 per round, 3 epochs, batches of 20", heading, rows)


def shares(found: Sequence[Share]) -> Grid:
    """Return a table of what compression, byte counting and records cost."""
    rows = [(one.uplink, f"{one.parameters:,}", f"{one.milliseconds:.1f}", f"{100 * one.share:.0f}%") for one in found]
    heading = ("uplink", "parameters", "round ms", "compression, counting, records")
    return Grid("A larger model", heading, rows)
