"""The two halves of a round: through real bytes they are the paper's algorithm, and nothing bad gets in."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from fedcams import ErrorFeedback, Layout, ResidualStore, SpecError, encode, server
from fedcams.rounds import Accepted, Client, Instruction, Reply, Server, ServerState, Update, client
from fedcams.rounds import server as half

CLIENTS, D, ROUNDS = 8, 60, 30
GRADIENT = oracle.quadratic(CLIENTS, D)
COHORTS = [sorted(np.random.default_rng(t).choice(CLIENTS, 3, replace=False).tolist()) for t in range(ROUNDS)]
LAYOUT = Layout(("w", "b"), ((5, 10), (10,)))


def train(x: Tensor, buffers: Tensor | None, instruction: Instruction) -> Update:
    """Five local gradient steps in float64 on the client's quadratic."""
    start = x.double().numpy()
    w = start
    for _ in range(5):
        w = w - 0.05 * GRADIENT(instruction.client, w)
    return Update(torch.from_numpy(w - start).float(), buffers, examples=10, steps=5, loss=0.5)


def federate(uplink: str, optimizer: str, cohorts: list[list[int]] = COHORTS) -> list[Tensor]:
    """Every message crosses as bytes; commits follow what the next instruction names."""
    config = Server(LAYOUT, server(optimizer))
    state = half.start(config, torch.zeros(D))
    clients = {i: Client(ErrorFeedback(uplink, ResidualStore.in_memory(LAYOUT))) for i in range(CLIENTS)}
    waiting: dict[int, tuple[Reply, object]] = {}
    xs = []
    for cohort in cohorts:
        instructions, state = half.open(config, state, cohort)
        replies = []
        for i in cohort:
            instruction = Instruction.from_bytes(instructions[i].to_bytes())
            if i in waiting:
                assert client.settle(clients[i], *waiting.pop(i), instruction)  # type: ignore[arg-type]
            reply, pending = client.reply(clients[i], instruction, train)
            waiting[i] = (reply, pending)
            replies.append(Reply.from_bytes(reply.to_bytes()))
        state, closed = half.close(config, state, cohort, reversed(replies))
        assert closed.accepted == cohort
        assert not closed.refused
        xs.append(state.x.clone())
    return xs


@pytest.mark.parametrize(
    ("uplink", "compress"),
    [
        ("identity", None),
        ("sign", oracle.scaled_sign),
        ("topk(ratio=0.1)", partial(oracle.topk, ratio="1/10")),
    ],
)
@pytest.mark.parametrize("name", ["fedams", "fedavg", "fedyogi"])
def test_the_two_halves_are_the_papers_algorithm(uplink: str, compress: oracle.Compress | None, name: str) -> None:
    xs = federate(uplink, f"{name}(lr=0.1)")
    step = partial(getattr(oracle, name), lr=0.1)
    expected = oracle.run(np.zeros(D), GRADIENT, COHORTS, 5, 0.05, step, compress)
    for x, x64 in zip(xs, expected, strict=True):
        assert np.linalg.norm(x.numpy() - x64) <= 1e-5 * np.linalg.norm(x64)


def test_a_second_run_is_the_same_bit_for_bit() -> None:
    for first, second in zip(*(federate("randk(ratio=0.1)", "fedams") for _ in range(2)), strict=True):
        assert torch.equal(first, second)


# -- what the server refuses -------------------------------------------------------------------------------------------


def opened(**options: object) -> tuple[Server, ServerState, dict[int, Instruction]]:
    config = Server(LAYOUT, server("fedavg"), **options)  # type: ignore[arg-type]
    instructions, state = half.open(config, half.start(config, torch.zeros(D)), [0, 1, 2])
    return config, state, instructions


def answer(instruction: Instruction, value: float = 1.0, **changes: object) -> Reply:
    streams = {"update": encode("identity", torch.full((D,), value), LAYOUT)}
    reply = Reply(instruction.round, instruction.client, streams, examples=10, steps=5, loss=0.5)
    return dataclasses.replace(reply, **changes)  # type: ignore[arg-type]


def test_bad_replies_are_refused_with_the_reason_and_the_round_goes_on() -> None:
    config, state, instructions = opened()
    good = answer(instructions[0], 2.0)
    replies = [
        answer(instructions[1], streams={"update": good.streams["update"][:-3]}),
        answer(instructions[2], round=7),
        good,
        answer(instructions[0], client=9),
    ]
    state, closed = half.close(config, state, [0, 1, 2], replies)
    assert closed.accepted == [0]
    assert closed.refused[1].startswith("ChecksumMismatch")
    assert closed.refused[2] == "UpdateError: an update for round 7 in round 1; it came too late or too early"
    assert "client 9 was not asked" in closed.refused[9]
    assert torch.equal(state.x, torch.full((D,), 2.0))
    assert state.accepted == {0: Accepted(1, good.digest)}
    assert closed.delta_norm == pytest.approx(2.0 * D**0.5)


def test_a_reply_sent_twice_counts_once() -> None:
    config, state, instructions = opened()
    state, closed = half.close(
        config, state, [0, 1], [answer(instructions[0], 2.0)] * 2 + [answer(instructions[1], 4.0)]
    )
    assert closed.accepted == [0, 1]
    assert "already" in closed.refused[0]
    assert torch.equal(state.x, torch.full((D,), 3.0))


def test_a_round_without_replies_makes_no_step_and_is_counted() -> None:
    config, state, instructions = opened()
    state, closed = half.close(config, state, [0, 1], [answer(instructions[0], streams={"update": b""})])
    assert closed.accepted == []
    assert closed.delta_norm == 0
    assert state.round == 1
    assert torch.equal(state.x, torch.zeros(D))
    assert state.optimizer.t == 0


def test_weighting_by_examples() -> None:
    config, state, instructions = opened(weighting="examples")
    replies = [answer(instructions[0], 1.0, examples=30), answer(instructions[1], 5.0, examples=10)]
    none = answer(instructions[2], 100.0, examples=0)
    state, closed = half.close(config, state, [0, 1, 2], [*replies, none])
    assert torch.equal(state.x, torch.full((D,), 2.0))
    assert "weight=0.0" in closed.refused[2]
    with pytest.raises(SpecError, match="weighting='median'; allowed: uniform or examples"):
        Server(LAYOUT, server("fedavg"), weighting="median")
    with pytest.raises(SpecError, match="seed=9223372036854775808; allowed: what fits"):
        Server(LAYOUT, server("fedavg"), seed=2**63)


def test_buffers_are_averaged_and_never_stepped() -> None:
    buffers = Layout(("norm.mean",), ((4,),))
    config = Server(LAYOUT, server("fedams"), buffer_layout=buffers)
    state = half.start(config, torch.zeros(D), torch.zeros(4))
    instructions, state = half.open(config, state, [0, 1, 2])
    sent = [encode("identity", torch.full((4,), value), buffers) for value in (1.0, 2.0)]
    update = {"update": encode("identity", torch.ones(D), LAYOUT)}
    replies = [answer(instructions[i], streams={**update, "buffers": sent[i]}) for i in (0, 1)]
    replies.append(answer(instructions[2], 9.0))
    state, closed = half.close(config, state, [0, 1, 2], replies)
    assert closed.accepted == [0, 1]
    assert closed.refused[2] == "WrongStreams: a reply from client 2 carries update; expected buffers, update"
    assert torch.equal(state.buffers, torch.full((4,), 1.5))
    instructions, _ = half.open(config, state, [0])
    assert len(instructions[0].streams["buffers"]) > 16


@pytest.mark.parametrize("in_order", [False, True])
def test_a_bound_on_the_norm(in_order: bool) -> None:
    config, state, instructions = opened(max_norm=20.0)
    replies = [answer(instructions[0], 1.0), answer(instructions[1], 1e6), answer(instructions[2], 2.0)]
    state, closed = half.close(config, state, [0, 1, 2], replies, in_order)
    assert closed.accepted == [0, 2]
    assert closed.refused[1].startswith("UpdateError: an update of norm 7.74597e+06; at most max_norm=20")
    assert torch.equal(state.x, torch.full((D,), 1.5))
    with pytest.raises(SpecError, match="max_norm=0"):
        opened(max_norm=0)


@pytest.mark.parametrize(("value", "reason"), [(3e38, "the mean of the updates is not finite"), (1e30, "norm inf")])
@pytest.mark.parametrize("in_order", [False, True])
def test_updates_that_overflow_together_change_nothing(in_order: bool, value: float, reason: str) -> None:
    config, state, instructions = opened()
    replies = [answer(instructions[i], value) for i in (0, 1)]
    state, closed = half.close(config, state, [0, 1], replies, in_order)
    assert closed.accepted == []
    assert all(reason in closed.refused[i] for i in (0, 1))
    assert torch.equal(state.x, torch.zeros(D))
    assert state.accepted == {}


# -- what the client keeps ---------------------------------------------------------------------------------------------


def test_only_a_named_acceptance_commits_the_residual() -> None:
    store = ResidualStore.in_memory(LAYOUT)
    me = Client(ErrorFeedback("sign", store))
    _, _, instructions = opened()
    reply, pending = client.reply(me, instructions[0], train)
    following = dataclasses.replace(instructions[0], round=2)
    for accepted in (None, Accepted(1, bytes(16)), Accepted(0, reply.digest)):
        assert not client.settle(me, reply, pending, dataclasses.replace(following, accepted=accepted))
        assert store.ids() == []
    assert client.settle(me, reply, pending, dataclasses.replace(following, accepted=Accepted(1, reply.digest)))
    assert store.round_of(0) == 1
