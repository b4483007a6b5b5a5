"""What Flower cannot read, and what nobody asked for: the round goes on, and no client speaks for another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body, get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedcams.flower import FedCAMS
from fedcams.flower.checkpoint import read_ledger
from fedcams.flower.records import ABOUT, REPLY
from flower_apps import quick
from flower_grid import InProcessGrid, LocalGrid
from test_flower import adding_app, plain_app, two_by_three
from test_flower_hostile import Greetings, refreshed, site

__all__ = ["quick"]  # a fixture for these tests too
SITES: dict[int, dict[str, Any]] = {5: {"site-id": 0}, 6: {"site-id": 1}}


class Garbled(MetricRecord):
    """A record whose bytes are none."""

    __qualname__ = "MetricRecord"

    def deflate(self) -> bytes:
        return add_header_to_object_body(b"\xff", self)


def garble(message: Message) -> Message:
    message.content["garbled"] = Garbled({"a": 1})
    return message


class Inflating(InProcessGrid):
    """Reads replies with Flower's own code, as over HTTP."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = super().pull_messages(message_ids)
        for reply in replies:
            contents = {name: each.deflate() for name, each in get_all_nested_objects(reply).items()}
            inflate_object_from_contents(reply.object_id, contents)
        return replies


class InflatingGrid(Inflating, LocalGrid):
    """The same for apps."""


def attacked(folder: Path, grid: LocalGrid, rounds: int = 1, **options: Any) -> FedCAMS:
    strategy = FedCAMS(server="fedavg", checkpoint=folder / "server", min_available=2, **options)
    strategy.start(grid, two_by_three(), rounds, 5.0)
    return strategy


def test_a_reply_that_flower_cannot_read_is_refused_and_the_round_goes_on(tmp_path: Path) -> None:
    def fault(node: int, message: Message, reply: Message | None) -> Message | None:
        return garble(reply) if node == 6 and reply is not None and REPLY in reply.content else reply

    attacked(tmp_path, InflatingGrid({node: adding_app(tmp_path, 1.0) for node in SITES}, SITES, fault), rounds=2)
    for line in read_ledger(tmp_path / "server"):
        assert list(line["accepted"]) == ["0"]
        assert line["refused"]["1"].startswith("Flower cannot read the reply (DecodeError: ")


def test_a_greeting_that_flower_cannot_read_hides_no_other_nodes_answer() -> None:
    class Inflated(Inflating, Greetings):
        """Both."""

    grid = Inflated({8: lambda message: garble(site(3)(message)), 9: site(4)})
    roster = refreshed(grid)
    assert roster.sites == {4: 9}
    assert roster.broken[8].startswith("Flower cannot read the reply (DecodeError: ")


def evaluating(metrics: dict[str, float], spoil: Callable[[Message], Message] = lambda reply: reply) -> ClientApp:
    made = plain_app(1.0)

    @made.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        record = MetricRecord({"num-examples": 4, **metrics})
        return spoil(Message(RecordDict({"metrics": record}), reply_to=message))

    return made


@pytest.mark.parametrize(
    ("evil", "said"),
    [
        (evaluating({"accuracy": 0.5}, garble), "node 5: Flower cannot read the reply (DecodeError: "),
        (evaluating({f"m{i}": 0.5 for i in range(2000)}), "node 5: left out: metrics of 2001 numbers; at most"),
    ],
    ids=["garbled", "huge"],
)
def test_an_evaluation_that_cannot_be_read_or_kept_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, evil: ClientApp, said: str
) -> None:
    grid = InflatingGrid({5: evil, 6: evaluating({"accuracy": 0.75})}, {5: {}, 6: {}})
    strategy = FedCAMS(server="fedavg", checkpoint=tmp_path / "server", min_available=2, fraction_evaluate=1.0)
    with caplog.at_level(logging.WARNING, "flwr"):
        result = strategy.start(grid, two_by_three(), 1, 5.0)
    assert dict(result.evaluate_metrics_clientapp[1]) == {"accuracy": 0.75}
    assert any(said in record.getMessage() for record in caplog.records), caplog.text


def test_messages_that_nobody_asked_for_are_not_taken_for_replies(tmp_path: Path) -> None:
    """Flower hands out what nodes send to the SuperLink together with any reply."""

    class Straying(LocalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            stray = Message(RecordDict({ABOUT: ConfigRecord({"refused": "an attack"})}), 6, "train")
            return [stray, *super().pull_messages(message_ids)]

    attacked(tmp_path, Straying({node: adding_app(tmp_path, 1.0) for node in SITES}, SITES))
    (line,) = read_ledger(tmp_path / "server")
    assert sorted(line["accepted"]) == ["0", "1"]
    assert line["refused"] == {}


def test_a_node_that_was_removed_before_it_could_be_asked_is_absent(tmp_path: Path) -> None:
    """Flower then returns an empty id instead of the message's."""

    class Losing(LocalGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            sent = list(messages)
            names = super().push_messages(sent)
            return ["" if each.metadata.group_id else name for each, name in zip(sent, names, strict=True)]

    attacked(tmp_path, Losing({node: adding_app(tmp_path, 1.0) for node in SITES}, SITES))
    (line,) = read_ledger(tmp_path / "server")
    assert sorted(line["absent"]) == ["0", "1"]


@pytest.mark.parametrize("nothing", ["", None], ids=repr)
def test_a_node_that_was_removed_before_it_could_be_greeted_is_not_called_broken(nothing: Any) -> None:
    """Nor is an answer awaited: it is greeted again as soon as it is back."""

    class Losing(Greetings):
        lost = True

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            names = super().push_messages(messages)
            return [nothing for _ in names] if self.lost else names

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            assert all(message_ids), "Flower refuses a message without an id"
            return super().pull_messages(message_ids)

    grid = Losing({8: site(3)})
    roster = refreshed(grid)
    assert (roster.sites, roster.greeted, roster.broken) == ({}, {}, {})
    grid.lost = False
    assert refreshed(grid, roster).sites == {3: 8}


def test_an_error_of_the_superlink_is_not_blamed_on_a_node(tmp_path: Path) -> None:
    class Gone(LocalGrid):
        gone = False

        def get_node_ids(self) -> Iterable[int]:
            if self.gone:
                raise ConnectionError("the SuperLink is gone")
            return super().get_node_ids()

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            self.gone = any(self.waiting[name].metadata.group_id for name in message_ids)
            if self.gone:
                raise ConnectionError("the connection broke")
            return super().pull_messages(message_ids)

    with pytest.raises(ConnectionError, match="the SuperLink is gone"):
        attacked(tmp_path, Gone({node: adding_app(tmp_path, 1.0) for node in SITES}, SITES))
    assert read_ledger(tmp_path / "server") == []
