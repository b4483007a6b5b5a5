"""A client that is killed at any moment: accepted updates plus the residual always equal the sum of its updates."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcams import Layout, Method, decode, encode
from fedcams.errors import ResidualError
from fedcams.keys import generator
from fedcams.method import RESIDUAL
from fedcams.rounds import Accepted, ClientUpdate, Instruction, Received, Refusal, Reply, Server
from fedcams.rounds import server as server_side
from fedcams.rounds.durable import OLD_ROWS, PENDING, ROWS, DurableClient

D = 200
LAYOUT = Layout(("w", "b"), ((19, 10), (10,)))


def update(round: int) -> Tensor:
    return torch.from_numpy(generator(7, "test", round).standard_normal(D)).float()


def train(received: Received, instruction: Instruction, shift: Tensor | None, rate: float) -> ClientUpdate:
    return ClientUpdate(update(instruction.round), received.buffers, examples=10, steps=5, loss=0.5)


def ask(round: int, accepted: Accepted | None, client: int = 3, seed: int = 1) -> list[bytes]:
    return Instruction(round, client, seed, {"model": encode("identity", torch.zeros(D), LAYOUT)}, accepted).to_parts()


def opened(folder: Path, uplink: str = "topk(k=5)", **parts: Any) -> DurableClient:
    """A new process each time, as far as the disk is concerned."""
    return DurableClient(folder, Method(uplink=uplink, **parts), LAYOUT)


def residual(folder: Path) -> Tensor:
    """What counts: with a reply waiting, the residual before it."""
    rows = opened(folder).rows
    assert rows is not None
    rows.rollback(rows.snapshot_round or 0)
    return rows.gather(RESIDUAL, [3])[0]


def fate(round: int) -> str:
    return ("accepted", "lost", "twice", "refused", "accepted")[int(generator(5, "fate", round).integers(5))]


@pytest.mark.parametrize("uplink", ["sign", "topk(k=5)", "topk(k=5, values=bf16)"])
def test_accepted_plus_residual_is_the_sum_of_the_updates_of_accepted_rounds(tmp_path: Path, uplink: str) -> None:
    server = Server(Method(server="fedavg"), LAYOUT)
    state = server_side.start(server, torch.zeros(D))
    sent, owed = torch.zeros(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    fates = set()
    for round in range(1, 30):
        instructions, state = server_side.instruct(server, state, [3])
        parts = instructions[3].to_parts()
        first = opened(tmp_path, uplink).answer(parts, train)
        again = opened(tmp_path, uplink).answer(parts, train)
        assert again.again
        assert again.reply == first.reply
        replies = {"accepted": [first], "lost": [], "twice": [first, again], "refused": [first]}[fate(round)]
        received = [Reply.from_parts(answer.reply.to_parts()) for answer in replies]
        cohort = [] if fate(round) == "refused" else [3]
        intake = server_side.take_answers(server, state, cohort, received)
        state, concluded = server_side.conclude_(server, state, intake)
        if concluded.accepted:
            sent += decode(first.reply.streams["update"], LAYOUT).double()
            owed += update(round).double()
        fates.add(fate(round))
    instructions, state = server_side.instruct(server, state, [3])
    assert opened(tmp_path, uplink).answer(instructions[3].to_parts(), train).note == ""
    assert fates == {"accepted", "lost", "twice", "refused"}
    assert torch.allclose(sent + residual(tmp_path).double(), owed, atol=1e-4)


class Killed(BaseException):
    """Stands for SIGKILL."""


def die_at(patch: pytest.MonkeyPatch, moment: int) -> Callable[[], bool]:
    """The process is dead before its moment-th change of the disk; tells whether it died."""
    calls, dead = iter(range(moment)), False

    def mortal(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal dead
            if not dead and next(calls, None) is not None:
                return call(*args, **kwargs)
            dead = True
            raise Killed

        return called

    for name in ("fsync", "fdatasync", "replace", "unlink"):
        patch.setattr(os, name, mortal(getattr(os, name)))
    return lambda: dead


def three_rounds(folder: Path) -> list[Reply]:
    """Rounds 1 and 3 are accepted, 2 is not; a kill anywhere is followed by the same instruction."""
    first = opened(folder).answer(ask(1, None), train).reply
    one = Accepted(1, first.digest)
    second = opened(folder).answer(ask(2, one), train).reply
    third = opened(folder).answer(ask(3, one), train).reply
    last = opened(folder).answer(ask(4, Accepted(3, third.digest)), train).reply
    return [first, second, third, last]


def test_a_kill_at_every_change_of_the_disk_changes_nothing(tmp_path: Path) -> None:
    expected, moment, died = three_rounds(tmp_path / "whole"), 0, True
    while died:
        folder = tmp_path / str(moment)
        script: list[Callable[[list[Reply]], list[bytes]]] = [
            lambda r: ask(1, None),
            lambda r: ask(2, Accepted(1, r[0].digest)),
            lambda r: ask(3, Accepted(1, r[0].digest)),
            lambda r: ask(4, Accepted(3, r[2].digest)),
        ]
        replies: list[Reply] = []
        with pytest.MonkeyPatch.context() as patch:
            has_died = die_at(patch, moment)
            for make in script:
                try:
                    replies.append(opened(folder).answer(make(replies), train).reply)
                except Killed:
                    patch.undo()
                    replies.append(opened(folder).answer(make(replies), train).reply)
        assert replies == expected
        assert torch.equal(residual(folder), residual(tmp_path / "whole"))
        died, moment = has_died(), moment + 1
    assert moment > 20


def test_a_round_that_is_asked_for_in_another_way_is_trained_again(tmp_path: Path) -> None:
    first = opened(tmp_path, "topk(k=5)").answer(ask(1, None), train)
    assert not opened(tmp_path).answer(ask(1, None, seed=2), train).again
    assert opened(tmp_path).answer(ask(1, None, seed=2), train).again
    assert first.reply.streams == opened(tmp_path).answer(ask(1, None), train).reply.streams


def test_a_lost_residual_is_told_and_an_older_server_refused(tmp_path: Path) -> None:
    here, away = tmp_path / "here", tmp_path / "away"
    reply = opened(here).answer(ask(1, None), train).reply
    accepted = Accepted(1, reply.digest)
    assert opened(here).answer(ask(2, accepted), train).note == ""
    assert "the residual of round 1 is lost" in opened(away).answer(ask(2, accepted), train).note
    older = r"here/rows: the server last accepted round 0, but this residual is of round 1: .* delete this folder"
    with pytest.raises(ResidualError, match=older):
        opened(here).answer(ask(2, None), train)
    shutil.rmtree(here / "rows")
    assert opened(here).answer(ask(2, None), train).note == ""


def test_the_folder_of_another_client_is_refused(tmp_path: Path) -> None:
    """Copied there by mistake; both clients were accepted in the same round, so no round number tells them apart."""
    accepted = {}
    for client in (3, 4):
        reply = opened(tmp_path / str(client)).answer(ask(1, None, client), train).reply
        accepted[client] = Accepted(1, reply.digest)
    opened(tmp_path / "3").answer(ask(2, accepted[3]), train)
    shutil.rmtree(tmp_path / "4")
    shutil.copytree(tmp_path / "3", tmp_path / "4")
    with pytest.raises(ResidualError, match=r"4/rows: the rows of client 3, but this is client 4; restore .* delete"):
        opened(tmp_path / "4").answer(ask(2, accepted[4], 4), train)
    shutil.rmtree(tmp_path / "4")
    told = opened(tmp_path / "4").answer(ask(2, accepted[4], 4), train)
    assert "the residual of round 1 is lost" in told.note


def test_a_reply_without_its_residual_is_as_if_it_had_never_been(tmp_path: Path) -> None:
    """They are written at once, and a kill may leave either."""
    first = opened(tmp_path).answer(ask(1, None), train).reply
    one = Accepted(1, first.digest)
    second = opened(tmp_path).answer(ask(2, one), train).reply
    (tmp_path / ROWS / "3-2.rows").unlink()
    again = opened(tmp_path).answer(ask(2, one), train)
    assert not again.again
    assert again.reply == second
    assert again.note == ""
    (tmp_path / PENDING).unlink()
    third = opened(tmp_path).answer(ask(2, one), train)
    assert not third.again
    assert third.reply == second


def test_the_residual_is_written_over_the_one_before_the_last(tmp_path: Path) -> None:
    accepted, inodes = None, []
    for round in range(1, 6):
        reply = opened(tmp_path).answer(ask(round, accepted), train).reply
        accepted = Accepted(round, reply.digest)
        inodes.append(os.stat(tmp_path / ROWS / f"3-{round}.rows").st_ino)
    assert inodes[0] != inodes[1]
    assert inodes == [inodes[i % 2] for i in range(5)]


def test_a_damaged_pending_reply_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).answer(ask(1, None), train)
    path = tmp_path / PENDING
    path.write_bytes(path.read_bytes()[:-7] + b"damaged")
    with pytest.raises(ResidualError, match=r"pending.reply: damaged .* delete it"):
        opened(tmp_path).answer(ask(2, None), train)


def test_without_feedback_nothing_is_kept(tmp_path: Path) -> None:
    lone = opened(tmp_path, "randk(k=5)", feedback=False)
    lone.answer(ask(1, None), train)
    assert not (tmp_path / ROWS).exists()
    assert not (tmp_path / PENDING).exists()
    assert lone.answer(ask(2, Accepted(1, bytes(16))), train).note == ""


def test_a_folder_of_version_0_1_is_refused(tmp_path: Path) -> None:
    (tmp_path / OLD_ROWS).mkdir()
    with pytest.raises(ResidualError, match=r"written by fedcams 0\.1; version 0\.1\.0 is the last one that reads it"):
        opened(tmp_path)


def test_a_folder_of_another_method_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).answer(ask(1, None), train)
    with pytest.raises(ResidualError):
        opened(tmp_path, control="scaffold")


# -- control variates next to the residual ----------------------------------------------------------------------------

SHIFT = torch.full((D,), 0.25)


def ask_controlled(round: int, accepted: Accepted | None) -> list[bytes]:
    streams = {"model": encode("identity", torch.zeros(D), LAYOUT), "control": encode("identity", SHIFT, LAYOUT)}
    return Instruction(round, 3, 1, streams, accepted).to_parts()


def test_control_variates_move_with_the_residual_and_only_when_accepted(tmp_path: Path) -> None:
    shifts: list[Tensor] = []

    def note(received: Received, instruction: Instruction, shift: Tensor | None, rate: float) -> ClientUpdate:
        assert shift is not None
        shifts.append(shift.clone())
        return train(received, instruction, shift, rate)

    def again() -> DurableClient:
        return opened(tmp_path, control="scaffold", local="sgd(lr=0.1)")

    first = again().answer(ask_controlled(1, None), note).reply
    again().answer(ask_controlled(2, None), note)  # the first was not accepted, and so it was never there
    second = again().answer(ask_controlled(3, None), note).reply
    again().answer(ask_controlled(4, Accepted(3, second.digest)), note)
    sent = decode(second.streams["control"], LAYOUT)
    assert torch.equal(shifts[0], SHIFT)
    assert torch.equal(shifts[1], SHIFT)
    assert torch.equal(shifts[3], SHIFT - sent)
    assert torch.allclose(sent, -update(3) / 0.5 - SHIFT)
    assert first.digest != second.digest


def test_a_refused_training_waits_for_nothing(tmp_path: Path) -> None:
    """A loss that is not finite is told at once, and rows stay as they are."""

    def diverge(received: Received, instruction: Instruction, shift: Tensor | None, rate: float) -> ClientUpdate:
        return train(received, instruction, shift, rate)._replace(loss=float("nan"))

    one = Accepted(1, opened(tmp_path).answer(ask(1, None), train).reply.digest)
    told = opened(tmp_path).answer(ask(2, one), diverge)
    assert isinstance(told.reply, Refusal)
    assert "the training reports the loss nan" in told.reply.reason
    assert not (tmp_path / PENDING).exists()
    kept = residual(tmp_path)
    assert bool(kept.any())
    assert opened(tmp_path).answer(ask(3, one), train).note == ""
    assert torch.equal(residual(tmp_path), kept)
