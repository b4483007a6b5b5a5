"""Compressed buffers: a stream of their own, both ways, whose variances never fall below zero."""

from __future__ import annotations

import torch

from fedcams import Layout, Method
from fedcams.layout import floor_variances_
from fedcams.rounds import Client, ClientUpdate, Instruction, Received, Server
from fedcams.rounds import client as client_side
from fedcams.rounds import server as server_side

LAYOUT = Layout(("w",), ((6,),))
BUFFERS = Layout(("norm.running_mean", "norm.running_var", "running_variety"), ((2,), (3,), (1,)))


def test_only_variances_are_floored_and_zeros_are_positive() -> None:
    rows = torch.tensor([[-1.0, 2.0, -3.0, -0.0, 4.0, -5.0], [1.0, -2.0, 3.0, float("nan"), -1e-30, -0.0]])
    floored = floor_variances_(rows.clone(), BUFFERS)
    expected = torch.tensor([[-1.0, 2.0, 0.0, 0.0, 4.0, -5.0], [1.0, -2.0, 3.0, float("nan"), 0.0, -0.0]])
    assert torch.equal(floored.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(floor_variances_(rows[0].clone(), BUFFERS), expected[0])


def test_a_variance_that_compression_brings_below_zero_is_zero_at_the_server() -> None:
    """All of one magnitude: sign takes 1 from the small variance too."""
    before, after = torch.tensor([0.0, 0.0, 4.0, 0.25, 4.0, 0.0]), torch.tensor([-1.0, -1.0, 3.0, 0.0, 2.75, -1.0])
    server = Server(Method(server="fedavg", buffers="sign"), LAYOUT, BUFFERS)
    state = server_side.start(server, torch.zeros(6), before.clone())
    instructions, state = server_side.instruct(server, state, [0])
    me = Client(server.method, LAYOUT, BUFFERS)

    def train(received: Received, asked: Instruction, *_: object) -> ClientUpdate:
        return ClientUpdate(torch.ones(6), after.clone(), examples=1, steps=1, loss=0.0)

    reply, _ = client_side.answer(me, instructions[0], train)
    state, _ = server_side.conclude(server, state, server_side.take_answers(server, state, [0], [reply]))
    magnitude = float((after - before).abs().mean())
    assert magnitude > before[3]
    assert state.buffers is not None
    assert torch.equal(state.buffers, floor_variances_(before - magnitude, BUFFERS))
    assert state.buffers[3] == 0
