"""Simulated rounds: both sides in one process, on the rows of the whole cohort; bytes are counted instead of sent."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fedcams.bits.vectors import row_norms
from fedcams.downlink import BUFFERS, MODEL
from fedcams.engines import CohortUpdate, Engine, Examples, Problem, choose_with_reason
from fedcams.errors import SpecError
from fedcams.method import RESIDUAL, Method
from fedcams.privacy.secret import new_key
from fedcams.probes import Leftovers, Probe, inner_products, mean_before
from fedcams.rounds import client as client_side
from fedcams.rounds import server as server_side
from fedcams.rounds.client import Client
from fedcams.rounds.cohort import Outgoing, Received, code_rows, some_rows
from fedcams.rounds.intake import Intake
from fedcams.rounds.messages import UPDATE
from fedcams.rounds.private import add_noise_, draw_cohort, epsilon_after, simulated_keys
from fedcams.rounds.server import Concluded, Server, ServerState
from fedcams.rows import RowStore
from fedcams.sampler import Sampler
from fedcams.simulation.counting import count_bytes
from fedcams.simulation.evaluate import SCORE, Metrics, evaluate
from fedcams.simulation.record import Phases, RoundRecord
from fedcams.transforms import Facts

if TYPE_CHECKING:
    from torch import Tensor

NOTHING_SENT = {"wire_down_deltas": 0, "wire_down_catchup": 0, "wire_down_dense": 0}
"""The byte counts in the record of a round without a cohort."""


@dataclass(frozen=True)
class Simulation:
    """Everything that defines a run; the result of `advance` depends only on it and on the state."""

    problem: Problem
    server: Server
    client: Client
    sampler: Sampler
    engine: Engine
    test: Examples | None
    metrics: Metrics
    sampling_weights: Sequence[float] | None = None
    evaluate_every: int = 1
    probes: tuple[Probe, ...] = ()
    why_engine: str = "named"
    """Why the engine is this one."""

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

        `test` and `metrics` are for evaluation every `evaluate_every` rounds, `sampling_weights` for samplers that need
        them, and `rows` is where clients keep theirs, in memory unless given. Refuses a cohort larger than the
        population, and rows and engines that do not fit.
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
        client = Client(method, layout, buffer_layout, rows, None, rounds)
        chosen, why = choose_with_reason(engine, problem, rounds, sampler.size_varies)
        return cls(
            problem, server, client, sampler, chosen, test, metrics, sampling_weights, evaluate_every, probes, why
        )

    def start(self) -> ServerState:
        """Return the state before the first round, from the model's current parameters and buffers."""
        state = server_side.start(self.server, *self.problem.read())
        # each site of a federation has a key of its own; simulated clients derive theirs from one
        return state._replace(secret=new_key()) if self.server.method.privacy.at_client else state

    def advance(self, state: ServerState, phases: Phases | None = None) -> tuple[ServerState, RoundRecord]:
        """Run one round; return the new state and the round's record.

        Overwrites the tensors of the old state. An empty cohort leaves the model unchanged. `phases` collects the time
        of each phase.
        """
        phases = phases or Phases()
        round = state.round + 1
        cohort = draw_cohort(self.server, state, self.sampler, self._population, self.sampling_weights)
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
        state, concluded = server_side.conclude(self.server, state, Intake(self.server, state, []))
        return state, {**NOTHING_SENT, "delta_norm": concluded.delta_norm}

    def _exchange(
        self, state: ServerState, cohort: Sequence[int], phases: Phases
    ) -> tuple[ServerState, dict[str, Any]]:
        """Run everything between sampling and evaluation; return the new state and what to record."""
        round = state.round + 1
        method = self.server.method.in_round(round, self.server.rounds)
        with phases("broadcast"):
            delivery = method.downlink.deliver(state.downlink, server_side.broadcast(self.server, state), cohort)
            buffers = state.buffers if delivery.buffers is None else delivery.buffers
            received = Received(delivery.start, buffers, state.control)
        with phases("train"):
            trained = self._train(method, received, cohort, round)
        delta = trained.delta.clone() if self._needs("mean_h") else None
        before = state.x.clone() if self._needs("step") else None
        gram = inner_products(trained.delta) if self._needs("gram") else None
        with phases("encode"):
            measure, population = self._needs("error"), len(self._population)
            outgoing = client_side.respond_(
                self._client(state), cohort, received, trained, round, self.server.seed, population, measure
            )
        with phases("aggregate"):
            intake = Intake(self.server, state._replace(downlink=delivery.state), cohort, in_order=True)
            intake.take_all(outgoing)
            _ = intake.means  # computed here, so that its time counts here
        with phases("step"):
            state, concluded = server_side.conclude(self.server, intake.state, intake)
            seen = {"gram": gram, "state": state.optimizer, "step_norm": _distance(state.x, before)}
            seen |= {"norms": intake.norms, "bounds": intake.bounds}
            known = concluded._replace(facts=_with_counts(concluded.facts, cohort, trained))
            measured = self._measure(method, cohort, outgoing, delta, known, seen, state.secret)
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

    # -- what probes measure -----------------------------------------------------------------------------------------

    def _needs(self, what: str) -> bool:
        return any(what in probe.needs for probe in self.probes)

    def _measure(
        self, method: Method, cohort: Sequence[int], outgoing: Outgoing, delta: Tensor | None, concluded: Concluded,
        seen: dict[str, Any], secret: str,
    ) -> Mapping[str, float | None]:  # fmt: skip
        """Return what the probes measure, before rows are committed; nothing if no update was accepted.

        `seen` has the inner products of the whole cohort's updates, and what the server's step left; `secret` is the
        key of the noise.
        """
        if not concluded.accepted or concluded.mean is None or not self.probes:
            return {}
        ids, facts, layout = outgoing.arrival.facts.ids, concluded.facts, self.server.layout
        places = [ids.index(client) for client in facts.ids]
        codec, code = outgoing.arrival.codes[UPDATE]
        mean_h, norm, trained = None, 0.0, [cohort.index(client) for client in facts.ids]
        if delta is not None:
            mean_h, norm = self._uncompressed_(method, some_rows(delta, trained), facts, secret)
        if seen["gram"] is not None:
            seen["gram"] = seen["gram"][trained][:, trained]
        if RESIDUAL in outgoing.rows:
            seen["residual"] = some_rows(outgoing.rows[RESIDUAL], places)
        left = Leftovers(
            method=method, layout=layout, facts=facts, mean=concluded.mean, mean_h=mean_h, mean_delta_norm=norm,
            error=None if outgoing.errors is None else some_rows(outgoing.errors, places),
            decoded=lambda: codec.decode(code_rows(code, places), layout), round=facts.round, seed=facts.seed,
            **seen,
        )  # fmt: skip
        return {name: value for probe in self.probes for name, value in _numbers(probe, left).items()}

    def _uncompressed_(self, method: Method, delta: Tensor, facts: Facts, secret: str) -> tuple[Tensor, float]:
        """Return the mean without compression, and the norm of the mean update; overwrites `delta [C, d]`."""
        layout, kept = self.server.layout, self.client.rows if self.client.keeps(RESIDUAL) else None
        for transform in method.transforms:
            transform.update_(delta, facts, layout)
        if method.privacy.at_client:
            add_noise_(method, delta, facts.ids, facts.round, self.server.rounds, simulated_keys(secret))
        residual = None if kept is None else kept.gather(RESIDUAL, facts.ids)
        mean_h, norm = mean_before(delta, residual, facts.weights)
        if method.transforms or method.privacy.active:
            mean_delta, _ = mean_before(delta, None, facts.weights)
            h = delta if residual is None else delta.add_(residual.to(delta.device))
            for transform in method.transforms:
                transform.message_(h, facts, layout)
            method.privacy.clip_(h)
            mean_h, _ = mean_before(h, None, facts.weights)
            for transform in method.transforms:
                transform.mean_(mean_h, facts, layout)
                transform.mean_(mean_delta, facts, layout)
            norm = float(mean_delta.norm())
        return mean_h, norm

    # -- the record --------------------------------------------------------------------------------------------------

    def _evaluate(self, state: ServerState) -> dict[str, float | None]:
        """Return loss and metrics of the server's model, of the one that clients hold, and of the average."""
        if self.test is None or state.round % self.evaluate_every:
            return {}
        common = self.server.method.downlink.common(state.downlink)
        models = {"test": (state.x, state.buffers), "held": (common.get(MODEL), common.get(BUFFERS, state.buffers))}
        if state.average is not None:
            models["averaged"] = (state.average.x, state.average.buffers)
        found: dict[str, float | None] = {}
        for name, (x, buffers) in models.items():
            if x is not None:
                scores = evaluate(self.problem, x, buffers, self.test, self.metrics, self.engine)
                scores[SCORE] = next((scores[first] for first in self.metrics), None)
                found |= {f"{name}_{key}": value for key, value in scores.items()}
        return found


def _distance(x: Tensor, before: Tensor | None) -> float | None:
    """Return ‖x - before‖; None if nothing was kept from before."""
    return None if before is None else float(row_norms((x - before)[None]))


def _with_counts(facts: Facts, cohort: Sequence[int], trained: CohortUpdate) -> Facts:
    """Return the facts with what clients may not tell the server, but a simulation knows for its probes."""
    places = [cohort.index(client) for client in facts.ids]
    examples, steps = (tuple(counts[i] for i in places) for counts in (trained.examples, trained.steps))
    return dataclasses.replace(facts, examples=examples, steps=steps)


def _numbers(probe: Probe, left: Leftovers) -> dict[str, float]:
    """Return what a probe measures as plain numbers; refuses a name that the record uses for something else."""
    found = probe.measure(left)
    if taken := sorted(found.keys() & RoundRecord.__dataclass_fields__.keys()):
        raise SpecError(f"the probe {probe.name} measures {taken[0]!r}, which every record has already; rename it")
    return {name: float(value) for name, value in found.items()}
