"""A grid in this process: real ClientApps and Flower's own messages, every byte of them serialised, no sockets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Fault = Callable[[int, Message, Message | None], Message | None]
"""(node, instruction, reply) -> the reply that arrives; None: it never does."""


class LocalGrid(Grid):
    """Nodes are ClientApps; they answer when their reply is asked for, unless `fault` has it otherwise."""

    def __init__(
        self, apps: dict[int, ClientApp], sites: dict[int, dict[str, Any]], fault: Fault | None = None
    ) -> None:
        self.apps, self.sites, self.fault = apps, sites, fault
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1  # as Flower's own processes do
        self.waiting: dict[str, Message] = {}
        self.names = map(str, itertools.count())

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            names.append(next(self.names))
            self.waiting[names[-1]] = message
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for name in list(message_ids):
            message = self.waiting.pop(name, None)
            reply = None if message is None else self._answer(message)
            if reply is not None:
                reply.metadata.__dict__["_reply_to_message_id"] = name
                replies.append(reply)
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        received, context = self.received(message)
        reply: Message | None
        try:
            reply = self.apps[node](received, context)
        except Exception as error:  # as Flower has it
            reply = Message(Error(2, repr(error)), reply_to=received)
        return reply if self.fault is None else self.fault(node, message, reply)

    def received(self, message: Message) -> tuple[Message, Context]:
        """What the node's app is called with."""
        node = message.metadata.dst_node_id
        context = Context(1, node, self.sites[node], RecordDict(), {})
        return Message(copied(message.content), node, message.metadata.message_type), context


def copied(content: RecordDict) -> RecordDict:
    """Arrays of their own, as after a wire."""
    records: dict[str, Any] = {}
    for key, record in content.items():
        if isinstance(record, ArrayRecord):
            made = {k: Array(a.dtype, a.shape, a.stype, bytes(bytearray(a.data))) for k, a in record.items()}
            records[key] = ArrayRecord(made)
        else:
            records[key] = type(record)(dict(record))
    return RecordDict(records)
