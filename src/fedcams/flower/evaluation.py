"""Evaluation of the model after a round, on the server and on clients, as Flower's own strategies do it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedcams.errors import UpdateError
from fedcams.flower.arrays import ArrayNames
from fedcams.flower.inbox import that_average, unweighted
from fedcams.flower.records import bounded_metrics, readable
from fedcams.flower.replies import ask
from fedcams.rounds.server import ServerState

if TYPE_CHECKING:
    from fedcams.flower.strategy import FedCAMS

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
"""The app's function of the round and the model, which evaluates on the server."""
logger = logging.getLogger("flwr.fedcams")


class Evaluation:
    """Evaluates the model on the server and on clients; metrics go into a result."""

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

    def announce(self) -> None:
        """Log if nobody will evaluate the model: with Flower's FedAvg, clients do so by default."""
        if self.function is None and not self.strategy.evaluates_on_clients:
            dense = "which sends them the dense model after every round"
            logger.info("nobody evaluates the model; give evaluate_fn, or fraction_evaluate=1.0 for clients, %s", dense)

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
        if not self.strategy.evaluates_on_clients:
            return
        messages = list(self.strategy.configure_evaluate(state.round, self.arrays(state), self.config, self.grid))
        if not messages:
            return
        replies = ask(self.grid, messages, self.timeout)
        with tolerant("evaluation", state.round):
            metrics = {i: kept for i, (node, reply) in enumerate(replies) if (kept := _kept(node, reply)) is not None}
            nodes = {i: f"node {replies[i][0]}" for i in metrics}
            usable = to_average("evaluation", state.round, metrics, nodes, self.strategy.weighted_by_key)
            found = self.strategy.aggregate_evaluate(state.round, [replies[i][1] for i in usable])
            if found is not None:
                logger.info("[ROUND %s] on the clients: %s", state.round, readable(dict(found)))
                result.evaluate_metrics_clientapp[state.round] = found


def _kept(node: int, reply: Message) -> RecordDict | None:
    """Return the metrics in a node's reply; None if it has none, or more than are kept, which the log then says."""
    try:
        return bounded_metrics(reply.content) if reply.has_content() else None
    except UpdateError as error:
        logger.warning("node %s: left out: %s", node, error)
        return None


def to_average(
    what: str, round: int, metrics: Mapping[int, RecordDict], names: Mapping[int, str], key: str
) -> list[int]:
    """Return the keys of the metrics that can be averaged; the log names the first sender without the weight `key`."""
    if said := unweighted({names[place]: record for place, record in metrics.items()}, key):
        logger.warning("round %s: %s metrics are left out of the mean: %s", round, what, readable(said))
    return that_average(metrics, key)


@contextlib.contextmanager
def tolerant(what: str, round: int) -> Iterator[None]:
    """Log an error instead of ending the run: clients choose their metrics, and Flower cannot average every mixture."""
    try:
        yield
    except Exception as error:
        logger.warning("round %s: cannot average the clients' %s metrics: %s", round, what, readable(repr(error)))
