"""The two sides of a round: over real bytes they run the paper's algorithm, and invalid messages are refused."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from fedcams import Layout, Method, SpecError, encode
from fedcams.rounds import (
    Accepted,
    Client,
    ClientUpdate,
    Concluded,
    Instruction,
    Outgoing,
    Received,
    Reply,
    Server,
    ServerState,
)
from fedcams.rounds import client as client_side
from fedcams.rounds import server as server_side

CLIENTS, D, ROUNDS = 8, 60, 30
GRADIENT = oracle.quadratic(CLIENTS, D)
COHORTS = [sorted(np.random.default_rng(t).choice(CLIENTS, 3, replace=False).tolist()) for t in range(ROUNDS)]
LAYOUT = Layout(("w", "b"), ((5, 10), (10,)))


def train(received: Received, instruction: Instruction, shift: Tensor | None, rate: float) -> ClientUpdate:
    """Five local gradient steps in float64 on the client's quadratic."""
    start = received.start.double().numpy()
    w = start
    for _ in range(5):
        w = w - 0.05 * GRADIENT(instruction.client, w)
    return ClientUpdate(torch.from_numpy(w - start).float(), received.buffers, examples=10, steps=5, loss=0.5)


def federate(uplink: str, optimizer: str, cohorts: list[list[int]] = COHORTS) -> list[Tensor]:
    """Every message crosses as bytes; commits follow what the next instruction names."""
    method = Method(server=optimizer, uplink=uplink)
    server = Server(method, LAYOUT)
    state = server_side.start(server, torch.zeros(D))
    clients = {i: Client(method, LAYOUT) for i in range(CLIENTS)}
    waiting: dict[int, tuple[Reply, Outgoing]] = {}
    xs = []
    for cohort in cohorts:
        instructions, state = server_side.instruct(server, state, cohort)
        replies = []
        for i in cohort:
            instruction = Instruction.from_bytes(instructions[i].to_bytes())
            if i in waiting:
                sent, outgoing = waiting.pop(i)
                assert client_side.is_accepted(sent, instruction)
                client_side.commit(clients[i], outgoing, [i])
            reply, made = client_side.answer(clients[i], instruction, train)
            assert isinstance(reply, Reply)
            assert made is not None
            waiting[i] = (reply, made)
            replies.append(Reply.from_bytes(reply.to_bytes()))
        state, concluded = conclude(server, state, cohort, replies[::-1])
        assert concluded.accepted == cohort
        assert not concluded.refused
        xs.append(state.x.clone())
    return xs


def conclude(
    server: Server, state: ServerState, cohort: list[int], replies: list[Reply], in_order: bool = False
) -> tuple[ServerState, Concluded]:
    return server_side.conclude_(server, state, server_side.take_answers(server, state, cohort, replies, in_order))


@pytest.mark.parametrize(
    ("uplink", "compress"),
    [
        ("identity", None),
        ("sign", oracle.scaled_sign),
        ("topk(ratio=0.1)", partial(oracle.topk, ratio="1/10")),
        ("ternary(ratio=0.1)", partial(oracle.ternary, ratio="1/10", sizes=LAYOUT.sizes)),
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


def opened(**parts: object) -> tuple[Server, ServerState, dict[int, Instruction]]:
    server = Server(Method(server="fedavg", **parts), LAYOUT)  # type: ignore[arg-type]
    instructions, state = server_side.instruct(server, server_side.start(server, torch.zeros(D)), [0, 1, 2])
    return server, state, instructions


def answer(instruction: Instruction, value: float = 1.0, **changes: object) -> Reply:
    streams = {"update": encode("identity", torch.full((D,), value), LAYOUT)}
    reply = Reply(instruction.round, instruction.client, streams, examples=10, steps=5, loss=0.5)
    return dataclasses.replace(reply, **changes)  # type: ignore[arg-type]


def test_bad_replies_are_refused_with_the_reason_and_the_round_goes_on() -> None:
    server, state, instructions = opened()
    good = answer(instructions[0], 2.0)
    replies = [
        answer(instructions[1], streams={"update": good.streams["update"][:-3]}),
        answer(instructions[2], round=7),
        good,
        answer(instructions[0], client=9),
    ]
    state, concluded = conclude(server, state, [0, 1, 2], replies)
    assert concluded.accepted == [0]
    assert concluded.refused[1].startswith("ChecksumMismatch")
    assert concluded.refused[2] == "UpdateError: an update for round 7 in round 1; it came too late or too early"
    assert "client 9 was not selected" in concluded.refused[9]
    assert torch.equal(state.x, torch.full((D,), 2.0))
    assert state.accepted == {0: Accepted(1, good.digest)}
    assert concluded.delta_norm == pytest.approx(2.0 * D**0.5)


def test_a_reply_sent_twice_counts_once() -> None:
    server, state, instructions = opened()
    state, concluded = conclude(
        server, state, [0, 1], [answer(instructions[0], 2.0)] * 2 + [answer(instructions[1], 4.0)]
    )
    assert concluded.accepted == [0, 1]
    assert "already" in concluded.refused[0]
    assert torch.equal(state.x, torch.full((D,), 3.0))


def test_a_round_without_replies_makes_no_step_and_is_counted() -> None:
    server, state, instructions = opened()
    state, concluded = conclude(server, state, [0, 1], [answer(instructions[0], streams={"update": b""})])
    assert concluded.accepted == []
    assert concluded.delta_norm == 0
    assert state.round == 1
    assert torch.equal(state.x, torch.zeros(D))
    assert state.optimizer.t == 0


def test_weighting_by_examples() -> None:
    server, state, instructions = opened(weighting="examples")
    replies = [answer(instructions[0], 1.0, examples=30), answer(instructions[1], 5.0, examples=10)]
    none = answer(instructions[2], 100.0, examples=0)
    state, concluded = conclude(server, state, [0, 1, 2], [*replies, none])
    assert torch.equal(state.x, torch.full((D,), 2.0))
    assert "weight=0.0 by weighting=examples, examples=0" in concluded.refused[2]
    with pytest.raises(SpecError, match=r"method: weighting=median: .*allowed: uniform or examples or sampler"):
        Method(weighting="median")
    with pytest.raises(SpecError, match="seed=9223372036854775808; allowed: a signed 64-bit integer"):
        Server(Method(), LAYOUT, seed=2**63)


def test_control_variates_of_all_clients_count_equally_whatever_weights_their_updates() -> None:
    """Otherwise the server's variate would not be the mean of all clients' variates."""
    method = Method(server="fedavg", control="scaffold", weighting="examples", guard="none")
    server = Server(method, LAYOUT, population=8)
    instructions, state = server_side.instruct(server, server_side.start(server, torch.zeros(D)), [0, 1])
    replies = []
    for client, value, examples in ((0, 1.0, 30), (1, 5.0, 10)):
        row = encode("identity", torch.full((D,), value), LAYOUT)
        replies.append(answer(instructions[client], streams={"update": row, "control": row}, examples=examples))
    state, _ = conclude(server, state, [0, 1], replies)
    assert torch.equal(state.x, torch.full((D,), 2.0))
    assert torch.equal(state.control, torch.full((D,), 2 / 8 * 3.0))


def test_an_average_starts_with_the_first_step_even_if_rounds_were_skipped_before() -> None:
    server, state, instructions = opened(average="ema(0.9)")
    state, concluded = conclude(server, state, [0, 1], [])
    assert concluded.accepted == []
    instructions, state = server_side.instruct(server, state, [0])
    state, _ = conclude(server, state, [0], [answer(instructions[0], 2.0)])
    assert state.average is not None
    assert torch.equal(state.average.x, torch.full((D,), 2.0))


def test_buffers_are_averaged_and_never_stepped() -> None:
    buffers = Layout(("norm.mean",), ((4,),))
    server = Server(Method(server="fedams"), LAYOUT, buffers)
    state = server_side.start(server, torch.zeros(D), torch.zeros(4))
    instructions, state = server_side.instruct(server, state, [0, 1, 2])
    sent = [encode("identity", torch.full((4,), value), buffers) for value in (1.0, 2.0)]
    update = {"update": encode("identity", torch.ones(D), LAYOUT)}
    replies = [answer(instructions[i], streams={**update, "buffers": sent[i]}) for i in (0, 1)]
    replies.append(answer(instructions[2], 9.0))
    state, concluded = conclude(server, state, [0, 1, 2], replies)
    assert concluded.accepted == [0, 1]
    assert concluded.refused[2] == "WrongStreams: a reply from client 2 carries update; expected buffers, update"
    assert torch.equal(state.buffers, torch.full((4,), 1.5))
    instructions, _ = server_side.instruct(server, state, [0])
    assert len(instructions[0].streams["buffers"]) > 16


def test_a_robust_mean_combines_buffers_as_changes_of_those_that_were_sent() -> None:
    """Clipping shortens the change of the client that is far off, not its buffers."""
    buffers, old = Layout(("norm.mean",), ((4,),)), torch.full((4,), 100.0)
    server = Server(Method(server="fedavg", aggregate="clipped_mean", guard="none"), LAYOUT, buffers)
    state = server_side.start(server, torch.zeros(D), old.clone())
    instructions, state = server_side.instruct(server, state, [0, 1, 2])
    update, ones, far = encode("identity", torch.ones(D), LAYOUT), torch.ones(4), torch.tensor([10.0, 0, 0, 0])
    sent = [{"update": update, "buffers": encode("identity", old + change, buffers)} for change in (ones, ones, far)]
    replies = [answer(instructions[i], streams=streams) for i, streams in enumerate(sent)]
    state, concluded = conclude(server, state, [0, 1, 2], replies)
    assert concluded.accepted == [0, 1, 2]
    torch.testing.assert_close(state.buffers, old + (2 * ones + far / 5) / 3, rtol=1e-6, atol=0)


@pytest.mark.parametrize("in_order", [False, True])
def test_a_bound_on_the_norm(in_order: bool) -> None:
    server, state, instructions = opened(transforms="max_norm(20)")
    replies = [answer(instructions[0], 1.0), answer(instructions[1], 1e6), answer(instructions[2], 2.0)]
    state, concluded = conclude(server, state, [0, 1, 2], replies, in_order)
    assert concluded.accepted == [0, 2]
    assert concluded.refused[1].startswith("UpdateError: an update of norm 7.74597e+06; at most max_norm=20")
    assert torch.equal(state.x, torch.full((D,), 1.5))
    with pytest.raises(SpecError, match="max_norm: bound=0"):
        opened(transforms="max_norm(0)")


@pytest.mark.parametrize(("value", "reason"), [(3e38, "the mean of the updates is not finite"), (1e30, "norm inf")])
@pytest.mark.parametrize("in_order", [False, True])
def test_updates_that_overflow_together_change_nothing(in_order: bool, value: float, reason: str) -> None:
    server, state, instructions = opened()
    replies = [answer(instructions[i], value) for i in (0, 1)]
    state, concluded = conclude(server, state, [0, 1], replies, in_order)
    assert concluded.accepted == []
    assert all(reason in concluded.refused[i] for i in (0, 1))
    assert torch.equal(state.x, torch.zeros(D))
    assert state.accepted == {}
    assert concluded.facts.ids == ()
    assert concluded.skipped == ""


def test_too_few_replies_are_counted_once() -> None:
    """The sentence counts the replies, also if somebody has asked for the means before."""
    server, state, instructions = opened(min_replies=3)
    intake = server_side.take_answers(server, state, [0, 1, 2], [answer(instructions[i]) for i in (0, 1)])
    assert intake.means is None
    _, concluded = server_side.conclude_(server, state, intake)
    assert concluded.skipped == "2 valid replies, min_replies=3"
    assert concluded.refused == dict.fromkeys((0, 1), f"UpdateError: {concluded.skipped}")


# -- what the client keeps ---------------------------------------------------------------------------------------------


def test_only_a_named_acceptance_counts() -> None:
    me = Client(Method(uplink="sign"), LAYOUT)
    assert me.rows is not None
    _, _, instructions = opened()
    reply, outgoing = client_side.answer(me, instructions[0], train)
    assert isinstance(reply, Reply)
    assert outgoing is not None
    following = dataclasses.replace(instructions[0], round=2)
    for accepted in (None, Accepted(1, bytes(16)), Accepted(0, reply.digest)):
        assert not client_side.is_accepted(reply, dataclasses.replace(following, accepted=accepted))
    client_side.commit(me, outgoing, [1, 2])
    assert me.rows.ids() == []
    assert client_side.is_accepted(reply, dataclasses.replace(following, accepted=Accepted(1, reply.digest)))
    client_side.commit(me, outgoing, [0])
    assert me.rows.round_of(0) == 1
