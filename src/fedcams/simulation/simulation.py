"""A simulated round: the two halves batched in one process, with the same arithmetic and the same byte counts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcams.aggregate import mean_of_rows
from fedcams.compress.identity import IDENTITY
from fedcams.downlink import Broadcast, Sent
from fedcams.engines import Engine, Examples, Problem
from fedcams.errors import UpdateError
from fedcams.feedback import ErrorFeedback, Pending
from fedcams.keys import derive
from fedcams.layout import Layout
from fedcams.rounds import Server, ServerState
from fedcams.rounds.messages import instruction_size, reply_size
from fedcams.sampler import Sampler
from fedcams.simulation.evaluate import Metric, evaluate
from fedcams.simulation.phases import Phases
from fedcams.simulation.record import RoundRecord
from fedcams.wire import size, sizes


@dataclass(frozen=True)
class Simulation:
    """Everything that defines a run; what `advance` does depends on it and on the state alone."""

    problem: Problem
    server: Server
    uplink: ErrorFeedback
    sampler: Sampler
    engine: Engine
    test: Examples | None
    metric: Metric
    sampling_weights: Sequence[float] | None = None
    evaluate_every: int = 1
    measure_gamma: bool = False

    @torch.inference_mode(False)  # training needs gradients, whatever the caller does beside it
    def advance(self, state: ServerState, phases: Phases | None = None) -> tuple[ServerState, RoundRecord]:
        """One round. Consumes the state; `phases` collects where the time goes."""
        phases = phases or Phases()
        round, seed = state.round + 1, self.server.seed
        cohort = self.sampler.sample(self._population, round, seed, self.sampling_weights)
        if not cohort:
            return self._skip(state._replace(round=round))
        with phases("broadcast"):
            broadcast = Broadcast(state.x, self.server.layout, round, seed, self.server.replicas)
            start, sent, told = self.server.downlink.deliver(state.downlink, broadcast, cohort)
        with phases("train"):
            update = self.engine.train(self.problem, start, state.buffers, cohort, round, seed)
        weights = [self.server.weight(examples) for examples in update.examples]
        before = self._mean_before(cohort, update.delta, weights) if self.measure_gamma else None
        with phases("encode"):
            pending = self._encode(cohort, update.delta, round)
        with phases("aggregate"):
            mean = mean_of_rows(self.uplink.compressor, pending.code, self.server.layout, weights)
            buffers = _mean_buffers(self.server.buffer_layout, update.buffers, weights)
        gamma = None if before is None else self._gamma(*before, mean, round)
        norm = float(mean.norm())
        _check_losses(cohort, update.loss, round)
        with phases("step"):
            x, optimizer = self.server.optimizer.step(state.optimizer, state.x, mean)
            self.uplink.commit(pending)
        state = ServerState(round, x, buffers, optimizer, told, state.accepted)
        with phases("record"):
            counts = self._counts(pending, state.buffers, sent)
        with phases("evaluate"):
            loss, score, *held = self._evaluate(state)
        train_loss, q = float(update.loss.double().mean()), _mean_error(pending)
        parts = [sum(size for kind, size in sent if kind == name) for name in ("delta", "catchup", "dense")]
        return state, RoundRecord(round, cohort, train_loss, loss, score, *counts, q, gamma, norm, *parts, *held)

    @functools.cached_property
    def _population(self) -> list[int]:
        return list(self.problem.clients)

    # -- the parts of a round ------------------------------------------------------------------------------------

    def _encode(self, cohort: Sequence[int], delta: Tensor, round: int) -> Pending:
        keys = [derive(self.server.seed, "uplink", round, client) for client in cohort]
        try:
            return self.uplink.prepare(cohort, delta, round, keys, measure=True)
        except UpdateError as error:
            bad = [client for client, row in zip(cohort, delta, strict=True) if not torch.isfinite(row).all()]
            raise UpdateError(f"round {round}, clients {bad}: {error}") from None

    def _mean_before(self, cohort: Sequence[int], delta: Tensor, weights: Sequence[float]) -> tuple[Tensor, float]:
        """The mean of the h of this cohort, and the norm of the mean update."""
        parts = torch.tensor(weights, dtype=delta.dtype, device=delta.device) / sum(weights)
        mean = parts @ delta
        residual = 0.0 if self.uplink.store is None else parts @ self.uplink.store.gather(cohort).to(delta.device)
        return mean + residual, float(mean.norm())

    def _gamma(self, mean_h: Tensor, delta_norm: float, mean_code: Tensor, round: int) -> float:
        codec, layout = self.uplink.compressor, self.server.layout
        compressed = codec.decode(codec.encode(mean_h, layout, derive(self.server.seed, "gamma", round)), layout)
        return float((compressed - mean_code).norm()) / delta_norm if delta_norm else 0.0

    # -- the record ----------------------------------------------------------------------------------------------

    def _counts(
        self, pending: Pending, buffers: Tensor | None, sent: list[Sent]
    ) -> tuple[int, int, int, int, int, int]:
        """wire_up, wire_down, wire_up_buffers, wire_down_buffers, paper_bits_up, paper_bits_down."""
        layout, count = self.server.layout, len(pending.ids)
        extra = _buffer_sizes(self.server.buffer_layout, buffers)
        apart, keeps = count * sum(extra.values()), self.server.downlink.client_keeps_model
        updates = sizes(self.uplink.compressor, pending.code, layout)
        up = sum(reply_size({"update": size, **extra}, keeps) for size in updates)
        paper = self.uplink.compressor.paper_bits(layout), self.server.downlink.paper_bits(layout)
        down = sum(instruction_size({"model": size, **extra}) for _, size in sent)
        return up, down, apart, apart, *paper

    def _skip(self, state: ServerState) -> tuple[ServerState, RoundRecord]:
        """A round in which nobody took part: no step, and recorded."""
        loss, score, *held = self._evaluate(state)
        zeros = (0,) * 6
        return state, RoundRecord(state.round, [], None, loss, score, *zeros, None, None, 0.0, 0, 0, 0, *held)

    def _evaluate(self, state: ServerState) -> tuple[float | None, float | None, float | None, float | None]:
        """Loss and metric of the server's model, and of the one that clients hold."""
        if self.test is None or state.round % self.evaluate_every:
            return None, None, None, None
        own = evaluate(self.problem, state.x, state.buffers, self.test, self.metric, self.engine)
        common = self.server.downlink.common(state.downlink)
        if common is None:
            return *own, None, None
        return *own, *evaluate(self.problem, common, state.buffers, self.test, self.metric, self.engine)


def _mean_buffers(layout: Layout | None, rows: Tensor | None, weights: Sequence[float]) -> Tensor | None:
    """The mean of the clients' buffers, as the aggregator takes it."""
    return None if layout is None or rows is None else mean_of_rows(IDENTITY, {"values": rows}, layout, weights)


def _check_losses(cohort: Sequence[int], losses: Tensor, round: int) -> None:
    """As the client's half does: an update may be finite all the same."""
    if bad := [client for client, loss in zip(cohort, losses.tolist(), strict=True) if not math.isfinite(loss)]:
        raise UpdateError(f"round {round}, clients {bad}: the loss is not finite; lower the learning rate or clip")


def _mean_error(pending: Pending) -> float | None:
    return None if pending.error is None else float(pending.error.double().mean())


def _buffer_sizes(layout: Layout | None, buffers: Tensor | None) -> dict[str, int]:
    return {} if layout is None or buffers is None else {"buffers": size(IDENTITY, {"values": buffers}, layout)}
