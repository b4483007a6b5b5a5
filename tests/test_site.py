"""A client that dies at any moment: accepted updates plus the residual stay the sum of its updates."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fedcams.rounds.site import PENDING, RESIDUALS, Site
from torch import Tensor

from fedcams import Layout, decode, encode, server
from fedcams.errors import ResidualError
from fedcams.keys import generator
from fedcams.rounds import Accepted, Instruction, Reply, Server, Update
from fedcams.rounds import server as half

D = 200
LAYOUT = Layout(("w", "b"), ((19, 10), (10,)))


def update(round: int) -> Tensor:
    return torch.from_numpy(generator(7, "test", round).standard_normal(D)).float()


def train(x: Tensor, buffers: Tensor | None, instruction: Instruction) -> Update:
    return Update(update(instruction.round), buffers, examples=10, steps=5, loss=0.5)


def ask(round: int, accepted: Accepted | None, client: int = 3, seed: int = 1) -> list[bytes]:
    return Instruction(round, client, seed, {"model": encode("identity", torch.zeros(D), LAYOUT)}, accepted).to_parts()


def site(folder: Path, uplink: str = "topk(k=5)") -> Site:
    """A new process each time, as far as the disk is concerned."""
    return Site(folder, uplink, LAYOUT)


def residual(folder: Path) -> Tensor:
    """What counts: with a reply waiting, the residual before it."""
    store = site(folder).uplink.store
    assert store is not None
    store.rollback(store.snapshot_round or 0)
    return store.gather([3])[0]


def fate(round: int) -> str:
    return ("accepted", "lost", "twice", "refused", "accepted")[int(generator(5, "fate", round).integers(5))]


@pytest.mark.parametrize("uplink", ["sign", "topk(k=5)", "topk(k=5, values=bf16)"])
def test_accepted_plus_residual_is_the_sum_of_the_updates_of_accepted_rounds(tmp_path: Path, uplink: str) -> None:
    config = Server(LAYOUT, server("fedavg"))
    state = half.start(config, torch.zeros(D))
    sent, owed = torch.zeros(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    fates = set()
    for round in range(1, 30):
        instructions, state = half.open(config, state, [3])
        parts = instructions[3].to_parts()
        first = site(tmp_path, uplink).answer(parts, train)
        again = site(tmp_path, uplink).answer(parts, train)
        assert again.again
        assert again.reply == first.reply
        replies = {"accepted": [first], "lost": [], "twice": [first, again], "refused": [first]}[fate(round)]
        received = [Reply.from_parts(answer.reply.to_parts()) for answer in replies]
        cohort = [] if fate(round) == "refused" else [3]
        state, closed = half.close(config, state, cohort, received)
        if closed.accepted:
            sent += decode(first.reply.streams["update"], LAYOUT).double()
            owed += update(round).double()
        fates.add(fate(round))
    instructions, state = half.open(config, state, [3])
    assert site(tmp_path, uplink).answer(instructions[3].to_parts(), train).note == ""
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
    first = site(folder).answer(ask(1, None), train).reply
    one = Accepted(1, first.digest)
    second = site(folder).answer(ask(2, one), train).reply
    third = site(folder).answer(ask(3, one), train).reply
    last = site(folder).answer(ask(4, Accepted(3, third.digest)), train).reply
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
                    replies.append(site(folder).answer(make(replies), train).reply)
                except Killed:
                    patch.undo()
                    replies.append(site(folder).answer(make(replies), train).reply)
        assert replies == expected
        assert torch.equal(residual(folder), residual(tmp_path / "whole"))
        died, moment = has_died(), moment + 1
    assert moment > 20


def test_a_round_that_is_asked_for_in_another_way_is_trained_again(tmp_path: Path) -> None:
    first = site(tmp_path, "topk(k=5)").answer(ask(1, None), train)
    assert not site(tmp_path).answer(ask(1, None, seed=2), train).again
    assert site(tmp_path).answer(ask(1, None, seed=2), train).again
    assert first.reply.streams == site(tmp_path).answer(ask(1, None), train).reply.streams


def test_a_lost_residual_is_told_and_an_older_server_refused(tmp_path: Path) -> None:
    here, away = tmp_path / "here", tmp_path / "away"
    reply = site(here).answer(ask(1, None), train).reply
    accepted = Accepted(1, reply.digest)
    assert site(here).answer(ask(2, accepted), train).note == ""
    assert "the residual of round 1 is lost" in site(away).answer(ask(2, accepted), train).note
    with pytest.raises(ResidualError, match="the server accepted round 0 last, this residual is of round 1"):
        site(here).answer(ask(2, None), train)


def test_a_reply_without_its_residual_is_as_if_it_had_never_been(tmp_path: Path) -> None:
    """They are written at once, and a kill may leave either."""
    first = site(tmp_path).answer(ask(1, None), train).reply
    one = Accepted(1, first.digest)
    second = site(tmp_path).answer(ask(2, one), train).reply
    (tmp_path / RESIDUALS / "3-2.row").unlink()
    again = site(tmp_path).answer(ask(2, one), train)
    assert not again.again
    assert again.reply == second
    assert again.note == ""
    (tmp_path / PENDING).unlink()
    third = site(tmp_path).answer(ask(2, one), train)
    assert not third.again
    assert third.reply == second


def test_the_residual_is_written_over_the_one_before_the_last(tmp_path: Path) -> None:
    accepted, inodes = None, []
    for round in range(1, 6):
        reply = site(tmp_path).answer(ask(round, accepted), train).reply
        accepted = Accepted(round, reply.digest)
        inodes.append(os.stat(tmp_path / RESIDUALS / f"3-{round}.row").st_ino)
    assert inodes[0] != inodes[1]
    assert inodes == [inodes[i % 2] for i in range(5)]


def test_a_damaged_pending_reply_is_refused(tmp_path: Path) -> None:
    site(tmp_path).answer(ask(1, None), train)
    path = tmp_path / PENDING
    path.write_bytes(path.read_bytes()[:-7] + b"damaged")
    with pytest.raises(ResidualError, match=r"pending.reply: damaged .* delete it"):
        site(tmp_path).answer(ask(2, None), train)


def test_without_feedback_nothing_is_kept(tmp_path: Path) -> None:
    lone = Site(tmp_path, "randk(k=5)", LAYOUT, feedback=False)
    lone.answer(ask(1, None), train)
    assert not (tmp_path / RESIDUALS).exists()
    assert not (tmp_path / PENDING).exists()
    assert lone.answer(ask(2, Accepted(1, bytes(16))), train).note == ""
