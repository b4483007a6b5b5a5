"""Simulated rounds on the digits against a plain loop over clients, in one process in turn."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from fedcams.bench.plain import PlainLoop
from fedcams.bench.timing import Setup, best_of
from fedcams.engines.compiled import has_compiler
from fedcams.experiment import Built, Experiment, build
from fedcams.feedback import ErrorFeedback
from fedcams.residuals import ResidualStore
from fedcams.rounds.server import start
from fedcams.simulation import Phases

MODELS = ("mlp", "cnn")
BY_HAND = "by hand"
"""The name of the loop among the engines."""
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
    """One model and one partition: 100 clients, 10 a round, 3 epochs, batches of 20."""

    model: str
    partition: str
    milliseconds: dict[str, float]
    """Of `train` (local training of a cohort) and `round` (everything), by the loop and by each engine."""
    accuracy: dict[str, float]
    """Of FedAvg after the same number of rounds."""


@dataclass(frozen=True)
class Share:
    """What compression, byte counting and records cost in a round of a large model."""

    uplink: str
    parameters: int
    milliseconds: float
    share: float


def engines() -> tuple[str, ...]:
    """Those that are timed: compiled code takes a compiler."""
    return ("stacked", "stacked(compile=true)") if has_compiler() else ("stacked",)


def measure(model: str, partition: str, turns: int) -> Case:
    """Times the first rounds of a run, again and again, by the loop and by every engine in turn."""
    built = {engine: _built(model, partition, engine) for engine in engines()}
    loop = _plain(built["stacked"])
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
    """The smallest share over some rounds; the first two are left out, in which memory is new."""
    built = _built(LARGE, "iid", "stacked", uplink=uplink)
    state, found = built.state, []
    for _ in range(rounds + 2):
        phases = Phases()
        state, _record = built.simulation.advance(state, phases)
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


def _plain(built: Built) -> PlainLoop:
    problem, test = built.simulation.problem, built.simulation.test
    assert test is not None
    return PlainLoop(problem.model, list(problem.clients.values()), test, problem.local)


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
    """From the start: a round consumes the state it begins with."""
    first, server = built.simulation, built.simulation.server
    store = ResidualStore.in_memory(server.layout)
    simulation = dataclasses.replace(first, uplink=ErrorFeedback(first.uplink.compressor, store))
    state = start(server, built.state.x.clone(), built.state.buffers)

    def advance() -> None:
        now = state
        for _ in range(TIMED):
            now, _record = simulation.advance(now)

    return advance


def _accuracies(model: str, partition: str) -> dict[str, float]:
    """Mean over the last rounds of FedAvg by the loop and by each engine."""
    found = {}
    for engine in engines():
        built = _built(model, partition, engine, server="fedavg", uplink="identity")
        state, scores = built.state, []
        for _ in range(ROUNDS):
            state, record = built.simulation.advance(state)
            scores.append(record.test_accuracy or 0.0)
        found[engine] = fmean(scores[-LAST:])
    loop = _plain(_built(model, partition, "stacked"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found[BY_HAND] = fmean([loop.average(cohort) for cohort in _cohorts(built, ROUNDS)][-LAST:])
    return found
