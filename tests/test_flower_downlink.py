"""Two-way compression over Flower: the simulator's numbers, and clients and servers that forget."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor

from fedcams.downlink.message import Message as Model
from fedcams.experiment import build
from fedcams.flower import FedCAMS
from fedcams.flower.checkpoint import read_ledger
from fedcams.flower.inbox import dense_size
from fedcams.flower.mod import Initial
from fedcams.flower.records import INSTRUCTION, REPLY, message_parts, message_record
from fedcams.layout import Layout
from fedcams.rounds import Instruction, Refusal, Reply, answer_from_parts
from fedcams.runs.files import write_private
from flower_apps import experiment, federation, quick, run, simulated, simulation, vector, vectors
from flower_grid import Fault, LocalGrid
from test_flower import adding_app, plain_app, two_by_three

__all__ = ["quick"]  # a fixture for these tests too
DOWNLINKS = ["shared(topk(ratio=1/8))", "shared(blockq)", "replica(blockq(bits=2))", "stateless"]
ROUNDS = 4


BATCH_NORM = {"task": "digits", "model": "convmixer(dim=4, depth=1, kernel=3)", "local": "sgd(steps=2, batch=4)"}
BUFFERS = {**BATCH_NORM, "buffers": "blockq"}


def two_way(downlink: str, **changes: Any) -> Any:
    """Three of four clients in every round; with this seed, two of them miss one each and return in the next."""
    few_steps = "sgd(lr=0.05, steps=2, batch=8)"
    return experiment(**{"downlink": downlink, "rounds": ROUNDS, "local": few_steps, "seed": 1, **changes})


def federated(folder: Path, what: Any, rounds: int = ROUNDS, fault: Fault | None = None, **options: Any) -> Any:
    return run(*federation(folder, what, fault, **options), rounds).arrays


@pytest.mark.parametrize("downlink", DOWNLINKS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"uplink": "sign", "sampler": "full"},
        BATCH_NORM,
    ],
    ids=["few", "all", "batch-norm"],
)
def test_the_model_is_bit_for_bit_the_simulators(tmp_path: Path, downlink: str, changes: dict[str, Any]) -> None:
    what = two_way(downlink, **changes)
    arrays = federated(tmp_path, what)
    (x, buffers), (expected, averaged) = vectors(arrays, what), simulated(what)
    assert torch.equal(x, expected)
    assert buffers is averaged is None or torch.equal(buffers, averaged)
    assert not any(line["refused"] for line in read_ledger(tmp_path / "checkpoint"))


@pytest.mark.parametrize("downlink", DOWNLINKS)
def test_a_server_that_starts_again_is_in_step(tmp_path: Path, downlink: str) -> None:
    what = two_way(downlink)
    for rounds in (1, 2, ROUNDS):
        arrays = federated(tmp_path, what, rounds)
    assert torch.equal(vector(arrays, what), simulated(what)[0])
    federated(tmp_path / "whole", what)
    assert read_ledger(tmp_path / "checkpoint") == read_ledger(tmp_path / "whole" / "checkpoint")


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("downlink", ["replica(blockq(bits=2))", "shared(topk(ratio=1/8))"])
@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_server_killed_while_it_saves_is_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, downlink: str, moment: str
) -> None:
    """Replicas, of buffers too, stand on disk before the round counts, and are marked as its own after."""
    what = two_way(downlink, **BUFFERS)
    federated(tmp_path, what, 2)

    def dying(path: Path, data: bytes) -> None:
        if moment == "between":
            write_private(path, data)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("fedcams.runs.checkpoint.write_private", dying)
        with pytest.raises(Killed):
            federated(tmp_path, what, 3)
    (x, buffers), (expected, averaged) = vectors(federated(tmp_path, what), what), simulated(what)
    assert torch.equal(x, expected)
    assert buffers is not None
    assert averaged is not None
    assert torch.equal(buffers, averaged)
    assert not any(line["refused"] for line in read_ledger(tmp_path / "checkpoint"))


KEEPING = ["shared(topk(ratio=1/8))", "replica(blockq(bits=2))"]


class Kinds:
    """Remembers which instructions brought a node the dense model, round by round."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.fault, self.dense = fault, dict[tuple[int, int], list[bool]]()

    def __call__(self, node: int, message: Message, reply: Message | None) -> Message | None:
        if INSTRUCTION not in message.content.array_records:
            return reply
        asked = Instruction.from_parts(message_parts(message.content.array_records[INSTRUCTION], 10**9))
        self.dense.setdefault((asked.round, node), []).append(Model.from_bytes(asked.streams["model"]).base is None)
        return reply if self.fault is None else self.fault(node, message, reply)

    def of(self, node: int, rounds: range) -> list[list[bool]]:
        return [self.dense[round, node] for round in rounds]


def forgetful(folder: Path, what: Any, sites: range) -> None:
    """After two rounds these sites have lost the model that they held."""
    federated(folder, what, 2)
    (run_folder,) = (folder / "sites").iterdir()
    for site in sites:
        shutil.rmtree(run_folder / str(site) / "held")


@pytest.mark.parametrize("downlink", KEEPING)
def test_a_client_that_lost_its_model_says_so_and_gets_all_of_it_in_the_same_round(
    tmp_path: Path, downlink: str
) -> None:
    what, kinds = two_way(downlink, sampler="full"), Kinds()
    forgetful(tmp_path, what, range(1, 2))
    federated(tmp_path, what, 5, kinds)
    *_, third, fourth, fifth = read_ledger(tmp_path / "checkpoint")
    assert third["notes"]["1"].startswith("out of step, so sent another instruction: client 1 holds nothing, but")
    assert not fourth["notes"]
    for line in (third, fourth, fifth):
        assert sorted(line["accepted"]) == ["0", "1", "2", "3"]
        assert not line["refused"]
    assert kinds.of(101, range(3, 6)) == [[False, True], [False], [False]]
    assert kinds.of(100, range(3, 6)) == [[False]] * 3
    assert third["wire_down"] - fourth["wire_down"] > 4 * build(what).simulation.problem.layout.d


def refusing(node: int, message: Message, reply: Message | None) -> Message | None:
    """The answer to the second instruction in a round never comes."""
    asked = Instruction.from_parts(message_parts(message.content.array_records[INSTRUCTION], 10**9))
    return None if (node, asked.round) == (101, 3) and Model.from_bytes(asked.streams["model"]).base is None else reply


@pytest.mark.parametrize("downlink", KEEPING)
def test_a_client_that_does_not_answer_when_told_again_is_absent_and_gets_all_of_it_later(
    tmp_path: Path, downlink: str
) -> None:
    what, kinds = two_way(downlink, sampler="full"), Kinds(refusing)
    forgetful(tmp_path, what, range(1, 2))
    grid, strategy, arrays = federation(tmp_path, what, kinds)
    run(grid, strategy, arrays, 4, timeout=0.5)
    *_, third, fourth = read_ledger(tmp_path / "checkpoint")
    assert third["absent"] == {"1": "no reply before the deadline"}
    assert "out of step, so sent another instruction" in third["notes"]["1"]
    assert sorted(third["accepted"]) == ["0", "2", "3"]
    assert sorted(fourth["accepted"]) == ["0", "1", "2", "3"]
    assert kinds.of(101, range(3, 5)) == [[False, True], [True]]


def test_everybody_out_of_step_takes_part_all_the_same(tmp_path: Path) -> None:
    what = two_way("replica(blockq(bits=2))", sampler="full")
    forgetful(tmp_path, what, range(what.clients))
    federated(tmp_path, what, 3)
    third = read_ledger(tmp_path / "checkpoint")[-1]
    assert len(third["notes"]) == len(third["accepted"]) == what.clients
    assert not third["skipped"]


@pytest.mark.parametrize(("round", "instructions"), [(3, 2), (9, 1)], ids=["again and again", "of another round"])
def test_a_client_that_refuses_without_end_is_told_again_once(tmp_path: Path, round: int, instructions: int) -> None:
    what = two_way("replica(blockq(bits=2))", sampler="full")
    federated(tmp_path, what, 2)

    def refuse(node: int, message: Message, reply: Message | None) -> Message | None:
        if node == 101 and reply is not None:
            answer = Refusal(round, 1, None, "not today").to_bytes()
            reply.content.array_records[REPLY] = message_record([answer])
        return reply

    kinds = Kinds(refuse)
    federated(tmp_path, what, 3, kinds)
    third = read_ledger(tmp_path / "checkpoint")[-1]
    assert len(kinds.dense[3, 101]) == instructions
    assert list(third["refused"]) == ["1"]
    assert sorted(third["accepted"]) == ["0", "2", "3"]


@pytest.mark.parametrize("downlink", KEEPING)
def test_who_is_told_again_and_a_round_that_is_skipped(tmp_path: Path, downlink: str) -> None:
    """The round does not count, and all clients are in step in the next one."""
    what, kinds = two_way(downlink, sampler="full"), Kinds(refusing)
    forgetful(tmp_path, what, range(1, 2))
    grid, strategy, arrays = federation(tmp_path, what, kinds, min_replies=what.clients)
    run(grid, strategy, arrays, 4, timeout=0.5)
    *_, third, fourth = read_ledger(tmp_path / "checkpoint")
    assert third["skipped"] == "3 valid replies, min_replies=4"
    assert len(fourth["accepted"]) == what.clients


# -- warm first contacts -------------------------------------------------------------------------------------------

WARM = ["replica(blockq(bits=2), warm=true)", "shared(topk(ratio=1/8), warm=true)"]


def initial_of(what: Any, other: int = -1) -> Initial:
    """Makes the initial model from the seed, as the server does; at the site `other` one bit of it differs."""

    def initial(context: Context) -> ArrayRecord:
        state = build(what).simulation.problem.model.state_dict()
        if context.node_config["site-id"] == other:
            first = next(iter(state.values())).view(-1)
            first[0] = torch.nextafter(first[0], first[0] + 1)
        return ArrayRecord(state)

    return initial


@pytest.mark.parametrize("changes", [{}, BUFFERS, {**BATCH_NORM, "buffers": "identity"}], ids=["", "buffers", "dense"])
@pytest.mark.parametrize("downlink", WARM)
def test_who_makes_the_initial_model_itself_is_never_sent_it(
    tmp_path: Path, downlink: str, changes: dict[str, Any]
) -> None:
    """The simulator's bytes and bits, also with a server and sites that start again after the first round."""
    what = two_way(downlink, **{**changes, "rounds": 3})
    kinds = Kinds()
    for rounds in (1, 3):
        arrays = federated(tmp_path, what, rounds, kinds, initial=initial_of(what))
    assert not any(any(dense) for dense in kinds.dense.values())
    state, records = simulation(what)
    assert torch.equal(vector(arrays, what), state.x)
    ledger = read_ledger(tmp_path / "checkpoint")
    assert not any(line["notes"] or line["refused"] for line in ledger)
    assert [line["wire_down"] for line in ledger] == [record.wire_down for record in records]


@pytest.mark.parametrize("changes", [{}, BUFFERS], ids=["", "buffers"])
@pytest.mark.parametrize("downlink", WARM)
def test_a_site_whose_initial_bits_differ_is_told_again_and_both_messages_count(
    tmp_path: Path, downlink: str, changes: dict[str, Any]
) -> None:
    what, kinds = two_way(downlink, sampler="full", **{**changes, "rounds": 2}), Kinds()
    federated(tmp_path, what, 2, kinds, initial=initial_of(what, other=1))
    assert kinds.of(101, range(1, 3)) == [[False, True], [False]]
    assert kinds.of(100, range(1, 3)) == [[False], [False]]
    first, second = read_ledger(tmp_path / "checkpoint")
    assert list(first["notes"]) == ["1"]
    assert re.match(
        r"out of step, so sent another .*: client 1 holds version 0 \(\w+\), but the mess", first["notes"]["1"]
    )
    assert not second["notes"]
    for line in (first, second):
        assert (sorted(line["accepted"]), line["refused"]) == (["0", "1", "2", "3"], {})
    _, (record, _) = simulation(what)
    refusal = 100 < first["wire_up"] - record.wire_up < 400
    d = build(what).simulation.problem.layout.d
    assert refusal
    assert first["wire_down"] - record.wire_down > 4 * d


def test_a_site_that_cannot_make_the_initial_model_is_sent_it_and_told_how_to_save_that(tmp_path: Path) -> None:
    what, kinds = two_way(WARM[0], sampler="full"), Kinds()
    arrays = federated(tmp_path, what, ROUNDS, kinds)
    assert kinds.of(100, range(1, 4)) == [[False, True], [False], [False]]
    first, *others = read_ledger(tmp_path / "checkpoint")
    assert first["notes"]["0"].startswith("warm=true, but this site cannot make the initial model; give uplink(initial")
    assert re.search("out of step, so sent another instruction: client 0 holds nothing", first["notes"]["0"])
    assert first["notes"]["0"].count("warm=true") == 1
    assert not any(line["notes"] for line in others)
    assert all(len(line["accepted"]) == what.clients for line in (first, *others))
    assert torch.isfinite(vector(arrays, what)).all()


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"w": 1}, "initial returned a dict; return ArrayRecord(model.state_dict())"),
        (ArrayRecord({}), "initial returned a different model from the server's: the array "),
        (ArrayRecord({"x": torch.zeros(2)}), "expected float"),
    ],
    ids=["no record", "empty", "another shape"],
)
def test_an_initial_model_that_is_another_one_is_refused_by_name(tmp_path: Path, made: Any, reason: str) -> None:
    what = two_way(WARM[0], sampler="full")
    (name,) = build(what).simulation.problem.layout.names
    given = ArrayRecord({name: made["x"]}) if "x" in made else made
    federated(tmp_path, what, 1, initial=lambda context: given)
    (line,) = read_ledger(tmp_path / "checkpoint")
    assert not line["accepted"]
    assert all(reason in why for why in line["refused"].values())
    assert len(line["refused"]) == what.clients


# -- clients without the mod ---------------------------------------------------------------------------------------


class Arrays:
    """Remembers what a node without the mod was sent, round by round."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def __call__(self, node: int, message: Message, reply: Message | None) -> Message | None:
        records = message.content.array_records
        if node == 6 and records.get("arrays"):
            assert list(message.content) == ["arrays", "config"]
            self.sent.append(torch.from_numpy(records["arrays"]["w"].numpy().copy()))
        return reply


@pytest.mark.parametrize("others", ["with", "without"])
@pytest.mark.parametrize("downlink", DOWNLINKS)
def test_a_client_without_the_mod_gets_the_dense_model_whatever_the_downlink(
    tmp_path: Path, downlink: str, others: str
) -> None:
    """Its update counts like any other, and is relative to the server's own model, which is what it got."""
    apps = {6: plain_app(2.0)} | ({5: adding_app(tmp_path / "sites", 1.0, "identity")} if others == "with" else {})
    arrays, step = Arrays(), 1.5 if others == "with" else 2.0
    for rounds in (2, 4):  # the second time by a restarted server
        grid = LocalGrid(apps, {5: {"site-id": 1}, 6: {}}, arrays)
        strategy = FedCAMS(server="fedavg", checkpoint=tmp_path / "server", downlink=downlink, min_available=len(apps))
        result = strategy.start(grid, two_by_three(), rounds, timeout=5.0)
    models = [torch.full((2, 3), step * round) for round in range(4)]
    assert [torch.equal(sent, x) for sent, x in zip(arrays.sent, models, strict=True)] == [True] * 4
    assert torch.equal(torch.from_numpy(result.arrays["w"].numpy()), torch.full((2, 3), 4 * step))
    ledger = read_ledger(tmp_path / "server")
    assert [sorted(line["accepted"]) for line in ledger] == [sorted(["6", *(["1"] if 5 in apps else [])])] * 4
    assert not any(line["refused"] or line["notes"] for line in ledger)
    dense = dense_size(Layout(("w", "b"), ((2, 3), (3,))))
    assert all(line["wire_down"] >= dense for line in ledger)
    if others == "without":
        assert [line["wire_down"] for line in ledger] == [dense] * 4
    assert not list((tmp_path / "server").glob("replicas/6-*"))


def losing(every: int) -> Callable[[int, Message, Message | None], Message | None]:
    """Loses some replies on their way."""
    count = iter(range(10**6))

    def fault(node: int, message: Message, reply: Message | None) -> Message | None:
        asked = INSTRUCTION in message.content.array_records
        return None if asked and next(count) % every == 0 else reply

    return fault


@pytest.mark.parametrize("downlink", DOWNLINKS)
def test_lost_replies_put_nobody_out_of_step(tmp_path: Path, downlink: str) -> None:
    what = two_way(downlink, sampler="full")
    grid, strategy, arrays = federation(tmp_path, what, losing(3), min_available=1)
    run(grid, strategy, arrays, 10, timeout=0.05)
    ledger = read_ledger(tmp_path / "checkpoint")
    assert not any(line["refused"] for line in ledger)
    assert sum(len(line["absent"]) for line in ledger) > 5


def test_an_instruction_that_comes_twice_is_answered_with_the_same_bytes(tmp_path: Path) -> None:
    what = two_way("replica(blockq(bits=2))", sampler="full")
    twice: list[bool] = []

    def fault(node: int, message: Message, reply: Message | None) -> Message | None:
        if INSTRUCTION in message.content.array_records and reply is not None:
            again = grid.apps[node](*grid.received(message))
            first, second = (message_parts(m.content.array_records[REPLY], 10**9) for m in (reply, again))
            assert isinstance(answer_from_parts(first), Reply)
            twice.append(first == second)
        return reply

    grid, strategy, arrays = federation(tmp_path, what, fault)
    result = run(grid, strategy, arrays, ROUNDS)
    assert twice == [True] * ROUNDS * what.clients
    assert torch.equal(vector(result.arrays, what), simulated(what)[0])
