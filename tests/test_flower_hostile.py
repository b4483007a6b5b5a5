"""Nodes that attack a federation: silent ones, stolen ids, and malicious texts and metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcams.flower import FedCAMS, uplink
from fedcams.flower.checkpoint import read_ledger
from fedcams.flower.inbox import that_average
from fedcams.flower.records import ABOUT, LONGEST, REPLY, about, readable
from fedcams.flower.roster import Roster
from fedcams.rounds.messages import PROTOCOL
from flower_apps import quick
from flower_grid import InProcessGrid, LocalGrid
from test_flower import adding_app, plain_app, two_by_three
from test_flower_nonsense import saying

__all__ = ["quick"]  # a fixture for these tests too
Answers = dict[int, Callable[[Message], Message | None]]


class Greetings(InProcessGrid):
    """Nodes that answer greetings as told."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(answers)
        self.answers, self.asked = answers, list[int]()

    def _answer(self, message: Message) -> Message | None:
        self.asked.append(message.metadata.dst_node_id)
        return self.answers[message.metadata.dst_node_id](message)


def site(number: int) -> Callable[[Message], Message]:
    return lambda message: Message(RecordDict({ABOUT: about(site=number, protocol=PROTOCOL)}), reply_to=message)


def fails(message: Message) -> Message:
    return Message(Error(2, "no such table"), reply_to=message)


def cannot(message: Message) -> Message:
    return Message(RecordDict({ABOUT: about(refused="the disk is full")}), reply_to=message)


def refreshed(grid: Greetings, roster: Roster | None = None) -> Roster:
    roster = roster or Roster("config", "arrays", patience=0.02)
    for _ in range(2):  # greet, hear
        roster.refresh(grid)
    return roster


@pytest.mark.parametrize("failure", [fails, cannot])
def test_a_site_that_fails_one_greeting_is_greeted_again(failure: Callable[[Message], Message]) -> None:
    grid = Greetings({8: failure})
    roster = refreshed(grid)
    assert roster.sites == {}
    assert (8 in roster.plain) == (failure is fails), "an app without the mod takes part at once"
    grid.answers[8] = site(3)
    time.sleep(0.03)
    refreshed(grid, roster)
    assert (roster.sites, roster.plain, roster.broken) == ({3: 8}, set(), {})
    assert roster.clients == [3]


def test_a_node_that_gives_up_a_site_that_another_has_is_greeted_again() -> None:
    """Its owner has corrected the number and restarted it, before the server noticed that it was gone."""
    grid = Greetings({8: site(3), 9: site(3)})
    roster = refreshed(grid)
    assert (roster.sites, roster.rivals) == ({3: 8}, {9: 3})
    grid.answers[9] = site(4)
    time.sleep(0.03)
    refreshed(grid, roster)
    assert (roster.sites, roster.rivals) == ({3: 8, 4: 9}, {})
    assert grid.asked == [8, 9, 9], "whoever has a site is left alone"


def test_greetings_that_keep_failing_become_rare() -> None:
    grid = Greetings({8: fails})
    roster = Roster("config", "arrays", patience=0.01)
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        roster.refresh(grid)
    assert 2 <= len(grid.asked) <= 7
    assert roster.clients == [8], "meanwhile it takes part with the dense model"


def test_a_node_that_connects_while_rounds_outlast_its_greeting_still_joins(tmp_path: Path) -> None:
    """Flower drops an answer that is not fetched in time, so answers to greetings are fetched during rounds too."""
    late = 6

    class Slow(LocalGrid):
        """The late node's greeting is answered only while the other one trains, which takes three looks."""

        looks = 0

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            about = {name: self.waiting[name].metadata for name in message_ids if name in self.waiting}
            training = any(told.dst_node_id == 5 and told.group_id for told in about.values())
            self.looks += training
            if training and self.looks % 3:
                return []
            greets = [name for name, told in about.items() if told.dst_node_id == late and not told.group_id]
            return super().pull_messages(about.keys() - (greets if not self.looks % 3 else []))

    apps = {5: adding_app(tmp_path, 1.0), late: adding_app(tmp_path, 1.0)}
    grid = Slow(apps, {5: {"site-id": 0}, late: {"site-id": 1}})
    FedCAMS(server="fedavg", checkpoint=tmp_path / "server", clients=2).start(grid, two_by_three(), 3, timeout=5.0)
    assert [list(line["accepted"]) for line in read_ledger(tmp_path / "server")] == [["0"], ["0", "1"], ["0", "1"]]


def test_a_node_that_starts_slowly_gets_more_time_for_each_greeting() -> None:
    """Flower drops a message that is older than its time to live; expired ones come back as errors."""
    given: list[float] = []

    def slow(message: Message) -> Message:
        given.append(message.metadata.ttl)
        expired = Message(Error(3, "the message expired"), reply_to=message)
        return site(3)(message) if message.metadata.ttl > 0.03 else expired

    grid = Greetings({8: slow})
    roster = Roster("config", "arrays", patience=0.01, longest=0.05)
    end = time.monotonic() + 5
    while not roster.sites and time.monotonic() < end:
        roster.refresh(grid)
    assert roster.sites == {3: 8}
    assert given[-1] == 0.04


@pytest.mark.parametrize("first", [8, 9], ids=["the plain node first", "the thief first"])
def test_no_node_takes_the_id_of_another_as_its_site(first: int) -> None:
    """Instructions for client 8 would go to node 9, and node 8 would never be asked again."""
    answers: Answers = {8: fails, 9: site(8)}
    grid = Greetings({first: answers[first]})
    roster = refreshed(grid)
    grid.nodes, grid.answers = [8, 9], answers
    refreshed(grid, roster)
    assert roster.node_of(8) == 8
    assert roster.clients == [8]
    assert "site 8, which is the id of another node" in roster.broken[9]


def test_a_mute_node_costs_few_deadlines(tmp_path: Path) -> None:
    """It answers greetings and nothing else: left out for longer and longer, it cannot slow every second round."""
    mute = 6

    def fault(node: int, message: Message, reply: Message | None) -> Message | None:
        return None if node == mute and REPLY in (reply.content if reply else ()) else reply

    apps = {5: adding_app(tmp_path, 1.0), mute: adding_app(tmp_path, 1.0)}
    grid = LocalGrid(apps, {5: {"site-id": 0}, mute: {"site-id": 1}}, fault)
    FedCAMS(server="fedavg", checkpoint=tmp_path / "server").start(grid, two_by_three(), 20, 0.05)
    waited = [line["round"] for line in read_ledger(tmp_path / "server") if "1" in line["absent"]]
    assert 2 <= len(waited) <= 5, waited
    assert all(list(line["accepted"]) == ["0"] for line in read_ledger(tmp_path / "server"))


def test_a_mute_node_is_asked_for_if_it_is_needed() -> None:
    roster = Roster("config", "arrays", patience=1.0)
    grid = Greetings({8: site(0), 9: site(1)})
    for _ in range(4):
        roster.wait(grid, 2, 1.0)
        assert roster.clients == [0, 1]
        roster.forget([1])
    roster.answered([0])
    assert roster.silent == {9: 4}


# -- text --------------------------------------------------------------------------------------------------------------

EVIL = "fine\n2026-01-01 INFO all is well\x1b[2J\u202e\x00" + "x" * 10_000


def test_text_of_clients_is_one_bounded_line() -> None:
    shown = readable(EVIL)
    assert shown.startswith(r"fine\n2026-01-01 INFO all is well\x1b[2J\u202e\x00xxx")
    assert len(shown) == LONGEST
    assert shown.isprintable()
    assert readable("é = 5 µs") == "é = 5 µs"


@pytest.mark.parametrize("what", ["refused", "note", "error"])
def test_text_of_clients_reaches_ledger_and_log_escaped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    def fault(node: int, message: Message, reply: Message | None) -> Message | None:
        if node != 6 or reply is None or REPLY not in reply.content:
            return reply
        if what == "error":
            return Message(Error(2, EVIL), reply_to=message)
        reply.content[ABOUT] = ConfigRecord({what: EVIL})
        return reply

    caplog.set_level(logging.INFO, "flwr.fedcams")
    apps = {5: adding_app(tmp_path, 1.0), 6: adding_app(tmp_path, 1.0)}
    grid = LocalGrid(apps, {5: {"site-id": 0}, 6: {"site-id": 1}}, fault)
    FedCAMS(server="fedavg", checkpoint=tmp_path / "server", min_available=2).start(grid, two_by_three(), 1, 5.0)
    (line,) = read_ledger(tmp_path / "server")
    told = {**line["refused"], **line["notes"]}["1"]
    assert told.isprintable()
    assert len(told) <= LONGEST
    assert "x" * 50 in told
    assert all(record.getMessage().isprintable() and len(record.getMessage()) < 1000 for record in caplog.records)


def test_a_node_that_cannot_take_part_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    told = ({"refused": EVIL}, {"site": EVIL, "protocol": PROTOCOL}, {"site": 1, "protocol": EVIL})
    for values in told:
        grid = Greetings({8: lambda message, v=values: Message(RecordDict({ABOUT: about(**v)}), reply_to=message)})
        roster = refreshed(grid)
        assert list(roster.broken) == [8]
    assert len(caplog.records) == 3
    assert all(record.getMessage().isprintable() and len(record.getMessage()) < 500 for record in caplog.records)


# -- metrics -----------------------------------------------------------------------------------------------------------


def metrics(**values: Any) -> RecordDict:
    return RecordDict({"m": MetricRecord({"num-examples": 5, **values})})


@pytest.mark.parametrize(
    "bad",
    [{"x": float("nan")}, {"x": float("inf")}, {"x": [1.0]}, {"y": 1.0}, {}, {"x": 1.0, "y": 2.0}],
    ids=str,
)
def test_one_clients_metrics_do_not_spoil_the_mean(bad: dict[str, Any]) -> None:
    told = {0: metrics(x=1.0), 1: metrics(**bad), 2: metrics(x=3.0), 3: metrics(x=9.0)}
    assert that_average({client: told[client] for client in (0, 1, 2)}, "num-examples") == [0, 2]


HUGE: list[dict[str, Any]] = [
    {f"m{i}": 1.0 for i in range(2000)},
    {"list": [0.0] * 100_000},
    {"n" * 5000: 1.0},
]


@pytest.mark.parametrize("mods", [True, False], ids=["with the mod", "without"])
@pytest.mark.parametrize("told", HUGE, ids=["many", "long", "named"])
def test_metrics_that_are_too_large_are_left_out_and_noted(tmp_path: Path, told: dict[str, Any], mods: bool) -> None:
    large = ClientApp(mods=[uplink("identity", state_dir=tmp_path)] if mods else [])
    large.train()(saying({"num-examples": 5, **told}))
    well = ClientApp(mods=[uplink("identity", state_dir=tmp_path)])
    well.train()(saying({"num-examples": 5, "x": 1.0}))
    grid = LocalGrid({5: well, 6: large}, {5: {"site-id": 0}, 6: {"site-id": 6}})
    result = FedCAMS(server="fedavg", checkpoint=tmp_path / "server", min_available=2).start(
        grid, two_by_three(), 1, 5.0
    )
    (line,) = read_ledger(tmp_path / "server")
    assert sorted(line["accepted"]) == ["0", "6"], "its update is sound"
    assert "left out: metrics of" in line["notes"]["6"]
    assert dict(result.train_metrics_clientapp[1]) == {"x": 1.0}


def test_evaluation_metrics_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    def app(score: float) -> ClientApp:
        made = plain_app(1.0)

        @made.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            record = MetricRecord({"num-examples": 4, "accuracy": score})
            return Message(RecordDict({"metrics": record}), reply_to=message)

        return made

    apps = {5: app(0.25), 6: app(float("nan")), 7: app(0.75)}
    strategy = FedCAMS(server="fedavg", checkpoint=tmp_path / "server", min_available=3, fraction_evaluate=1.0)
    result = strategy.start(LocalGrid(apps, {node: {} for node in apps}), two_by_three(), 1, 5.0)
    assert dict(result.evaluate_metrics_clientapp[1]) == {"accuracy": 0.5}
