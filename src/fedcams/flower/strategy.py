"""The server's side: a strategy with its own round loop, which can continue after a crash, unlike Flower's."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from fedcams.durable import private_folder
from fedcams.errors import SpecError
from fedcams.flower.arrays import STATISTICS, ArrayNames
from fedcams.flower.checkpoint import FlowerCheckpoint, identify
from fedcams.flower.grid_round import GridRound
from fedcams.flower.hooks import RoundConfig, config_of, nodes_of, overrides, refuse_hooks, sampler_of, weighting_of
from fedcams.flower.inbox import that_average, weigh
from fedcams.flower.mod import safe_name
from fedcams.flower.records import readable
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

if TYPE_CHECKING:
    from torch import nn

SPARES = 64
"""How many old replica files are kept so that new ones are written over them; each client in a round leaves one."""
OPTIONS = tuple(inspect.signature(FedAvg).parameters)
"""The options of Flower's own strategy."""
EVALUATE = "configure_evaluate"
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
logger = logging.getLogger("flwr.fedcams")


class FedCAMS(FedAvg):
    """Run a method over Flower: adaptive servers, compressed updates, and rounds that survive crashes.

    A subclass may override `configure_train`, to change the config of a round, and the hooks for evaluation.

    Arguments:
        method: what to run, a `fedcams.Method`. Its fields may also be given by name, and take precedence:
            `server="fedams(lr=0.1, eps=1e-3)"` (by default `fedcams.method.SAFE_SERVER`, whose steps are about as long
            as FedAvg's), `uplink="topk(ratio=1/64)"` (for clients whose mod names no compressor of its own),
            `downlink="replica(blockq(bits=2))"`, `min_replies=5`, `average="ema(0.97)"`, …;
            `recipe="light"` stands for several of them.
        checkpoint: the folder of this run; a run in it is continued.
        run: the name of the run, under which clients keep their residuals.
        sampler: chooses the clients of each round; a round waits for as many as it needs, as with `min_available`.
        clients: the number of clients, numbered from 0, as in the simulator; by default, those that are connected.
        seed: the source of cohorts and of the clients' randomness.
        min_available: how many clients must be connected before a round begins; waits for them until the deadline.
        model: decides which arrays train and which are buffers; by default, floating-point arrays train, except those
            that match `averaged`.
        averaged: patterns for the names of buffers, which are averaged over clients.
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
        if self.sampler.needs_weights:
            raise SpecError(
                f"sampler={self.sampler}: the server does not know how many examples clients have; use uniform"
            )
        if self.method.control.active and clients is None:
            raise SpecError(
                f"control={self.method.control}: the server must know how many clients there are; give clients="
            )
        if clients is not None:
            self.sampler.expected(clients)  # refuses a cohort larger than the population
        if self.method.privacy.active:
            self.method.privacy.participation(self.sampler, clients or 0, None)
        if self.method.privacy.at_client and (self.fraction_evaluate or overrides(type(self), FedCAMS, EVALUATE)):
            raise SpecError(
                f"privacy={self.method.privacy} and evaluation on clients: metrics would travel without noise; leave "
                "fraction_evaluate out, and evaluate on the server"
            )
        self.min_available = min_available
        self.model, self.averaged = model, averaged
        self.averaged_arrays: ArrayRecord | None = None
        """The averaged model after `start`, if the method has one."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Set the config of a round; a subclass changes `config` and returns what this returns.

        The messages themselves, with their compressed models, are made later. Refuses to be called by another loop than
        that of `start`.
        """
        if not overrides(type(self), FedCAMS, "configure_train"):  # our loop does not ask then
            raise self._outside_our_loop("configure_train")
        return RoundConfig(config)

    def round_config(
        self, state: ServerState, config: ConfigRecord, grid: Grid, arrays: Callable[[ServerState], ArrayRecord]
    ) -> ConfigRecord:
        """Return the config of the round after this state, as `configure_train` of a subclass changes it."""
        if not overrides(type(self), FedCAMS, "configure_train"):
            return config  # without a copy of the model
        return config_of(self.configure_train(state.round + 1, arrays(state), config, grid), type(self))

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
            evaluate = _Evaluation(self, grid, names, rest, timeout, evaluate_config or ConfigRecord(), evaluate_fn)
            return self._run(grid, state, num_rounds, rounds, evaluate)

    def _run(self, grid: Grid, state: ServerState, num_rounds: int, rounds: GridRound, evaluate: _Evaluation) -> Result:
        self.summary()
        if state.round:
            logger.info("continuing %s after round %s", rounds.checkpoint.run, state.round)
        result, alarm = Result(), Alarm()
        evaluate.on_server(state, result)
        while state.round < num_rounds:
            state, line, metrics = rounds.advance(grid, state)
            logger.info("[ROUND %s/%s] %s", state.round, num_rounds, _told(line))
            if said := alarm.hear(state.round, line["train_loss"], line["delta_norm"]):
                logger.warning("%s (now %s)", said, self.method.server)
            if chosen := weigh(metrics, [int(client) for client in line["accepted"]]):
                with _tolerant("training", state.round):
                    found = self.train_metrics_aggr_fn(chosen, self.weighted_by_key)
                    result.train_metrics_clientapp[state.round] = found
            evaluate.on_clients(state, result)
            evaluate.on_server(state, result)
        result.arrays = evaluate.arrays(state)
        self.averaged_arrays = evaluate.averaged_arrays(state)
        return result

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


class _Evaluation:
    """Evaluates the model on the server and on clients, as Flower's own strategies do."""

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
        """Return the model as the app's arrays."""
        return self.names.join(state.x, state.buffers, self.rest)

    def averaged_arrays(self, state: ServerState) -> ArrayRecord | None:
        """Return the averaged model as the app's arrays; None for a method without an average."""
        return None if state.average is None else self.names.join(state.average.x, state.average.buffers, self.rest)

    def on_server(self, state: ServerState, result: Result) -> None:
        """Evaluate with the app's function, if it gave one."""
        found = None if self.function is None else self.function(state.round, self.arrays(state))
        if found is not None and self.function is not None and (averaged := self.averaged_arrays(state)) is not None:
            more = self.function(state.round, averaged) or MetricRecord()
            found = MetricRecord({**found, **{f"averaged_{name}": value for name, value in more.items()}})
        if found is not None:
            logger.info("[ROUND %s] on the server: %s", state.round, dict(found))
            result.evaluate_metrics_serverapp[state.round] = found

    def on_clients(self, state: ServerState, result: Result) -> None:
        """Evaluate on clients, if the strategy was given a fraction of them to evaluate."""
        if self.strategy.fraction_evaluate == 0.0 and not overrides(type(self.strategy), FedCAMS, EVALUATE):
            return
        messages = self.strategy.configure_evaluate(state.round, self.arrays(state), self.config, self.grid)
        replies = list(self.grid.send_and_receive(messages, timeout=self.timeout))
        with _tolerant("evaluation", state.round):
            usable = that_average({i: reply.content for i, reply in enumerate(replies) if reply.has_content()})
            found = self.strategy.aggregate_evaluate(state.round, [replies[i] for i in usable])
            if found is not None:
                logger.info("[ROUND %s] on the clients: %s", state.round, readable(dict(found)))
                result.evaluate_metrics_clientapp[state.round] = found


@contextlib.contextmanager
def _tolerant(what: str, round: int) -> Iterator[None]:
    """Log an error instead of ending the run: clients choose their metrics, and Flower cannot average any mixture."""
    try:
        yield
    except Exception as error:
        logger.warning("round %s: cannot average the clients' %s metrics: %s", round, what, readable(repr(error)))


def _told(line: dict[str, Any]) -> str:
    counts = ", ".join(f"{len(line[key])} {key}" for key in ("accepted", "refused", "absent") if line[key])
    return f"skipped: {line['skipped']}" if line["skipped"] else counts
