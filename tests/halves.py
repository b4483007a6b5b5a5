"""A small federation, run twice: by the simulator on the rows of a cohort, and client by client through bytes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import oracle
from fedcams import HeldStore, RowStore
from fedcams.engines import engine
from fedcams.own import History, simulate
from fedcams.rounds import ClientUpdate, Instruction, Received, answer_from_bytes
from fedcams.rounds import client as client_side
from fedcams.rounds import server as server_side
from fedcams.rounds.messages import instruction_size
from fedcams.rounds.private import draw_cohort, simulated_keys


def net(norm: bool = False) -> nn.Module:
    return copy.deepcopy(_net(norm))


@cache
def _net(norm: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(12) if norm else nn.Tanh()
        return nn.Sequential(nn.Linear(8, 12), middle, nn.Linear(12, 3))


def examples(n: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=draw)
    return x, (x[:, :3] * 2 + x[:, 3:6]).argmax(1)


CLIENTS = [examples(6 + 3 * i, i) for i in range(8)]
TEST = examples(200, 99)
KEEP_PAIRS = {"local": "sgd(lr=0.1, epochs=2, batch=8, drop_last=true)"}  # batch-norm cannot train on one example


def run(**options: Any) -> History:
    settings: dict[str, Any] = {"rounds": 6, "cohort": 3, "local": "sgd(lr=0.1, epochs=2, batch=8)"}
    model, clients = options.pop("model", net()), options.pop("clients", CLIENTS)
    return simulate(model, clients, options.pop("test", TEST), **{**settings, **options})


def through_bytes(history: History) -> Iterator[tuple[Any, Any, int, int]]:
    """The same run client by client: the state, how the round ended, bytes up and bytes down after each round."""
    simulation, state = history.simulation, history.state
    server, problem = simulation.server, simulation.problem
    kept = server.method.delivered(server.layout, server.buffer_layout).get("buffers")
    held = HeldStore.in_memory(server.layout, kept)
    if getattr(server.method.downlink, "warm", False):
        for i in problem.clients:
            held.start(i, state.x, None if kept is None else state.buffers)
    keys = simulated_keys(state.secret) if server.method.privacy.at_client else None
    me = dataclasses.replace(simulation.client, held=held, population=server.population, noise_keys=keys)

    def train(received: Received, asked: Instruction, shift: Tensor | None, rate: float) -> ClientUpdate:
        update = engine("loop").train(
            problem, received.start, received.buffers, [asked.client], asked.round, asked.seed,
            rate=rate, shift=None if shift is None else shift[None],
        )  # fmt: skip
        after = None if update.buffers is None else update.buffers[0]
        return ClientUpdate(update.delta[0], after, update.examples[0], update.steps[0], float(update.loss[0]))

    for _ in range(history.rounds):
        cohort = draw_cohort(server, state, list(problem.clients))
        instructions, state = server_side.instruct(server, state, cohort)
        down = {i: instruction.to_bytes() for i, instruction in instructions.items()}
        answers = [client_side.answer(me, Instruction.from_bytes(down[i]), train) for i in reversed(cohort)]
        up = [message.to_bytes() for message, _ in answers]
        intake = server_side.take_answers(server, state, cohort, map(answer_from_bytes, up))
        state, concluded = server_side.conclude_(server, state, intake)
        for _, outgoing in answers:
            if outgoing is not None:
                client_side.commit(me, outgoing, concluded.accepted)
        yield state, concluded, sum(map(len, up)), sum(map(len, down.values()))


def assert_equal_rounds(batched: History, apart: History) -> None:
    """Both runs, round by round: the same model, buffers, control variates, averages, bytes, refusals and rows."""
    for record, (state, concluded, up, down) in zip(batched, through_bytes(apart), strict=True):
        ours = batched.state
        assert torch.equal(ours.x, state.x)
        averages = [(None, None) if a is None else a for a in (ours.average, state.average)]
        pairs = [(ours.buffers, state.buffers), (ours.control, state.control), *zip(*averages, strict=True)]
        for mine, theirs in pairs:
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)
        assert (record.wire_up, record.wire_down) == (up, down)
        assert dict(record.refused) == concluded.refused
        assert (record.delta_norm, record.train_loss) == (concluded.delta_norm, concluded.train_loss)
        parts = [record.wire_down_deltas, record.wire_down_catchup, record.wire_down_dense, record.wire_down_buffers]
        if state.control is None:
            assert sum(parts) + len(record.cohort) * instruction_size({"model": 0}) == down
    ours, theirs = batched.simulation, apart.simulation
    assert_equal_rows(ours.client.rows, theirs.client.rows)
    assert_equal_rows(ours.server.replicas, theirs.server.replicas)


def assert_equal_rows(mine: RowStore | None, theirs: RowStore | None) -> None:
    if mine is None or theirs is None:
        assert mine is theirs
        return
    assert mine.ids() == theirs.ids()
    for name in mine.layouts:
        assert torch.equal(mine.gather(name, mine.ids()), theirs.gather(name, mine.ids())), name
    assert [mine.round_of(i) for i in mine.ids()] == [theirs.round_of(i) for i in mine.ids()]


class Point(nn.Module):
    """A bare vector of parameters."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), -1)


def quadratics(clients: int, d: int, sizes: Sequence[int] | None = None) -> dict[int, tuple[Tensor, Tensor]]:
    """The data of `oracle.quadratic`: every client has its own slope and place, as often as it has examples."""
    gradient = oracle.quadratic(clients, d)
    zero, one = (np.array([gradient(i, np.full(d, at)) for i in range(clients)]) for at in (0.0, 1.0))
    slope, place = one - zero, -zero / (one - zero)
    data = {}
    for i in range(clients):
        n = 1 if sizes is None else sizes[i]
        data[i] = torch.zeros(n, 1), torch.tensor(np.stack([slope[i], place[i]])).repeat(n, 1, 1)
    return data


def quadratic_loss(w: Tensor, y: Tensor) -> Tensor:
    """Of each example: half the squared distance from its place, times its slope."""
    return (y[:, 0] * (w - y[:, 1]).square()).sum(-1) / 2
