"""Downlinks: whatever happens to messages, clients or the server, no client trains from a wrong model unnoticed."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedcams import HeldStore, Layout, LayoutError, Method, RowStore, WireError, compressor, encode
from fedcams.downlink import REPLICA, ROWS, Broadcast, Downlink, Held, downlink
from fedcams.downlink.message import ADD, DENSE, SET, Message, digest_of, message_size
from fedcams.downlink.shared import Shared
from fedcams.errors import ResidualError
from fedcams.registry import registered
from fedcams.rounds import (
    Client,
    ClientUpdate,
    Concluded,
    Instruction,
    Received,
    Refusal,
    Reply,
    Server,
    ServerState,
    answer_from_bytes,
)
from fedcams.rounds import client as client_side
from fedcams.rounds import server as server_side
from fedcams.runs.state import pack, restore_
from fedcams.wire import unpack as unpack_payload
from forks import Forks

LAYOUT = Layout(("w", "b"), ((5, 10), (10,)))
BUFFERS = Layout(("norm.running_mean", "norm.running_var"), ((6,), (6,)))
D, CLIENTS = LAYOUT.d, 4
CODECS = [spec for cls in registered("compressor").values() for spec in cls.examples]
CONTRACTIVE = [spec for spec in CODECS if compressor(spec).squared_error_bound(Layout.flat(1)) is not None]
UNBIASED = [spec for spec in CODECS if compressor(spec).unbiased]
KEEPING = [
    f"{('shared', 'replica')[i % 2]}({codec}{', warm=true' * (i // 2 % 2)})" for i, codec in enumerate(CONTRACTIVE)
]
"""Every codec, in turn with one of both downlinks, cold and warm; `test_methods` has both with every codec."""
ALL = ["none", *KEEPING, *(f"stateless({codec})" for codec in UNBIASED)]
WITH_BUFFERS = [
    "shared(topk(ratio=0.1))",
    "shared(sign, warm=true)",
    "replica(blockq)",
    "replica(sign, warm=true)",
    "stateless",
]
WORLDS = [*((spec, "") for spec in ALL), *((spec, "blockq(bits=2, block=8)") for spec in WITH_BUFFERS)]
"""A downlink, and the codec of the buffers; the model has none if that is empty."""
KINDS = list({(*re.findall(r"\w+", spec)[:2], buffers): (spec, buffers) for spec, buffers in WORLDS}.values())
"""One of each downlink with each kind of codec: a codec's settings do not change what happens to messages."""
START = torch.randn(D, generator=torch.Generator().manual_seed(1))
START_BUFFERS = torch.cat([torch.zeros(6), torch.ones(6)])

FATES = (
    "fine",
    "instruction lost",
    "instruction twice",
    "killed while training",
    "reply lost",
    "reply twice",
    "reply late",
    "older instruction again",
    "disk lost",
)


@dataclass
class World:
    """A server, its clients and the network between them; every message crosses as bytes."""

    spec: str
    buffers: str = ""
    resends: bool = False
    concluded: Concluded | None = None
    trained: set[tuple[int, int, bytes]] = field(default_factory=set)
    late: list[bytes] = field(default_factory=list)
    last: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = BUFFERS if self.buffers else None
        self.method = Method(
            server="fedavg(lr=0.5)", downlink=self.spec, buffers=self.buffers or "identity", guard="none"
        )
        self.server = Server(self.method, LAYOUT, self.layout, seed=7)
        self.state = self.start()
        self.stores = {i: self.new_store(i) for i in range(CLIENTS)}
        self.save()

    def start(self) -> ServerState:
        return server_side.start(self.server, START.clone(), START_BUFFERS.clone() if self.buffers else None)

    def new_store(self, i: int) -> HeldStore:
        store = HeldStore.in_memory(LAYOUT, self.layout)
        if getattr(self.method.downlink, "warm", False):
            store.start(i, START, START_BUFFERS if self.buffers else None)
        return store

    # -- the server's disk ---------------------------------------------------------------------------------------

    def save(self) -> None:
        small, tensors = pack(self.state, self.server)
        self.saved = self.state.round, json.dumps(small), {name: t.clone() for name, t in tensors.items()}
        if self.server.replicas is not None:
            self.server.replicas.snapshot(self.state.round)

    def restart(self) -> None:
        """As after a kill: what happened since the checkpoint is gone."""
        round, small, tensors = self.saved
        self.state = restore_(round, json.loads(small), tensors, tensors.__getitem__, self.server, self.start())
        if self.server.replicas is not None:
            self.server.replicas.rollback(round)

    # -- a round -------------------------------------------------------------------------------------------------

    def round(self, fates: dict[int, str]) -> Concluded:
        instructions, self.state = server_side.instruct(self.server, self.state, fates)
        answers, self.late = self.late, []
        for i, fate in fates.items():
            answers += self.meet(i, instructions[i].to_bytes(), fate)
        self.conclude(list(fates), map(answer_from_bytes, answers))
        self.check()
        assert self.concluded is not None
        return self.concluded

    def conclude(self, cohort: list[int], answers: Iterable[Reply | Refusal]) -> Concluded:
        intake = server_side.take_answers(self.server, self.state, cohort, answers)
        self.state, self.concluded = server_side.conclude_(self.server, self.state, intake)
        return self.concluded

    def meet(self, i: int, sent: bytes, fate: str) -> list[bytes]:
        """What reaches the server of what this client answers."""
        if fate == "instruction lost":
            return []
        if fate == "disk lost":
            self.stores[i] = HeldStore.in_memory(LAYOUT, self.layout)
        if fate == "instruction twice":
            self.answer(i, sent)
        answer = self.answer(i, sent, killed=fate == "killed while training")
        before, self.last[i] = self.last.get(i), sent
        if fate == "older instruction again" and before is not None:
            return [answer, self.answer(i, before)]
        if fate == "reply late":
            self.late.append(answer)
        gone = ("killed while training", "reply lost", "reply late")
        return [] if fate in gone else [answer] * (2 if fate == "reply twice" else 1)

    def answer(self, i: int, sent: bytes, killed: bool = False, again: bool = False) -> bytes:
        """The client's half; one that refuses is, in some worlds, sent another instruction at once."""
        instruction = Instruction.from_bytes(sent)
        me = Client(self.method, LAYOUT, self.layout, held=self.stores[i])
        try:
            reply, _ = client_side.answer(
                me, instruction, lambda received, *_: self.train(received, instruction, killed)
            )
        except Killed:
            return b""
        if isinstance(reply, Refusal):
            assert Refusal.from_bytes(reply.to_bytes()) == reply
            if self.resends and instruction.round == self.state.round + 1:
                assert not again, "what is sent again fits"
                other, self.state = server_side.resend(self.server, self.state, reply)
                return self.answer(i, other.to_bytes(), killed, again=True)
            return reply.to_bytes()
        if reply.held is not None:
            assert (instruction.round, i, reply.held.digest) in self.trained, "it trained from what it names"
        return reply.to_bytes()

    def train(self, received: Received, instruction: Instruction, killed: bool) -> ClientUpdate:
        if killed:
            raise Killed
        parts = [part for part in (received.start, received.buffers) if part is not None]
        self.trained.add((instruction.round, instruction.client, digest_of(*parts)))
        draw = torch.Generator().manual_seed(instruction.client + 1)
        update = 0.5 * (torch.randn(D, generator=draw) - received.start)
        after = None
        if received.buffers is not None:
            assert bool((received.buffers[6:] >= 0).all()), "variances"
            after = 0.2 * received.buffers + 0.01 * torch.rand(BUFFERS.d, generator=draw)
        return ClientUpdate(update, after, examples=1, steps=1, loss=0.0)

    # -- what must hold ------------------------------------------------------------------------------------------

    def vectors_of(self, i: int) -> list[Tensor]:
        """What the server takes this client to hold: the model and, if they travel with it, the buffers."""
        rows = self.server.replicas
        if rows is not None:
            return [rows.gather(name, [i])[0] for name in ROWS.values() if name in rows.layouts]
        return list(self.method.downlink.common(self.state.downlink).values())

    def check(self) -> None:
        assert self.concluded is not None
        for i in self.concluded.accepted:
            if held := self.vectors_of(i):
                assert (self.concluded.round, i, digest_of(*held)) in self.trained, (
                    "from what the server takes it to hold"
                )
        if self.server.replicas is not None:
            assert (self.state.downlink.sent, self.state.downlink.buffers) == ({}, {})


class Killed(BaseException):
    pass


ROUNDS = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, CLIENTS - 1), st.sampled_from(FATES), min_size=1),
        st.sampled_from(["go on", "go on", "save", "restart"]),
    ),
    min_size=1,
    max_size=10,
)


@pytest.mark.parametrize(("spec", "buffers"), WORLDS)
@settings(max_examples=6)
@given(rounds=ROUNDS, resends=st.booleans())
def test_nobody_trains_from_a_wrong_model_unnoticed(
    spec: str, buffers: str, rounds: Sequence[Any], resends: bool
) -> None:
    world = World(spec, buffers, resends)
    for fates, event in rounds:
        world.round(fates)
        if event == "save":
            world.save()
        elif event == "restart":
            world.restart()
    everybody = dict.fromkeys(range(CLIENTS), "fine")
    world.late = []
    first = world.round(everybody)
    assert all("but the message builds on version" in reason for reason in first.refused.values())
    second = world.round(everybody)
    assert second.accepted == list(range(CLIENTS)), "who was out of step has got the dense model"
    assert not second.refused


@pytest.mark.parametrize(("spec", "buffers"), KINDS)
def test_lost_messages_alone_never_cost_a_dense_model(spec: str, buffers: str) -> None:
    """Whatever is lost, twice or late: the client still has what the next message builds on."""
    world = World(spec, buffers)
    harmless = [fate for fate in FATES if fate not in ("disk lost", "older instruction again")]
    for t in range(4 * len(harmless)):  # every cohort meets every fate
        cohort = [i for i in range(CLIENTS) if (t * 7 + i * 3) % 4]
        concluded = world.round({i: harmless[(t * 5 + i * 11) % len(harmless)] for i in cohort})
        assert not [reason for reason in concluded.refused.values() if reason.startswith("OutOfStep")]


# -- what was sent and what is left ------------------------------------------------------------------------------------


def after(sent: Tensor, instruction: bytes) -> Tensor:
    """The sum, in float64, of what a client was sent so far, and of what came last; a dense model starts it again."""
    message = Message.from_bytes(Instruction.from_bytes(instruction).streams["model"])
    if message.kind == SET:
        code = unpack_payload(message.payloads[0], LAYOUT).code
        return sent.index_copy(0, code["position"], code["value"].double())
    came = [unpack_payload(payload, LAYOUT).decode().double() for payload in message.payloads]
    return sum(came, torch.zeros(D).double() if message.kind == DENSE else sent)


@pytest.mark.parametrize("codec", CONTRACTIVE)
def test_what_was_sent_and_what_is_left_is_the_servers_model(codec: str) -> None:
    """To float accuracy, after every round."""
    for spec in (f"shared({codec}, warm=true)", f"replica({codec}, warm=true)"):
        world = World(spec)
        sent = START.double()
        for _ in range(6):
            x = world.state.x.clone()
            world.round({0: "fine", 1: "fine"})
            (held,) = world.vectors_of(0)
            sent = after(sent, world.last[0])
            left = x.double() - held.double()
            assert float((sent + left - x.double()).norm()) <= 1e-5 * float(x.double().norm())


@pytest.mark.parametrize("spec", ["shared(topk(ratio=0.1))", "replica(topk(ratio=0.1))"])
def test_what_stays_still_is_reached(spec: str) -> None:
    """Error feedback: once the server's model rests, clients come to hold it."""
    one = downlink(spec)
    rows = RowStore.in_memory({REPLICA: LAYOUT}) if one.server_keeps_rows else None
    state, target = one.init(START), torch.randn(D, generator=torch.Generator().manual_seed(5))
    for round in range(1, 16):
        start, _, state, _ = one.deliver(state, Broadcast(target, LAYOUT, round, 0, rows), [0])
    assert torch.allclose(start.reshape(-1), target, atol=1e-6)


# -- ways to catch up --------------------------------------------------------------------------------------------------


def server_only(one: Downlink, rounds: int, walk: float = 0.1) -> tuple[Any, list[Tensor], list[Tensor]]:
    """The shared state after each of this many rounds with client 0 alone, and x and w of each."""
    state, x, draw = one.init(START), START, torch.Generator().manual_seed(3)
    xs, ws = [], []
    for round in range(1, rounds + 1):
        x = x + walk * torch.randn(D, generator=draw)
        _, _, state, _ = one.deliver(state, Broadcast(x, LAYOUT, round, 0), [0])
        xs.append(x)
        ws.append(state.model.w)
    return state, xs, ws


@pytest.mark.parametrize("codec", CONTRACTIVE)
def test_every_way_to_catch_up_ends_at_the_same_bits_and_the_cheapest_is_taken(codec: str) -> None:
    one, rounds = downlink(f"shared({codec})"), 12
    assert isinstance(one, Shared)
    state, _, ws = server_only(one, rounds)
    kinds = set()
    for held in range(1, rounds):
        way = one.way(state, LAYOUT, held)
        kinds.add(way.kind)
        chain = [state.model.log[v].numel() for v in range(held + 1, rounds + 1) if v in state.model.log]
        dense = message_size([len(encode("identity", state.model.w, LAYOUT))])
        whole = held >= state.model.since
        assert whole == (len(chain) == rounds - held)
        assert way.size <= min([dense] + [message_size(chain)] * whole)
        if way.kind == "dense":
            assert way.size == dense
            continue
        result = one.expected(state._replace(digests={rounds: digest_of(state.model.w).hex()}), 0)
        kind = SET if way.replaces else ADD
        message = Message(kind, Held(held, digest_of(ws[held - 1])), result, way.payloads())
        assert len(message.to_bytes()) == way.size
        assert torch.equal(message.apply(ws[held - 1], LAYOUT).view(torch.int32), state.model.w.view(torch.int32))
    assert sum(payload.numel() for payload in state.model.log.values()) <= dense
    assert kinds <= {"delta", "catchup", "dense"}


def test_a_long_absence_under_sparse_deltas_is_made_up_by_values() -> None:
    """Nearly always the same few coordinates move: their values are cheaper than the many deltas."""
    layout = Layout.flat(4000)
    one = downlink("shared(topk(k=40))")
    state, x = one.init(torch.zeros(4000)), torch.zeros(4000)
    for round in range(1, 31):
        x = x.clone()
        x[:50] += torch.randn(50, generator=torch.Generator().manual_seed(round))
        _, sent, state, _ = one.deliver(state, Broadcast(x, layout, round, 0), [0] if round < 30 else [0, 1])
    assert [way.kind for way in sent] == ["delta", "dense"]
    state = state._replace(known={1: 2})
    _, [way], *_ = one.deliver(state, Broadcast(x + 1e-3, layout, 31, 0), [1])
    delta = state.model.log[30].numel()
    assert way.kind == "catchup"
    assert way.size < 4 * delta


def test_the_parts_of_a_round_are_counted_by_kind() -> None:
    one = downlink("shared(topk(ratio=0.1))")
    state, x = one.init(START), START
    kinds = []
    for round, cohort in enumerate([[0, 1], [0, 1], [0], [0], [0, 1], [2]], start=1):
        _, sent, state, _ = one.deliver(state, Broadcast(x, LAYOUT, round, 0), cohort)
        kinds.append([way.kind for way in sent])
        x = x + 0.1
    assert kinds == [["dense"] * 2, ["delta"] * 2, ["delta"], ["delta"], ["delta", "catchup"], ["dense"]]


# -- bad input ---------------------------------------------------------------------------------------------------------


def in_step(spec: str = "shared(topk(ratio=0.1))") -> World:
    world = World(spec)
    for _ in range(3):
        world.round(dict.fromkeys(range(CLIENTS), "fine"))
    return world


@pytest.mark.parametrize("spec", ["shared(topk(ratio=0.1))", "replica(blockq)"])
@pytest.mark.parametrize("version", [99, 2])
def test_a_version_from_the_future_or_of_another_run_falls_back_to_dense(spec: str, version: int) -> None:
    world = in_step(spec)
    instructions, world.state = server_side.instruct(world.server, world.state, [0])
    told = Refusal(instructions[0].round, 0, held_of(version), "elsewhere")
    assert world.conclude([0], [told]).refused == {0: "OutOfStep: elsewhere"}
    following, _ = server_side.instruct(world.server, world.state, [0, 1])
    assert len(following[0].streams["model"]) > 4 * D > len(following[1].streams["model"])


def held_of(version: int) -> Held:
    return Held(version, bytes(range(16)))


@pytest.mark.parametrize("spec", ["shared(topk(ratio=0.1))", "replica(blockq)"])
def test_an_update_trained_from_something_else_is_refused(spec: str) -> None:
    world = in_step(spec)
    _, world.state = server_side.instruct(world.server, world.state, [0, 1])
    payload, x = encode("identity", torch.ones(D), LAYOUT), world.state.x.clone()
    liars = [Reply(4, 0, {"update": payload}, 1, 1, 0.0, held_of(99)), Reply(4, 1, {"update": payload}, 1, 1, 0.0)]
    concluded = world.conclude([0, 1], liars)
    assert concluded.accepted == []
    assert "client 0 trained from version 99 (00010203), but was sent version 4" in concluded.refused[0]
    assert "client 1 trained from nothing kept" in concluded.refused[1]
    assert torch.equal(world.state.x, x)


def test_a_delta_out_of_order_is_refused_before_any_training() -> None:
    world = in_step()
    first, world.state = server_side.instruct(world.server, world.state, [0])
    world.conclude([0, 1], [answer_from_bytes(world.answer(0, first[0].to_bytes()))])
    second, _ = server_side.instruct(world.server, world.state, [0])
    fresh = World(world.spec)
    before = set(world.trained)
    me = Client(world.method, LAYOUT, held=fresh.stores[0])
    told, outgoing = client_side.answer(me, second[0], lambda received, i, *_: world.train(received, i, killed=False))
    assert isinstance(told, Refusal)
    assert "client 0 holds nothing, but the message builds on version 4" in told.reason
    assert told.held is None
    assert outgoing is None
    assert world.trained == before


@pytest.mark.parametrize("spec", ["shared(topk(ratio=0.1))", "replica(blockq)"])
def test_a_damaged_model_is_noticed_by_its_digest(spec: str) -> None:
    world = in_step(spec)
    store = world.stores[0]
    store.model(0)[7] += 1.0
    concluded = world.round({0: "fine", 1: "fine"})
    assert concluded.accepted == [1]
    assert "does not give version" in concluded.refused[0]
    concluded = world.round({0: "fine"})
    assert concluded.accepted == [0]
    assert len(Instruction.from_bytes(world.last[0]).streams["model"]) > 4 * D


def test_stores_of_another_layout_are_refused() -> None:
    for other in ({REPLICA: Layout.flat(D)}, {"residual": LAYOUT}):
        with pytest.raises(LayoutError, match="replicas has rows that do not match this model's layout, d=60"):
            Server(Method(downlink="replica(sign)"), LAYOUT, replicas=RowStore.in_memory(other))
    world = in_step()
    world.stores[0] = HeldStore.in_memory(Layout.flat(D))
    assert "keeps models of another layout" in world.round({0: "fine"}).refused[0]
    world.stores[0] = None  # type: ignore[assignment]
    with pytest.raises(Exception, match="clients must keep their model; give store=HeldStore"):
        world.round({0: "fine"})


def test_a_late_refusal_resends_nothing() -> None:
    world = in_step()
    with pytest.raises(Exception, match="a refusal of round 2 in round 4; it came too late"):
        server_side.resend(world.server, world.state, Refusal(2, 0, None, ""))


# -- first contacts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["shared(topk(ratio=0.1), warm=true)", "replica(blockq, warm=true)"])
def test_who_starts_from_a_checkpoint_never_gets_a_dense_model(spec: str) -> None:
    world = World(spec)
    for _ in range(4):
        concluded = world.round(dict.fromkeys(range(CLIENTS), "fine"))
        assert concluded.accepted == list(range(CLIENTS))
        assert all(len(Instruction.from_bytes(sent).streams["model"]) < 4 * D for sent in world.last.values())
    world = World(spec)
    world.stores[2] = HeldStore.in_memory(LAYOUT)  # it has no such checkpoint
    assert "client 2 holds nothing" in world.round({1: "fine", 2: "fine"}).refused[2]
    assert world.round({2: "fine"}).accepted == [2]


@pytest.mark.parametrize("spec", ["shared(topk(ratio=0.1))", "replica(blockq)"])
def test_first_contacts_are_dense_and_later_ones_are_not(spec: str) -> None:
    world = World(spec)
    sizes = []
    for cohort in ([0, 1], [0, 2], [1, 2]):
        world.round(dict.fromkeys(cohort, "fine"))
        sizes.append([len(Instruction.from_bytes(world.last[i]).streams["model"]) > 4 * D for i in cohort])
    assert sizes == [[True, True], [False, True], [False, False]]


# -- on disk -----------------------------------------------------------------------------------------------------------


def test_a_client_killed_while_training_is_in_step_when_it_comes_back(tmp_path: Path, forks: Forks) -> None:
    """A real process and a real kill: what was staged is there, and the server builds on what was held before."""
    world = World("shared(topk(ratio=0.1))")
    world.stores[0] = HeldStore.on_disk(LAYOUT, tmp_path)
    for _ in range(2):
        world.round({0: "fine", 1: "fine"})
    instructions, world.state = server_side.instruct(world.server, world.state, [0, 1])
    (tmp_path / "instruction").write_bytes(instructions[0].to_bytes())
    assert forks.run(KILLED, tmp_path).code == -signal.SIGKILL
    staged = HeldStore.on_disk(LAYOUT, tmp_path).staged(0)
    assert staged is not None
    assert staged["model"].result.version == 3
    other = answer_from_bytes(world.answer(1, instructions[1].to_bytes()))
    world.conclude([0, 1], [other])
    world.stores[0] = HeldStore.on_disk(LAYOUT, tmp_path)
    concluded = world.round({0: "fine", 1: "fine"})
    assert concluded.accepted == [0, 1]
    assert len(Instruction.from_bytes(world.last[0]).streams["model"]) < 4 * D


KILLED = """
import os, signal, sys
from fedcams import HeldStore, Layout, Method
from fedcams.rounds import Client, Instruction
from fedcams.rounds.client import answer

layout = Layout(("w", "b"), ((5, 10), (10,)))
held = HeldStore.on_disk(layout, sys.argv[1])
me = Client(Method(downlink="shared(topk(ratio=0.1))"), layout, held=held)
instruction = Instruction.from_bytes(open(sys.argv[1] + "/instruction", "rb").read())
answer(me, instruction, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_files_that_are_damaged_or_foreign_count_as_nothing(tmp_path: Path) -> None:
    store = HeldStore.on_disk(LAYOUT, tmp_path)
    assert store.held(3) is None
    assert store.staged(3) is None
    store.start(3, START)
    assert store.held(3) == Held(0, digest_of(START))
    assert torch.equal(store.model(3), START)
    assert HeldStore.on_disk(Layout.flat(D), tmp_path).held(3) is None, "another layout"
    whole = (tmp_path / "3.held").read_bytes()
    for damaged in (whole[:-1], whole[:10], b"", b"FCXX" + whole[4:], whole + b"x"):
        (tmp_path / "3.held").write_bytes(damaged)
        assert store.held(3) is None
    message = Message(ADD, Held(0, digest_of(START)), Held(1, bytes(16)), [b"payload"])
    store.stage(3, {"model": message})
    assert store.staged(3) == {"model": message}
    (tmp_path / "3.staged").write_bytes(message.to_bytes()[:-1])
    assert store.staged(3) is None


def test_a_file_that_cannot_be_read_is_refused_by_its_path(tmp_path: Path) -> None:
    """Unlike one that is missing or damaged: the dense model would have to be written in its place."""
    store = HeldStore.on_disk(LAYOUT, tmp_path)
    for read, kind in {store.held: "held", store.staged: "staged", store.vectors: "held"}.items():
        (tmp_path / f"3.{kind}").mkdir(exist_ok=True)
        with pytest.raises(ResidualError, match=rf"cannot read .*3\.{kind}: Is a directory; restore it, or delete it"):
            read(3)


def test_a_kill_between_keeping_and_forgetting_what_was_staged_does_no_harm(tmp_path: Path) -> None:
    world = World("replica(sign)")
    world.stores[0] = HeldStore.on_disk(LAYOUT, tmp_path)
    for _ in range(3):
        world.round({0: "fine"})
        staged = (tmp_path / "0.staged").read_bytes()
        world.round({0: "fine"})
        (tmp_path / "0.staged").write_bytes(staged)  # it was not removed, and the newer one never written
    assert world.round({0: "fine"}).refused[0].startswith("OutOfStep"), "the server had heard of the newer one"
    assert world.round({0: "fine"}).accepted == [0]


# -- messages ----------------------------------------------------------------------------------------------------------

BASE, RESULT = Held(1, bytes(range(16))), Held(2, bytes(range(1, 17)))


def test_a_digest_is_the_one_documented() -> None:
    model = torch.randn(2**18 + 5)
    data = model.numpy().tobytes()
    parts = [blake2b(part, digest_size=16, person=b"fedcams.piece").digest() for part in (data[:-20], data[-20:])]
    assert digest_of(model) == blake2b(b"".join(parts), digest_size=16, person=b"fedcams.model").digest()


def test_messages_travel_as_bytes() -> None:
    for message in (
        Message(DENSE, None, RESULT, [b"model"]),
        Message(ADD, BASE, RESULT, []),
        Message(ADD, BASE, RESULT, [b"one", b"", b"three"]),
        Message(SET, BASE, RESULT, [b"values"]),
    ):
        data = message.to_bytes()
        assert Message.from_bytes(data) == message
        assert len(data) == message_size([len(payload) for payload in message.payloads])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Message(3, BASE, RESULT, [b""]), "of kind 3"),
        (Message(DENSE, BASE, RESULT, [b""]), "of kind 0 with the flag 1"),
        (Message(ADD, None, RESULT, [b""]), "of kind 1 with the flag 0"),
        (Message(SET, BASE, RESULT, []), "of kind 2 with 0 payloads"),
    ],
)
def test_messages_that_make_no_sense_are_refused(wrong: Message, message: str) -> None:
    with pytest.raises(WireError, match=message):
        Message.from_bytes(wrong.to_bytes())


def test_values_to_be_set_travel_in_one_way_only() -> None:
    with pytest.raises(WireError, match=r"travel as topk\(k=...\), not as topk\(ratio=0.1\)"):
        Message(SET, BASE, RESULT, [encode("topk(ratio=0.1)", START, LAYOUT)]).apply(START, LAYOUT)
    with pytest.raises(WireError, match="not as sign"):
        Message(SET, BASE, RESULT, [encode("sign", START, LAYOUT)]).apply(START, LAYOUT)
