"""Simulated rounds: both sides in one process, on the rows of the whole cohort; bytes are counted instead of sent."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedcams.downlink import BUFFERS, MODEL
from fedcams.engines import CohortUpdate, Engine, Examples, Problem, choose_with_reason
from fedcams.method import Method
from fedcams.privacy.secret import new_key
from fedcams.probes import Probe
from fedcams.rounds import client as client_side
from fedcams.rounds import server as server_side
from fedcams.rounds.client import Client
from fedcams.rounds.cohort import Received
from fedcams.rounds.intake import Intake
from fedcams.rounds.private import draw_cohort, epsilon_after, simulated_keys
from fedcams.rounds.server import Server, ServerState
from fedcams.rows import RowStore
from fedcams.sampler import Sampler
from fedcams.simulation.counting import count_bytes
from fedcams.simulation.evaluate import SCORE, Metrics, evaluate
from fedcams.simulation.probing import Measurement
from fedcams.simulation.record import Phases, RoundRecord

NOTHING_SENT = {"wire_down_deltas": 0, "wire_down_catchup": 0, "wire_down_dense": 0}
"""The byte counts in the record of a round without a cohort."""


@dataclass(frozen=True)
class Simulation:
    """Everything that defines a run; the result of `advance_` depends only on it and on the state."""

    problem: Problem
    server: Server
    client: Client
    engine: Engine
    test: Examples | None
    metrics: Metrics
    evaluate_every: int = 1
    probes: tuple[Probe, ...] = ()
    why_engine: str = "named"
    """Why the engine is this one."""
    not_means: set[str] = field(default_factory=set)
    """Metrics that are not means over examples and that the log has already named."""

    @classmethod
    def of(
        cls,
        problem: Problem,
        method: Method,
        *,
        sampler: Sampler,
        rounds: int,
        seed: int,
        engine: str | Engine,
        test: Examples | None,
        metrics: Metrics,
        sampling_weights: Sequence[float] | None = None,
        evaluate_every: int = 1,
        probes: tuple[Probe, ...] = (),
        rows: RowStore | None = None,
    ) -> Simulation:
        """Return the simulation of a method on a problem.

        `test` and `metrics` are for evaluation every `evaluate_every` rounds and after the last one, `sampling_weights`
        for samplers that need them, and `rows` is where clients keep theirs, in memory unless given. Refuses a cohort
        larger than the population, and rows and engines that do not fit.
        """
        layout, buffer_layout, device = problem.layout, problem.buffer_layout, problem.device
        memory = method.memory(layout, buffer_layout)
        rows = rows or (RowStore.in_memory(memory, device) if memory else None)
        held = server_side.replica_layouts(method, layout, buffer_layout)
        replicas = RowStore.in_memory(held, device) if held else None
        population = len(problem.clients)
        sampler.expected(population)  # refuses a cohort larger than the population
        drawn_by = dict(zip(problem.clients, sampling_weights, strict=True)) if sampling_weights else None
        server = Server(method, layout, buffer_layout, seed, rounds, population, replicas, sampler, drawn_by)
        client = Client(method, layout, buffer_layout, rows, rounds=rounds, population=population)
        chosen, why = choose_with_reason(engine, problem, rounds, sampler.size_varies)
        return cls(problem, server, client, chosen, test, metrics, evaluate_every, probes, why)

    @property
    def rounds(self) -> int:
        """The number of rounds in the run."""
        assert self.server.rounds is not None, "the server of a simulation knows the length of the run"
        return self.server.rounds

    @property
    def sampler(self) -> Sampler:
        """What chooses the cohorts."""
        assert self.server.sampler is not None, "the server of a simulation draws the cohorts"
        return self.server.sampler

    def start(self) -> ServerState:
        """Return the state before the first round, from the model's current parameters and buffers."""
        state = server_side.start(self.server, *self.problem.read())
        # each site of a federation has its own key; simulated clients derive theirs from one
        return state._replace(secret=new_key()) if self.server.method.privacy.at_client else state

    def advance_(self, state: ServerState, phases: Phases | None = None) -> tuple[ServerState, RoundRecord]:
        """Run one round; return the new state and the round's record.

        Overwrites the tensors of the old state. An empty cohort leaves the model unchanged. `phases` collects the time
        of each phase.
        """
        phases = phases or Phases()
        round = state.round + 1
        cohort = draw_cohort(self.server, state, self._population)
        with torch.inference_mode(False):  # training needs gradients, even if the caller is in inference mode
            if not cohort:
                state, found = self._without_clients(state)
            else:
                state, found = self._exchange(state, cohort, phases)
            with phases("evaluate"):
                scores = self._evaluate(state)
        spent = epsilon_after(self.server, state)
        return state, RoundRecord.from_dict({"round": round, "cohort": cohort, **found, **scores, **spent})

    def _without_clients(self, state: ServerState) -> tuple[ServerState, dict[str, Any]]:
        """Return the state after a round without clients, and what to record; a noisy server still takes a step."""
        privacy = self.server.method.privacy
        if not privacy.active or privacy.at_client:
            return state._replace(round=state.round + 1), {**NOTHING_SENT}
        state, concluded = server_side.conclude_(self.server, state, Intake(self.server, state, []))
        return state, {**NOTHING_SENT, "delta_norm": concluded.delta_norm}

    def _exchange(
        self, state: ServerState, cohort: Sequence[int], phases: Phases
    ) -> tuple[ServerState, dict[str, Any]]:
        """Run everything between sampling and evaluation; return the new state and what to record."""
        round = state.round + 1
        method = self.server.method.in_round(round, self.rounds)
        with phases("broadcast"):
            delivery = method.downlink.deliver(state.downlink, server_side.broadcast(self.server, state), cohort)
            buffers = state.buffers if delivery.buffers is None else delivery.buffers
            received = Received(delivery.start, buffers, state.control)
        with phases("train"):
            trained = self._train(method, received, cohort, round)
        measurement = Measurement(self.probes, state.x, cohort, trained)
        with phases("encode"):
            outgoing = client_side.respond_(
                self._client(state), cohort, received, trained, round, self.server.seed, measurement.needs
            )
        with phases("aggregate"):
            intake = Intake(self.server, state._replace(downlink=delivery.state), cohort, in_order=True)
            intake.take_all(outgoing)
            _ = intake.means  # computed here, so that its time counts here
        with phases("step"):
            state, concluded = server_side.conclude_(self.server, intake.state, intake)
            measured = measurement.numbers(self.client, outgoing, intake, state, concluded)
            client_side.commit(self.client, outgoing, concluded.accepted)
        with phases("record"):
            counts = count_bytes(self.server, method, outgoing, delivery)
        about = {"train_loss": concluded.train_loss, "delta_norm": concluded.delta_norm, "refused": concluded.refused}
        return state, {**about, **counts, **measured}

    def _client(self, state: ServerState) -> Client:
        """Return the clients with the keys of their noise, if they add it."""
        if not self.client.method.privacy.at_client:
            return self.client
        return dataclasses.replace(self.client, noise_keys=simulated_keys(state.secret))

    @functools.cached_property
    def _population(self) -> list[int]:
        return list(self.problem.clients)

    def _train(self, method: Method, received: Received, cohort: Sequence[int], round: int) -> CohortUpdate:
        shift = client_side.shift_of(self.client, cohort, received.control)
        return self.engine.train(
            self.problem, received.start, received.buffers, cohort, round, self.server.seed,
            rate=float(method.local.lr), shift=shift,
        )  # fmt: skip

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _is_evaluated(self, round: int) -> bool:
        return round % self.evaluate_every == 0 or round == self.rounds

    def _evaluate(self, state: ServerState) -> dict[str, float | None]:
        """Return loss and metrics of the server's model, of the one that clients hold, and of the average."""
        if self.test is None or not self._is_evaluated(state.round):
            return {}
        common = self.server.method.downlink.common(state.downlink)
        models = {"test": (state.x, state.buffers), "held": (common.get(MODEL), common.get(BUFFERS, state.buffers))}
        if state.average is not None:
            models["averaged"] = (state.average.x, state.average.buffers)
        found: dict[str, float | None] = {}
        for name, (x, buffers) in models.items():
            if x is not None:
                scores = evaluate(self.problem, x, buffers, self.test, self.metrics, self.engine, self.not_means)
                scores[SCORE] = next((scores[first] for first in self.metrics), None)
                found |= {f"{name}_{key}": value for key, value in scores.items()}
        return found
