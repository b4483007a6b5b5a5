"""Compressed buffers: a separate stream in both directions, whose variances never fall below zero."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
from fedcams.buffers import add_change, change_between
from fedcams.downlink import ROWS, Broadcast, Held, Part, downlink
from fedcams.downlink.message import ADD, DENSE, Message, base_of, digest_of
from fedcams.engines import CohortUpdate
from fedcams.rounds import Client, ClientUpdate, Instruction, Received, Refusal, Reply, Server, answer_from_bytes
from fedcams.rounds import client as client_side
from fedcams.rounds import server as server_side
from fedcams.wire import unpack

LAYOUT = Layout(("w",), ((6,),))
BUFFERS = Layout(("norm.running_mean", "norm.running_var", "running_variety"), ((2,), (3,), (1,)))


# -- units -------------------------------------------------------------------------------------------------------------

VALUES = st.floats(0, 1e6, width=32) | st.sampled_from([0.0, 1e-30, 1e-12, 1e-5, 1.0, 3e38])


@given(st.lists(VALUES, min_size=12, max_size=12))
def test_a_change_leads_from_one_to_the_other(values: list[float]) -> None:
    """To float accuracy, which for a mean is that of the standard deviation, and below EPS that of EPS."""
    before, after = torch.tensor(values).view(2, 6)
    reached = add_change(before, change_between(before, after, BUFFERS), BUFFERS)
    assert torch.allclose(reached[2:5], after[2:5], rtol=1e-5, atol=1e-10)
    assert torch.allclose(reached, after, rtol=1e-5, atol=1e-5 * float(before.abs().max() + after.abs().max() + 1))
    still = add_change(before, torch.zeros(6), BUFFERS)
    assert torch.equal(still, before)


@given(st.lists(st.floats(-300, 300, width=32), min_size=24, max_size=24), st.lists(VALUES, min_size=24, max_size=24))
def test_no_change_makes_a_variance_negative_and_rows_change_as_they_do_alone(
    changes: list[float], values: list[float]
) -> None:
    before, change = torch.tensor(values).view(4, 6), torch.tensor(changes).view(4, 6)
    after = add_change(before, change, BUFFERS)
    assert bool((after[:, 2:5] >= 0).all())
    assert bool(torch.isfinite(after[:, 2:5]).all())
    alone = torch.stack([add_change(*row, BUFFERS) for row in zip(before, change, strict=True)])
    assert torch.equal(after.view(torch.int32), alone.view(torch.int32))


@pytest.mark.parametrize("octaves", [300.0, 1e12, 3e38])
def test_a_change_beyond_all_floats_leads_to_the_last_one(octaves: float) -> None:
    """Whatever a processor makes of integers that are too large."""
    before = torch.ones(6)
    change = torch.tensor([0.0, 0.0, octaves, -octaves, 0.0, 0.0])
    after = add_change(before, change, BUFFERS)
    assert after.tolist() == [1.0, 1.0, torch.finfo(torch.float32).max, 0.0, 1.0, 1.0]


def test_units_are_relative_for_statistics_alone() -> None:
    """An octave of a variance is 1, a standard deviation of a mean is 1; other buffers are as they are."""
    before, after = torch.tensor([1.0, 2.0, 4.0, 0.0, 16.0, 5.0]), torch.tensor([3.0, 1.0, 8.0, 1e-5, 4.0, 7.0])
    change = change_between(before, after, Layout(BUFFERS.names, ((3,), (2,), (1,))))
    assert torch.equal(change[:3], after[:3] - before[:3]), "with another number of variances a mean has no unit"
    change = change_between(
        before, after, Layout(("a.running_var", "b.running_var", "c.running_mean"), ((3,), (2,), (1,)))
    )
    assert torch.allclose(change, torch.tensor([1.5, -1.0, 1.0, 1.0, -2.0, 2.0]), atol=1e-4)
    before, after = torch.tensor([1.0, 2.0, 4.0, 9.0, 1.0, 5.0]), torch.tensor([3.0, 5.0, 4.0, 9.0, 1.0, 7.0])
    change = change_between(before, after, Layout(("running_mean", "running_var", "w"), ((2,), (2,), (2,))))
    assert torch.allclose(change, torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 2.0]), atol=1e-5)


def test_a_small_variance_among_large_ones_survives_few_bits() -> None:
    """In plain differences, the error of the block would be a hundred times the small variance."""
    layout = Layout(("norm.running_var",), ((16,),))
    before = torch.full((16,), 10.0).index_fill(0, torch.tensor([3]), 1e-3)
    after = before * torch.linspace(0.5, 2, 16)
    codec = compressor("blockq(bits=4, block=16)")
    code = codec.encode(change_between(before, after, layout), layout)
    reached = add_change(before, codec.decode(code, layout), layout)
    assert torch.allclose(reached, after, rtol=0.11)


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
        self.state, concluded = server_side.conclude_(self.server, self.state, intake)
        assert concluded.accepted == cohort, concluded.refused
        for reply, (_, outgoing) in zip(replies, made, strict=True):
            assert isinstance(reply, Reply)
            assert outgoing is not None
            self.decoded[reply.client] = decode(reply.streams["buffers"], WIDE)
            client_side.commit(self.client, outgoing, concluded.accepted)
        return asked

    def train(self, received: Received, asked: Instruction, *_: object) -> ClientUpdate:
        """Variances go to nearly zero, some of them fast."""
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
    for t in range(6):
        cohort = [i for i in range(3) if (t + i) % 3]
        world.round(cohort)
        own = torch.stack([add_change(world.received[i], world.decoded[i], WIDE) for i in cohort])
        assert torch.allclose(world.buffers, own.mean(0), rtol=1e-5, atol=1e-6)
        for i in cohort:
            changes[i] += change_between(world.received[i], world.after[i], WIDE).double()
            arrived[i] += world.decoded[i].double()
        assert world.client.rows is not None
        residuals = world.client.rows.gather("buffers", range(3)).double()
        assert torch.allclose(arrived + residuals, changes, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("downlink", [spec for spec in DOWNLINKS if spec.startswith(("shared", "replica"))])
@pytest.mark.parametrize("codec", CODECS)
def test_what_a_client_holds_moves_by_what_was_sent_alone(downlink: str, codec: str) -> None:
    """The new buffers are the old ones moved by the decoded deltas; the server has them bit for bit."""
    world = Federation(downlink=downlink, buffers=codec)
    before: dict[int, Tensor] = dict.fromkeys(range(3), START) if world.server.method.downlink.starts_warm else {}
    most = 0
    for t in range(6):
        cohort = [0, 1] if t % 4 else [0, 1, 2]
        for i, asked in world.round(cohort).items():
            message = Message.from_bytes(asked.streams["buffers"])
            assert message.result == Message.from_bytes(asked.streams["model"]).result
            expected = before[i] if message.base is not None else torch.zeros(WIDE.d)
            for payload in message.payloads:
                expected = moved(expected, payload, message.kind)
            most = max(most, len(message.payloads))
            assert torch.equal(world.received[i], expected)
            before[i] = world.received[i]
            if world.server.replicas is not None:
                assert torch.equal(world.server.replicas.gather(ROWS["buffers"], [i])[0], world.received[i])
    assert most > 1 or downlink.startswith("replica") or codec == "topk(k=2)", "client 2 missed deltas and caught up"


def moved(held: Tensor, payload: bytes, kind: int) -> Tensor:
    """What a payload makes of what is held."""
    if kind == DENSE:
        return decode(payload, WIDE)
    if kind == ADD:
        return add_change(held, decode(payload, WIDE), WIDE)
    code = unpack(payload, WIDE).code
    return held.index_copy(0, code["position"], code["value"])


def test_buffers_that_rest_are_reached() -> None:
    """Once the server's buffers rest, clients come to hold them, however little a message carries."""
    for spec in ("shared(sign)", "replica(sign)"):
        one = downlink(spec)
        rows = RowStore.in_memory({ROWS["model"]: LAYOUT, ROWS["buffers"]: WIDE}) if "replica" in spec else None
        target = Part("buffers", START + 0.25, WIDE, compressor("topk(k=1)"))
        state = one.init(torch.zeros(6), target._replace(values=START))
        for t in range(1, 299):
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


def test_a_change_that_overflows_is_refused_and_the_other_clients_count() -> None:
    norm = Layout(("norm.running_mean", "norm.running_var"), ((2,), (2,)))
    server = Server(Method(server="fedavg", buffers="blockq", guard="none"), LAYOUT, norm)
    state = server_side.start(server, torch.zeros(6), torch.tensor([0.0, 0.0, 4.0, 4.0]))
    update = encode("identity", torch.ones(6), LAYOUT)
    replies = [
        Reply(1, i, {"update": update, "buffers": encode("blockq", torch.full((4,), size), norm)}, 1, 1, 0.0)
        for i, size in enumerate([3e38, 1.0])
    ]
    intake = server_side.take_answers(server, state, [0, 1], replies)
    state, concluded = server_side.conclude_(server, state, intake)
    assert concluded.accepted == [1]
    assert "not finite: 'norm.running_mean' has 2 of 2 values" in concluded.refused[0]
    assert state.buffers is not None
    assert torch.allclose(state.buffers, torch.tensor([2.0, 2.0, 8.0, 8.0]), rtol=1e-4)


def test_buffers_whose_change_overflows_are_refused_by_their_client_and_the_others_are_sent() -> None:
    """Both clients' buffers are finite, but not the change of a mean in units of a variance of zero."""
    norm = Layout(("norm.running_mean", "norm.running_var"), ((2,), (2,)))
    client = Client(Method(server="fedavg", buffers="blockq"), LAYOUT, norm)
    before, after = torch.zeros(4), torch.tensor([[3e38, 0.0, 1.0, 1.0], [1.0, 2.0, 1.0, 1.0]])
    trained = CohortUpdate(torch.ones(2, 6), after, torch.zeros(2, dtype=torch.float64), [1, 1], [1, 1], 0.1)
    outgoing = client_side.respond_(client, [4, 7], Received(torch.zeros(6), before), trained, round=1, seed=0)
    assert outgoing.arrival.facts.ids == (7,)
    assert outgoing.refused.keys() == {4}
    assert "not finite: 'norm.running_mean' has 1 of 2 values" in outgoing.refused[4]


def test_messages_that_do_not_belong_together_are_refused() -> None:
    world = Federation(downlink="replica(sign)", buffers="sign")
    world.round([0, 1])
    one = world.round([0, 1])
    two, _ = server_side.instruct(world.server, world.state, [0])
    mixed = dataclasses.replace(two[0], streams={**two[0].streams, "buffers": one[0].streams["buffers"]})
    with pytest.raises(WireError, match="the messages of model and buffers build on, or lead to, different models"):
        client_side.answer(world.client, mixed, world.train)


@pytest.mark.parametrize("other", [{"base": Held(1, bytes(16))}, {"result": Held(3, bytes(16))}])
def test_messages_that_name_different_bases_or_results_are_refused(other: dict[str, Held]) -> None:
    model = Message(ADD, Held(1, bytes(range(16))), Held(2, bytes(16)), [])
    assert base_of({"model": model, "buffers": model}) == model.base
    with pytest.raises(WireError, match="the messages of model and buffers build on, or lead to, different models"):
        base_of({"model": model, "buffers": dataclasses.replace(model, **other)})


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
