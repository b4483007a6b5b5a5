"""Two-way compression over Flower: the simulator's numbers, and clients and servers that forget."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Message

from fedcams.downlink.message import Message as Model
from fedcams.experiment import build
from fedcams.flower.arrays import ArrayNames
from fedcams.flower.book import read_ledger
from fedcams.flower.records import INSTRUCTION, REPLY, message_parts
from fedcams.rounds import Instruction, Reply, answer_from_parts
from fedcams.runs.files import write_file
from flower_grid import Fault
from test_flower import _quick, experiment, federation, run, simulated, vector

__all__ = ["_quick"]  # a fixture for these tests too
DOWNLINKS = ["shared(topk(ratio=1/8))", "shared(blockq)", "replica(blockq(bits=2))", "stateless"]
ROUNDS = 6


def two_way(downlink: str, **changes: Any) -> Any:
    return experiment(downlink=downlink, rounds=ROUNDS, **changes)


def federated(folder: Path, what: Any, rounds: int = ROUNDS, fault: Fault | None = None, **options: Any) -> Any:
    return run(*federation(folder, what, fault, downlink=what.downlink, **options), rounds).arrays


@pytest.mark.parametrize("downlink", DOWNLINKS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"uplink": "sign", "sampler": "full"},
        {"task": "digits", "model": "convmixer(dim=4, depth=1, kernel=3)", "local": "sgd(steps=2)"},
    ],
    ids=["few", "all", "batch-norm"],
)
def test_the_model_is_bit_for_bit_the_simulators(tmp_path: Path, downlink: str, changes: dict[str, Any]) -> None:
    what = two_way(downlink, **changes)
    arrays = federated(tmp_path, what)
    names = ArrayNames.of(arrays, build(what).simulation.problem.model)
    (x, buffers), (expected, averaged) = names.vectors(ArrayRecord(dict(arrays))), simulated(what)
    assert torch.equal(x, expected)
    assert buffers is averaged is None or torch.equal(buffers, averaged)
    assert not any(line["refused"] for line in read_ledger(tmp_path / "checkpoint"))


@pytest.mark.parametrize("downlink", DOWNLINKS)
def test_a_server_that_starts_again_is_in_step(tmp_path: Path, downlink: str) -> None:
    what = two_way(downlink)
    for rounds in (1, 2, 4, ROUNDS):
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
    """Replicas stand on disk before the round counts, and are marked as its own after."""
    what = two_way(downlink)
    federated(tmp_path, what, 2)

    def dying(path: Path, data: bytes) -> None:
        if moment == "between":
            write_file(path, data)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("fedcams.flower.book.write_file", dying)
        with pytest.raises(Killed):
            federated(tmp_path, what, 3)
    arrays = federated(tmp_path, what)
    assert torch.equal(vector(arrays, what), simulated(what)[0])
    assert not any(line["refused"] for line in read_ledger(tmp_path / "checkpoint"))


@pytest.mark.parametrize("downlink", ["shared(topk(ratio=1/8))", "replica(blockq(bits=2))"])
def test_a_client_that_lost_its_model_says_so_and_gets_all_of_it(tmp_path: Path, downlink: str) -> None:
    what = two_way(downlink, sampler="full")
    federated(tmp_path, what, 2)
    (folder,) = (tmp_path / "sites").iterdir()
    shutil.rmtree(folder / "1" / "held")
    kinds = Kinds()
    federated(tmp_path, what, 5, kinds)
    *_, third, fourth, fifth = read_ledger(tmp_path / "checkpoint")
    assert third["refused"]["1"].startswith("OutOfStep: client 1 holds nothing, and the message builds on version")
    assert sorted(third["accepted"]) == ["0", "2", "3"]
    assert sorted(fourth["accepted"]) == sorted(fifth["accepted"]) == ["0", "1", "2", "3"]
    assert [kinds.dense[round, 101] for round in (3, 4, 5)] == [False, True, False]
    assert not any(kinds.dense[round, 100] for round in (3, 4, 5))


class Kinds:
    """Remembers which nodes got the dense model."""

    def __init__(self) -> None:
        self.dense: dict[tuple[int, int], bool] = {}

    def __call__(self, node: int, message: Message, reply: Message | None) -> Message | None:
        if INSTRUCTION in message.content.array_records:
            asked = Instruction.from_parts(message_parts(message.content.array_records[INSTRUCTION], 10**9))
            self.dense[asked.round, node] = Model.from_bytes(asked.model).base is None
        return reply


def test_everybody_out_of_step_is_heard_even_though_the_round_is_skipped(tmp_path: Path) -> None:
    what = two_way("replica(blockq(bits=2))", sampler="full")
    federated(tmp_path, what, 1)
    (folder,) = (tmp_path / "sites").iterdir()
    for site in range(what.clients):
        shutil.rmtree(folder / str(site) / "held")
    federated(tmp_path, what, 3)
    _, second, third = read_ledger(tmp_path / "checkpoint")
    assert second["skipped"] == "0 sound replies, min_replies=1"
    assert len(second["refused"]) == len(third["accepted"]) == what.clients


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
    grid, strategy, arrays = federation(tmp_path, what, losing(3), downlink=downlink, min_available=1)
    run(grid, strategy, arrays, 10, timeout=0.3)
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

    grid, strategy, arrays = federation(tmp_path, what, fault, downlink=what.downlink)
    result = run(grid, strategy, arrays, ROUNDS)
    assert twice == [True] * ROUNDS * what.clients
    assert torch.equal(vector(result.arrays, what), simulated(what)[0])
