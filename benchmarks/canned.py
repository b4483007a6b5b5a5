"""A grid whose nodes answer at once with replies made beforehand: what is left is the strategy's own cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedcams.flower.records import ABOUT, REPLY, about, message_record
from fedcams.rounds import Reply


class CannedGrid(Grid):
    """Node i is site i; every site answers with the same payload."""

    def __init__(self, nodes: int, payload: bytes, buffers: bytes = b"") -> None:
        identify()
        self.nodes, self.payload, self.buffers = nodes, payload, buffers
        self.waiting: dict[str, Message] = {}
        self.asked: dict[str, int] = {}
        self.names = map(str, itertools.count())

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return range(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            names.append(next(self.names))
            self.waiting[names[-1]] = Message(RecordDict(), message.metadata.dst_node_id, "train")
            self.asked[names[-1]] = int(message.metadata.group_id or 0)
        return names

    def _answer(self, site: int, round: int) -> RecordDict:
        if not round:  # a greeting
            return RecordDict({ABOUT: about(site=site)})
        answer = Reply(round, site, self.payload, self.buffers, 10, 5, 0.5)
        return RecordDict({REPLY: message_record([answer.to_bytes()]), ABOUT: about(note="")})

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for name in message_ids:
            message = self.waiting.pop(name)
            answer = self._answer(message.metadata.dst_node_id, self.asked.pop(name))
            replies.append(Message(answer, reply_to=message))
            replies[-1].metadata.__dict__["_reply_to_message_id"] = name
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def identify() -> None:
    """Messages can be made only by a process that knows which one it is, as Flower's own do."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
