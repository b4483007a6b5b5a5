"""Compressed buffers: a stream of their own, both ways, whose variances never fall below zero."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcams import (
    HeldStore,
    Layout,
    LayoutError,
    Method,
    RowStore,
    SpecError,
    WireError,
    compressor,
    decode,
    encode,
)
from fedcams.downlink import ROWS, Broadcast, Held, Part, downlink
from fedcams.downlink.message import SET, Message, digest_of
from fedcams.layout import floor_variances_
from fedcams.rounds import Client, ClientUpdate, Instruction, Received, Refusal, Reply, Server, answer_from_bytes
from fedcams.rounds import client as client_side
from fedcams.rounds import server as server_side
from fedcams.wire import unpack

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


# -- both ways ---------------------------------------------------------------------------------------------------------

DOWNLINKS = ["none", "stateless", "shared(sign)", "shared(topk(k=2), warm=true)", "replica(sign)", "replica(topk(k=2))"]
CODECS = ["blockq(bits=2, block=8)", "topk(k=2)", "sign"]
WIDE = Layout(("norm.running_mean", "norm.running_var", "other"), ((2,), (93,), (1,)))
VARIANCES = slice(2, 95)
START = torch.cat([torch.tensor([0.5, -0.5]), torch.linspace(0, 2, 93), torch.tensor([-1.0])])


class Federation:
    """Three clients that see other statistics each, and a server; every message crosses as bytes."""

    def __init__(self, **parts: Any) -> None:
        self.server = Server(Method(server="fedavg", **parts), LAYOUT, WIDE, seed=5)
        method = self.server.method
        self.state = server_side.start(self.server, torch.zeros(6), START.clone())
        self.held = HeldStore.in_memory(LAYOUT, method.delivered(LAYOUT, WIDE).get("buffers"))
        if method.downlink.starts_warm:
            for i in range(3):
                self.held.start(i, torch.zeros(6), START)
        self.client = Client(method, LAYOUT, WIDE, held=self.held)
        self.received, self.after, self.decoded = (dict[int, Tensor]() for _ in range(3))

    def round(self, cohort: list[int]) -> dict[int, Instruction]:
        """One round; what these clients received, had after training and sent is kept by client."""
        instructions, self.state = server_side.instruct(self.server, self.state, cohort)
        asked = {i: Instruction.from_bytes(instruction.to_bytes()) for i, instruction in instructions.items()}
        made = [client_side.answer(self.client, asked[i], self.train) for i in cohort]
        replies = [answer_from_bytes(reply.to_bytes()) for reply, _ in made]
        intake = server_side.take_answers(self.server, self.state, cohort, replies)
        self.state, concluded = server_side.conclude(self.server, self.state, intake)
        assert concluded.accepted == cohort
        for reply, (_, outgoing) in zip(replies, made, strict=True):
            assert isinstance(reply, Reply)
            assert outgoing is not None
            self.decoded[reply.client] = decode(reply.streams["buffers"], WIDE)
            client_side.commit(self.client, outgoing, concluded.accepted)
        return asked

    def train(self, received: Received, asked: Instruction, *_: object) -> ClientUpdate:
        """Variances go to nearly zero, from which compressed changes would bring them below."""
        assert received.buffers is not None
        assert bool((received.buffers[VARIANCES] >= 0).all())
        draw = torch.Generator().manual_seed(asked.round * 10 + asked.client)
        target = torch.cat([torch.randn(2, generator=draw), 0.02 * torch.rand(94, generator=draw)])
        self.received[asked.client] = received.buffers.clone()
        self.after[asked.client] = 0.3 * received.buffers + 0.7 * target
        return ClientUpdate(torch.ones(6), self.after[asked.client].clone(), examples=1, steps=1, loss=0.0)

    @property
    def buffers(self) -> Tensor:
        assert self.state.buffers is not None
        return self.state.buffers


@pytest.mark.parametrize("downlink", DOWNLINKS)
@pytest.mark.parametrize("codec", CODECS)
def test_what_arrived_and_the_residual_are_all_changes_and_the_server_adds_them_to_what_it_sent(
    downlink: str, codec: str
) -> None:
    world = Federation(downlink=downlink, buffers=codec)
    changes, arrived = torch.zeros(3, WIDE.d).double(), torch.zeros(3, WIDE.d).double()
    floored = 0
    for t in range(12):
        cohort = [i for i in range(3) if (t + i) % 3]
        world.round(cohort)
        own = torch.stack([world.received[i] + world.decoded[i] for i in cohort]).double().mean(0)
        floored += int((own[VARIANCES] < 0).sum())
        assert torch.allclose(world.buffers.double(), floor_variances_(own, WIDE), atol=1e-5)
        for i in cohort:
            changes[i] += world.after[i].double() - world.received[i].double()
            arrived[i] += world.decoded[i].double()
        assert world.client.rows is not None
        residuals = world.client.rows.gather("buffers", range(3)).double()
        assert torch.allclose(arrived + residuals, changes, atol=1e-5)
    assert floored, "compression would have brought a variance below zero"


@pytest.mark.parametrize("downlink", [spec for spec in DOWNLINKS if spec.startswith(("shared", "replica"))])
@pytest.mark.parametrize("codec", CODECS)
def test_what_a_client_holds_moves_by_what_was_sent_alone(downlink: str, codec: str) -> None:
    """The new buffers are the old ones plus the decoded deltas, floored; the server has them bit for bit."""
    world = Federation(downlink=downlink, buffers=codec)
    before: dict[int, Tensor] = dict.fromkeys(range(3), START) if world.server.method.downlink.starts_warm else {}
    floored, most = 0, 0
    for t in range(12):
        cohort = [0, 1] if t % 4 else [0, 1, 2]
        for i, asked in world.round(cohort).items():
            message = Message.from_bytes(asked.streams["buffers"])
            assert message.result == Message.from_bytes(asked.streams["model"]).result
            expected = before[i].double() if message.base is not None else torch.zeros(WIDE.d).double()
            for payload in message.payloads:
                expected = moved(expected, payload, message.kind)
                floored += int((expected[VARIANCES] < 0).sum())
                floor_variances_(expected, WIDE)
            most = max(most, len(message.payloads))
            assert torch.allclose(world.received[i].double(), expected, atol=1e-5)
            before[i] = world.received[i]
            if world.server.replicas is not None:
                assert torch.equal(world.server.replicas.gather(ROWS["buffers"], [i])[0], world.received[i])
    assert floored or codec == "topk(k=2)"
    assert most > 1 or downlink.startswith("replica") or codec == "topk(k=2)", "client 2 missed deltas and caught up"


def moved(held: Tensor, payload: bytes, kind: int) -> Tensor:
    """What a payload makes of what is held."""
    if kind != SET:
        return held + decode(payload, WIDE)
    code = unpack(payload, WIDE).code
    return held.index_copy(0, code["position"], code["value"].double())


def test_buffers_that_rest_are_reached() -> None:
    """Once the server's buffers rest, clients come to hold them, however little a message carries."""
    for spec in ("shared(sign)", "replica(sign)"):
        one = downlink(spec)
        rows = RowStore.in_memory({ROWS["model"]: LAYOUT, ROWS["buffers"]: WIDE}) if "replica" in spec else None
        target = Part("buffers", START + 0.25, WIDE, compressor("topk(k=1)"))
        state = one.init(torch.zeros(6), target._replace(values=START))
        for t in range(1, 99):
            delivery = one.deliver(state, Broadcast(torch.zeros(6), LAYOUT, t, 0, rows, target), [0])
            state = delivery.state
        assert delivery.buffers is not None
        assert torch.allclose(delivery.buffers.reshape(-1), target.values, atol=1e-6)


# -- what travels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "carried"),
    [
        ({"downlink": "replica(sign)", "buffers": "identity"}, False),
        ({"downlink": "none", "buffers": "blockq"}, False),
        ({"downlink": "replica(sign)", "buffers": "blockq"}, True),
        ({"downlink": "stateless", "buffers": "blockq"}, False),
        ({"downlink": "shared(sign)", "buffers": "blockq"}, True),
    ],
)
def test_buffers_go_dense_unless_the_method_compresses_them_and_the_model(parts: dict[str, str], carried: bool) -> None:
    server = Server(Method(**parts), LAYOUT, WIDE)
    assert ("buffers" in server.method.delivered(LAYOUT, WIDE)) == carried
    state = server_side.start(server, torch.zeros(6), START.clone())
    sent = server_side.instruct(server, state, [0])[0][0].streams["buffers"]
    assert (sent == encode("identity", START, WIDE)) != carried


def test_a_codec_without_a_bound_would_let_the_clients_buffers_drift() -> None:
    parts = {"feedback": False, "buffers": "blockq(rounding=stochastic)"}
    assert Method(downlink="stateless", **parts).buffers.unbiased
    with pytest.raises(SpecError, match=r"downlink=replica\(sign\), buffers=blockq.* has no bound on its error"):
        Method(downlink="replica(sign)", **parts)


def test_messages_that_do_not_belong_together_are_refused() -> None:
    world = Federation(downlink="replica(sign)", buffers="sign")
    world.round([0, 1])
    one = world.round([0, 1])
    two, _ = server_side.instruct(world.server, world.state, [0])
    mixed = dataclasses.replace(two[0], streams={**two[0].streams, "buffers": one[0].streams["buffers"]})
    with pytest.raises(WireError, match="the messages of model and buffers build on, or lead to, different models"):
        client_side.answer(world.client, mixed, world.train)


@pytest.mark.parametrize("part", ["model", "buffers"])
def test_damage_of_either_is_noticed_and_the_dense_ones_put_it_right(part: str) -> None:
    world = Federation(downlink="replica(sign)", buffers="sign")
    for _ in range(2):
        world.round([0, 1])
    world.held.vectors(0)[part][1] += 1.0
    asked, world.state = server_side.instruct(world.server, world.state, [0])
    refusal, _ = client_side.answer(world.client, asked[0], world.train)
    assert isinstance(refusal, Refusal)
    assert "applied to what is held, the message does not give version" in refusal.reason
    again, world.state = server_side.resend(world.server, world.state, refusal)
    assert all(Message.from_bytes(again.streams[name]).base is None for name in ("model", "buffers"))
    reply, _ = client_side.answer(world.client, again, world.train)
    assert isinstance(reply, Reply)


# -- on disk -----------------------------------------------------------------------------------------------------------


def test_a_folder_keeps_both_or_counts_as_empty(tmp_path: Path) -> None:
    store = HeldStore.on_disk(LAYOUT, tmp_path, WIDE)
    with pytest.raises(LayoutError, match="got model; this store keeps model and buffers"):
        store.start(3, torch.zeros(6))
    store.start(3, torch.arange(6.0), START)
    again = HeldStore.on_disk(LAYOUT, tmp_path, WIDE)
    assert again.held(3) == Held(0, digest_of(torch.arange(6.0), START))
    assert torch.equal(again.vectors(3)["buffers"], START)
    assert torch.equal(again.model(3), torch.arange(6.0))
    assert HeldStore.on_disk(LAYOUT, tmp_path).held(3) is None, "without buffers it is another model"
    messages = {name: Message(1, Held(0, bytes(16)), Held(1, bytes(16)), [b"payload"]) for name in ("model", "buffers")}
    store.stage(3, messages)
    assert again.staged(3) == messages
    whole = (tmp_path / "3.staged").read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole + whole):
        (tmp_path / "3.staged").write_bytes(damaged)
        assert again.staged(3) is None
    whole = (tmp_path / "3.held").read_bytes()
    for damaged in (whole[:-24], whole[:-1], whole + b"x"):
        (tmp_path / "3.held").write_bytes(damaged)
        assert again.held(3) is None
