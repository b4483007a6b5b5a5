"""The server's side: a strategy with a round loop of its own, which goes on after a crash where Flower's cannot."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from torch import nn

from fedcams.compress import Compressor, compressor
from fedcams.downlink import Downlink
from fedcams.downlink import downlink as resolve_downlink
from fedcams.errors import SpecError
from fedcams.flower.arrays import STATISTICS, ArrayNames
from fedcams.flower.book import REPLICAS, Book
from fedcams.flower.inbox import weigh
from fedcams.flower.mod import safe_name
from fedcams.flower.rounds import Rounds
from fedcams.optimizers import ServerOptimizer
from fedcams.optimizers import server as resolve_server
from fedcams.residuals import ResidualStore
from fedcams.rounds import Server, ServerState
from fedcams.rounds.server import start
from fedcams.runs.files import disk_errors, locked
from fedcams.sampler import Sampler
from fedcams.sampler import sampler as resolve_sampler

SPARES = 64
"""Files of replicas that are kept to be written over; a round leaves as many as clients took part."""
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
logger = logging.getLogger("flwr.fedcams")


class FedCAMS(FedAvg):
    """Adaptive server optimizers, compressed updates, and rounds that survive crashes.

    Args:
        server: the server optimizer, a spec such as `fedams(lr=1.0, eps=1e-3)`.
        uplink: how clients compress whose mod names no compressor of its own.
        checkpoint: the folder of this run; a run that is there is continued.
        run: its name, under which clients keep their residuals.
        sampler: which clients are asked in a round; waits for as many as it needs, like `min_available`.
        clients: how many there are, numbered from 0, as in the simulator; by default whoever is connected.
        seed: the source of cohorts and of the clients' randomness.
        weighting: `uniform`, or `examples` as the clients report them.
        feedback: whether clients keep what compression loses and send it later.
        downlink: how the model travels to the clients, such as `replica(blockq(bits=2))`.
        min_available: how many clients must be connected before a round begins; waits for them up to the deadline.
        min_replies: with fewer sound replies a round is skipped: no step, and nobody's update counts as sent.
        max_norm: the L2 norm above which an update is refused.
        model: tells which arrays train and which are buffers; by default floats train, except those that `averaged`
            names.
        averaged: patterns of the names of buffers that are averaged.
        evaluation: options of Flower's FedAvg for evaluation on clients (`fraction_evaluate=1.0`, ...), which sends
            them the dense model; by default there is none.
    """

    def __init__(
        self,
        server: ServerOptimizer | str = "fedams",
        uplink: Compressor | str = "identity",
        *,
        checkpoint: str | os.PathLike[str],
        run: str = "run",
        sampler: Sampler | str = "full",
        clients: int | None = None,
        seed: int = 1,
        weighting: str = "uniform",
        feedback: bool = True,
        downlink: Downlink | str = "none",
        min_available: int = 1,
        min_replies: int = 1,
        max_norm: float | None = None,
        model: nn.Module | None = None,
        averaged: tuple[str, ...] = STATISTICS,
        **evaluation: Any,
    ) -> None:
        super().__init__(**{"fraction_evaluate": 0.0, **evaluation})
        for name, count in {"min_available": min_available, "min_replies": min_replies, "clients": clients}.items():
            if count is not None and count < 1:
                raise SpecError(f"{name}={count}; allowed: 1 or more")
        self.optimizer, self.uplink = resolve_server(server), compressor(uplink)
        self.checkpoint, self.run_name = Path(checkpoint), safe_name(run)
        self.sampler, self.clients, self.seed = resolve_sampler(sampler), clients, seed
        if self.sampler.needs_weights:
            raise SpecError(
                f"sampler={self.sampler}: the server does not know how many examples clients have; use uniform"
            )
        if clients is not None:
            self.sampler.expected(clients)  # refuses a cohort larger than the population
        self.weighting, self.feedback, self.downlink = weighting, feedback, resolve_downlink(downlink)
        self.min_available, self.min_replies, self.max_norm = min_available, min_replies, max_norm
        self.model, self.averaged = model, averaged

    def summary(self) -> None:
        """Logs what this run is."""
        logger.info("FedCAMS: server %s, uplink %s, checkpoint %s", self.optimizer, self.uplink, self.checkpoint)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 600.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Runs until `num_rounds` rounds are done, those before a crash included; `timeout` is a round's deadline."""
        names = ArrayNames.of(initial_arrays, self.model, self.averaged)
        with disk_errors("make", self.checkpoint):
            self.checkpoint.mkdir(parents=True, exist_ok=True)
        with locked(self.checkpoint), contextlib.closing(self._book(self._server(names))) as book:
            server, rest = book.server, names.rest(initial_arrays)
            state = book.load(start(server, *names.vectors(ArrayRecord(dict(initial_arrays)))))
            rounds = Rounds(self, server, names, rest, book, timeout, train_config or ConfigRecord())
            evaluate = _Evaluation(self, grid, names, rest, timeout, evaluate_config or ConfigRecord(), evaluate_fn)
            return self._run(grid, state, num_rounds, rounds, evaluate)

    def _run(self, grid: Grid, state: ServerState, num_rounds: int, rounds: Rounds, evaluate: _Evaluation) -> Result:
        self.summary()
        if state.round:
            logger.info("continuing %s after round %s", rounds.book.run, state.round)
        result = Result()
        evaluate.on_server(state, result)
        while state.round < num_rounds:
            state, line, metrics = rounds.advance(grid, state)
            logger.info("[ROUND %s/%s] %s", state.round, num_rounds, _told(line))
            if chosen := weigh(metrics, [int(client) for client in line["accepted"]]):
                with _tolerant("training", state.round):
                    found = self.train_metrics_aggr_fn(chosen, self.weighted_by_key)
                    result.train_metrics_clientapp[state.round] = found
            evaluate.on_clients(state, result)
            evaluate.on_server(state, result)
        result.arrays = evaluate.arrays(state)
        return result

    def _server(self, names: ArrayNames) -> Server:
        return Server(
            names.layout,
            self.optimizer,
            self.seed,
            names.buffer_layout,
            self.downlink,
            self.weighting,
            self._replicas(names) if self.downlink.server_keeps_rows else None,
            self.max_norm,
        )

    def _replicas(self, names: ArrayNames) -> ResidualStore:
        return ResidualStore.on_disk(names.layout, self.checkpoint / REPLICAS, SPARES)

    def _book(self, server: Server) -> Book:
        """What may not change while a run goes on: whatever a residual or a moment depends on."""
        layouts = [None if layout is None else layout.id.hex() for layout in (server.layout, server.buffer_layout)]
        fixed = {"server": self.optimizer, "sampler": self.sampler, "downlink": self.downlink}
        identity = {**{key: str(value) for key, value in fixed.items()}, "layouts": layouts}
        plain = {"seed": self.seed, "clients": self.clients, "weighting": self.weighting, "feedback": self.feedback}
        return Book(self.checkpoint, self.run_name, {**identity, **plain}, server)


class _Evaluation:
    """How good the model is, on the server and on clients, as Flower's own strategies find it."""

    def __init__(
        self,
        strategy: FedCAMS,
        grid: Grid,
        names: ArrayNames,
        rest: ArrayRecord,
        timeout: float,
        config: ConfigRecord,
        function: Evaluate | None,
    ) -> None:
        self.strategy, self.grid, self.names, self.rest = strategy, grid, names, rest
        self.timeout, self.config, self.function = timeout, config, function

    def arrays(self, state: ServerState) -> ArrayRecord:
        """The model as the app has it."""
        return self.names.join(state.x, state.buffers, self.rest)

    def on_server(self, state: ServerState, result: Result) -> None:
        """By the app's function, where it gave one."""
        found = None if self.function is None else self.function(state.round, self.arrays(state))
        if found is not None:
            logger.info("[ROUND %s] on the server: %s", state.round, dict(found))
            result.evaluate_metrics_serverapp[state.round] = found

    def on_clients(self, state: ServerState, result: Result) -> None:
        """By the apps, where that was asked for."""
        if self.strategy.fraction_evaluate == 0.0:
            return
        messages = self.strategy.configure_evaluate(state.round, self.arrays(state), self.config, self.grid)
        replies = self.grid.send_and_receive(messages, timeout=self.timeout)
        with _tolerant("evaluation", state.round):
            found = self.strategy.aggregate_evaluate(state.round, replies)
            if found is not None:
                logger.info("[ROUND %s] on the clients: %s", state.round, dict(found))
                result.evaluate_metrics_clientapp[state.round] = found


@contextlib.contextmanager
def _tolerant(what: str, round: int) -> Iterator[None]:
    """Clients choose their metrics, and Flower's mean fails where they do not go together: no reason to end a run."""
    try:
        yield
    except Exception as error:
        logger.warning("round %s: the clients' metrics of %s have no mean: %r", round, what, error)


def _told(line: dict[str, Any]) -> str:
    counts = ", ".join(f"{len(line[key])} {key}" for key in ("accepted", "refused", "absent") if line[key])
    return f"skipped: {line['skipped']}" if line["skipped"] else counts
