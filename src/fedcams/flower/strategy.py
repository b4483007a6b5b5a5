"""The server's side: a strategy with its own round loop, which can continue after a crash, unlike Flower's."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from fedcams.durable import private_folder
from fedcams.errors import SpecError
from fedcams.flower.arrays import STATISTICS, ArrayNames
from fedcams.flower.checkpoint import FlowerCheckpoint, identify
from fedcams.flower.evaluation import Evaluate, Evaluation, to_average, tolerant
from fedcams.flower.grid_round import GridRound
from fedcams.flower.hooks import (
    MANY,
    RoundConfig,
    check_arrays,
    config_of,
    nodes_of,
    overrides,
    refuse_hooks,
    sampler_of,
    too_few_to_evaluate,
    weighting_of,
)
from fedcams.flower.mod import safe_name
from fedcams.flower.roster import Roster
from fedcams.flower.tracking import Log, tracking
from fedcams.method import Method, method_of
from fedcams.recipes import KEY as RECIPE
from fedcams.registry import params
from fedcams.registry.fields import nearest
from fedcams.rounds.alarm import Alarm
from fedcams.rounds.server import Server, ServerState, replica_layouts, start
from fedcams.rows import RowStore
from fedcams.runs.checkpoint import REPLICAS
from fedcams.runs.files import disk_errors, locked
from fedcams.sampler import Sampler
from fedcams.trackers import Tracker, TrackerSpec, check_trackers, tracker

if TYPE_CHECKING:
    from torch import nn

SPARES = 64
"""How many old replica files are kept so that new ones are written over them; each client in a round leaves one."""
OPTIONS = tuple(inspect.signature(FedAvg).parameters)
"""The options of Flower's own strategy."""
logger = logging.getLogger("flwr.fedcams")


class FedCAMS(FedAvg):
    """Run a method over Flower: adaptive servers, compressed updates, and rounds that survive crashes.

    A subclass may override `configure_train`, to change the config of a round, and the hooks for evaluation.

    Arguments:
        method: what to run, a `fedcams.Method`. Its fields may also be given by name, and take precedence:
            `server="fedams(lr=0.1, eps=1e-3)"` (by default `fedcams.method.SAFE_SERVER`, whose steps are about as long
            as FedAvg's), `uplink="topk(ratio=1/64)"` (for clients whose mod names no compressor),
            `downlink="replica(blockq(bits=2))"`, `min_replies=5`, `average="ema(0.97)"`, …;
            `recipe="light"` sets several of them.
        checkpoint: the folder of this run; a run in it is continued.
        run: the name of the run, under which clients keep their residuals.
        sampler: chooses the clients of each round; a round waits for as many as it needs, as with `min_available`.
        clients: the number of clients, numbered from 0, as in the simulator; by default, those that are connected.
        seed: the source of cohorts and of the clients' randomness.
        min_available: how many clients must be connected before a round begins; waits for them until the deadline.
        model: decides which arrays train and which are buffers; by default, floating-point arrays train, except those
            that match `averaged`.
        averaged: patterns for the names of buffers, which are averaged over clients.
        trackers: what follows the run: `["csv", "wandb(project=mine)"]`, or objects like `fedcams.trackers.Tracker`.
            Files go to the folder of this run. A tracker that fails during the run is named in the log.
        settings: fields of the method, and options of Flower's FedAvg: `fraction_train` and `min_train_nodes` set the
            sampler, `min_available_nodes` is `min_available`, `weighted_by_key="num-examples"` is
            `weighting="examples"`. `fraction_evaluate=1.0` evaluates on clients, which sends them the dense model; by
            default, nothing is evaluated there.

    Raises:
        SpecError: for an unknown option, parts that do not fit together, or a subclass that overrides other hooks.

    Examples:
        >>> from fedcams.flower import FedCAMS
        >>> strategy = FedCAMS(uplink="ternary(ratio=1/16)", checkpoint="/var/lib/server", run="mnist", clients=20)
        >>> strategy.method.uplink.name
        'ternary'
    """

    def __init__(
        self,
        method: Method | None = None,
        *,
        checkpoint: str | os.PathLike[str],
        run: str = "run",
        sampler: Sampler | str = "full",
        clients: int | None = None,
        seed: int = 1,
        min_available: int = 1,
        model: nn.Module | None = None,
        averaged: tuple[str, ...] = STATISTICS,
        trackers: Sequence[str | TrackerSpec | Tracker] = (),
        **settings: Any,
    ) -> None:
        fields = {key: settings.pop(key) for key in (*params(Method), RECIPE) if key in settings}
        known = [*params(Method), RECIPE, *OPTIONS]
        for key in settings:
            if key not in OPTIONS:
                raise SpecError(f"FedCAMS has no option {key!r}{nearest(key, known)}; known: {', '.join(known)}")
        refuse_hooks(type(self), FedCAMS)
        fields |= weighting_of(settings, fields)
        sampler, min_available = sampler_of(settings, sampler), nodes_of(settings, min_available)
        super().__init__(**{"fraction_evaluate": 0.0, **settings})
        for name, count in {"min_available": min_available, "clients": clients}.items():
            if count is not None and count < 1:
                raise SpecError(f"{name}={count}; allowed: 1 or more")
        self.method = method_of(method, fields)
        self.checkpoint, self.run_name = Path(checkpoint), safe_name(run)
        self.sampler, self.clients, self.seed = Sampler.parse(sampler), clients, seed
        self._check_parts()
        check_trackers(trackers, self.method.privacy)
        self.trackers = [tracker(each) for each in trackers]
        self.min_available = min_available
        self.model, self.averaged = model, averaged
        self.averaged_arrays: ArrayRecord | None = None
        """The averaged model after `start`, if the method has one."""

    def _check_parts(self) -> None:
        """Refuse a sampler, a number of clients and an evaluation that do not fit each other and the method."""
        if self.sampler.needs_weights:
            raise SpecError(
                f"sampler={self.sampler}: the server does not know how many examples clients have; use uniform"
            )
        if self.method.control.active and self.clients is None:
            raise SpecError(
                f"control={self.method.control}: the server must know how many clients there are; give clients="
            )
        if self.clients is not None:
            self.sampler.expected(self.clients)  # refuses a cohort larger than the population
        self.method.check_cohort(self.sampler.largest(MANY))
        if self.method.privacy.active:
            self.method.privacy.participation(self.sampler, self.clients or 0, None)
        if self.method.privacy.at_client and self.evaluates_on_clients:
            raise SpecError(
                f"privacy={self.method.privacy} and evaluation on clients: metrics would travel without noise; leave "
                "fraction_evaluate out, and evaluate on the server"
            )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Set the config of a round; a subclass changes `config` and returns what this returns.

        The messages themselves, with their compressed models, are made later. Refuses to be called by another loop than
        that of `start`.
        """
        if not overrides(type(self), FedCAMS, "configure_train"):  # our loop does not call it then
            raise self._outside_our_loop("configure_train")
        return RoundConfig(config)

    def round_config(
        self, state: ServerState, config: ConfigRecord, grid: Grid, arrays: Callable[[ServerState], ArrayRecord]
    ) -> ConfigRecord:
        """Return the config of the round after this state, as `configure_train` of a subclass changes it."""
        if not overrides(type(self), FedCAMS, "configure_train"):
            return config  # without a copy of the model
        return config_of(self.configure_train(state.round + 1, arrays(state), config, grid), type(self))

    @property
    def evaluates_on_clients(self) -> bool:
        """Whether clients evaluate the model after every round."""
        return self.fraction_evaluate != 0.0 or overrides(type(self), FedCAMS, "configure_evaluate")

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask clients to evaluate the model; none if too few are connected, for which Flower waits without a limit."""
        if self.fraction_evaluate and (lacking := too_few_to_evaluate(self, grid)):
            logger.warning("round %s: no client evaluates the model: %s", server_round, lacking)
            return []
        return super().configure_evaluate(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Refuse: updates are decoded as they arrive, by the loop of `start`, which must not be replaced."""
        raise self._outside_our_loop("aggregate_train")

    def _outside_our_loop(self, hook: str) -> SpecError:
        return SpecError(
            f"{hook}: {type(self).__name__}.start runs its own loop, but FedCAMS decodes updates as they arrive; "
            "do not override start, or call super().start; do not wrap it in another strategy, such as Flower's for "
            "differential privacy, and give privacy=... instead"
        )

    def summary(self) -> None:
        """Log the main settings of this run."""
        server, uplink = self.method.server, self.method.uplink
        logger.info("FedCAMS: server %s, uplink %s, checkpoint %s", server, uplink, self.checkpoint)

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
        """Run until `num_rounds` rounds are done, including those before a crash; `timeout` is a round's deadline."""
        check_arrays(initial_arrays)
        names = ArrayNames.of(initial_arrays, self.model, self.averaged)
        self.method.check_rounds(num_rounds)
        with disk_errors("make", self.checkpoint):
            private_folder(self.checkpoint)
        with (
            locked(self.checkpoint),
            contextlib.closing(self.open_checkpoint(names, num_rounds)) as checkpoint,
        ):
            server, rest = checkpoint.server, names.rest(initial_arrays)
            state = checkpoint.load(start(server, *names.vectors(ArrayRecord(dict(initial_arrays)))))
            rounds = GridRound(self, server, names, rest, checkpoint, timeout, train_config or ConfigRecord())
            evaluate = Evaluation(self, grid, names, rest, timeout, evaluate_config or ConfigRecord(), evaluate_fn)
            with tracking(self, checkpoint.run, state.round, num_rounds) as log:
                return self._run(grid, state, num_rounds, rounds, evaluate, log)

    def _run(
        self, grid: Grid, state: ServerState, num_rounds: int, rounds: GridRound, evaluate: Evaluation, log: Log
    ) -> Result:
        self.summary()
        evaluate.announce()
        if state.round:
            logger.info("continuing %s after round %s", rounds.checkpoint.run, state.round)
        result, alarm = Result(), Alarm()
        evaluate.on_server(state, result)
        while state.round < num_rounds:
            started = time.monotonic()
            state, line, metrics = rounds.advance_(grid, state)
            level = logging.WARNING if line["skipped"] else logging.INFO
            logger.log(level, "[ROUND %s/%s] %s", state.round, num_rounds, _told(line))
            if said := alarm.hear(state.round, line["train_loss"], line["delta_norm"]):
                logger.warning("%s (now %s)", said, self.method.server)
            accepted = {client: metrics[client] for client in sorted(map(int, line["accepted"])) if client in metrics}
            self._average_metrics(state.round, accepted, rounds.roster, result)
            evaluate.on_clients(state, result)
            evaluate.on_server(state, result)
            log(line, result, time.monotonic() - started)
        result.arrays = evaluate.arrays(state)
        self.averaged_arrays = evaluate.averaged_arrays(state)
        return result

    def _average_metrics(self, round: int, metrics: Mapping[int, RecordDict], roster: Roster, result: Result) -> None:
        """Add the mean of what clients measured in training to the result, by the app's own function for it."""
        with tolerant("training", round):
            nodes = {client: f"client {client}, node {roster.node_of(client)}," for client in metrics}
            if usable := to_average("training", round, metrics, nodes, self.weighted_by_key):
                chosen = [metrics[client] for client in usable]
                result.train_metrics_clientapp[round] = self.train_metrics_aggr_fn(chosen, self.weighted_by_key)

    def _server(self, names: ArrayNames, rounds: int) -> Server:
        held = replica_layouts(self.method, names.layout, names.buffer_layout)
        replicas = RowStore.on_disk(held, self.checkpoint / REPLICAS, SPARES) if held else None
        population = self.clients or 0
        return Server(
            self.method, names.layout, names.buffer_layout, self.seed, rounds, population, replicas, self.sampler
        )

    def open_checkpoint(self, names: ArrayNames, rounds: int) -> FlowerCheckpoint:
        """Open the run in the checkpoint folder, which exists and is locked, or begin it there.

        Refuses a run whose method, sampler, seed, clients or layouts differ, because rows and moments depend on them,
        before anything in the folder is changed.
        """
        layouts = [None if layout is None else layout.id.hex() for layout in (names.layout, names.buffer_layout)]
        identity: dict[str, Any] = {**self.method.to_dict(), "sampler": str(self.sampler), "seed": self.seed}
        identity |= {"clients": self.clients, "layouts": layouts}
        del identity["min_replies"]  # rows and moments do not depend on it: an operator may change it
        if self.method.depends_on_rounds:
            identity["rounds"] = rounds
        run = identify(self.checkpoint, self.run_name, identity)
        return FlowerCheckpoint(self.checkpoint, run, identity, self._server(names, rounds))


def _told(line: dict[str, Any]) -> str:
    counts = ", ".join(f"{len(line[key])} {key}" for key in ("accepted", "refused", "absent") if line[key])
    return f"skipped: {line['skipped']}" if line["skipped"] else counts
