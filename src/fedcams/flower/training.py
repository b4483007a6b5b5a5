"""Local training at a site: runs the app, and converts between its arrays and the core's vectors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from fedcams.errors import UpdateError
from fedcams.flower.arrays import ArrayNames
from fedcams.flower.records import ABOUT, REST, SHIFT, SHIFTED, STEPS, app_metrics, only_arrays, told_by_metrics
from fedcams.rounds.client import ClientUpdate, Train
from fedcams.rounds.cohort import Received
from fedcams.rounds.messages import Instruction

if TYPE_CHECKING:
    from torch import Tensor

    from fedcams.flower.mod import Uplink

logger = logging.getLogger("flwr.fedcams")


class AppFailed(Exception):
    """The app answered with an error, which goes to the server unchanged."""

    def __init__(self, reply: Message) -> None:
        super().__init__(reply.error.reason)
        self.reply = reply


class Training:
    """Local training as the core calls it: runs the app, and converts between its arrays and the core's vectors."""

    def __init__(
        self, message: Message, context: Context, app: ClientAppCallable, names: ArrayNames, mod: Uplink, weighting: str
    ) -> None:
        self.message, self.context, self.app, self.names, self.weighting = message, context, app, names, weighting
        told = message.content.config_records[ABOUT]
        self.server_config_key = str(told.get("config_key", "config"))
        self.arrays_key = mod.arrays_key or str(told.get("arrays_key", "arrays"))
        self.config_key = mod.config_key or self.server_config_key
        self.others: dict[str, MetricRecord | ConfigRecord] = {}
        """The app's other records, besides the arrays; empty if a reply is only repeated."""

    def __call__(self, received: Received, instruction: Instruction, shift: Tensor | None, rate: float) -> ClientUpdate:
        """Have the app train, and return its update, which overwrites the received model."""
        x = received.start
        self.message.content = self._content(received, instruction, shift, rate)
        reply = self.app(self.message, self.context)
        if reply.has_error():
            raise AppFailed(reply)
        delta, after = self.names.change(only_arrays(reply.content, self.arrays_key), x, out=x)
        self.others = {**reply.content.metric_records, **reply.content.config_records}
        examples, steps, loss = told_by_metrics(reply.content, self.weighting)
        if shift is not None and (not steps or app_metrics(reply.content).get(SHIFTED) != 1):
            raise UpdateError(
                f"this method corrects gradients: the app must add the array record {SHIFT!r} to each of them and "
                f"report the metrics {SHIFTED}=1 and {STEPS}"
            )
        return ClientUpdate(delta, after, examples, steps, loss)

    def _content(self, received: Received, instruction: Instruction, shift: Tensor | None, rate: float) -> RecordDict:
        content = self.message.content
        rest = content.array_records.get(REST, ArrayRecord())
        config = ConfigRecord(dict(content.config_records.get(self.server_config_key, {})))
        config["server-round"], config["client"] = instruction.round, instruction.client
        config["seed"], config["local-rate"] = instruction.seed, rate
        arrays = {self.arrays_key: self.names.join(received.start, received.buffers, rest)}
        if shift is not None:
            arrays[SHIFT] = self.names.trained(shift)
        return RecordDict({**arrays, self.config_key: config})


def without_reasons(train: Training) -> Train:
    """Return training for a site that adds noise: why an app failed stays in its own log, since texts have no noise."""

    def trained(received: Received, instruction: Instruction, shift: Tensor | None, rate: float) -> ClientUpdate:
        try:
            return train(received, instruction, shift, rate)
        except Exception:
            logger.exception("the app failed; the server does not learn why")
            raise UpdateError("the app failed; the log of its node says why") from None

    return trained
