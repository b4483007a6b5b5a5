"""Grids in this process: Flower's own messages, no sockets."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedcams.flower.records import ABOUT, REPLY, about, message_record
from fedcams.rounds import Reply
from fedcams.rounds.messages import PROTOCOL

Fault = Callable[[int, Message, Message | None], Message | None]
"""(node, instruction, reply) -> the reply that arrives; None: it never does."""


class InProcessGrid(Grid):
    """What is pushed is answered when its reply is asked for."""

    def __init__(self, nodes: Iterable[int]) -> None:
        identify()
        self.nodes = list(nodes)
        self.waiting: dict[str, Message] = {}
        self.names = map(str, itertools.count())

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return self.nodes

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            names.append(next(self.names))
            self.waiting[names[-1]] = self._taken(message)
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

    def _taken(self, message: Message) -> Message:
        """What is remembered of a message."""
        return message

    def _answer(self, message: Message) -> Message | None:
        raise NotImplementedError


class CannedGrid(InProcessGrid):
    """Node i is site i; all answer at once with the same payload, so that what is left is the strategy's own cost."""

    def __init__(self, nodes: int, payload: bytes, buffers: bytes = b"") -> None:
        super().__init__(range(nodes))
        self.streams = {"update": payload} | ({"buffers": buffers} if buffers else {})

    def _taken(self, message: Message) -> Message:
        """Not the model, which would stay in memory."""
        told = message.metadata
        return Message(RecordDict(), told.dst_node_id, told.message_type, group_id=told.group_id)

    def _answer(self, message: Message) -> Message:
        site, round = message.metadata.dst_node_id, int(message.metadata.group_id or 0)
        if not round:
            return Message(RecordDict({ABOUT: about(site=site, protocol=PROTOCOL)}), reply_to=message)  # a greeting
        answer = Reply(round, site, self.streams, 10, 5, 0.5)
        content = RecordDict({REPLY: message_record([answer.to_bytes()]), ABOUT: about(note="")})
        return Message(content, reply_to=message)


class LocalGrid(InProcessGrid):
    """Nodes are real ClientApps, every byte of their messages is copied; `fault` decides what becomes of replies."""

    def __init__(
        self, apps: dict[int, ClientApp], sites: dict[int, dict[str, Any]], fault: Fault | None = None
    ) -> None:
        super().__init__(apps)
        self.apps, self.sites, self.fault = apps, sites, fault

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
            records[key] = copy.deepcopy(record)
    return RecordDict(records)


def identify() -> None:
    """Messages can be made only by a process that knows which one it is, as Flower's own do."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
