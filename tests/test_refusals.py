"""What is refused: parts that do not fit, before anything runs; and single clients, as rows or as bytes."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedcams import HeldStore, Layout, Method, SpecError, encode
from fedcams.downlink import Held
from fedcams.engines import CohortUpdate
from fedcams.errors import UpdateError, WrongStreams
from fedcams.rounds import (
    Accepted,
    Client,
    ClientUpdate,
    Concluded,
    Instruction,
    Received,
    Refusal,
    Reply,
    Server,
    ServerState,
)
from fedcams.rounds import client as client_side
from fedcams.rounds import server as server_side
from fedcams.transforms import Facts, Transform
from halves import CLIENTS, KEEP_PAIRS, assert_equal_rounds, net, run
from together import together

# -- parts that do not fit ---------------------------------------------------------------------------------------------

UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"control": "scaffold", "local": "sgd(momentum=0.9)"}, "scaffold .* steps of sgd.momentum=0.9. are not rate"),
    ({"control": "scaffold", "local": "adamw"}, "scaffold .* steps of adamw are not rate times gradient; choose sgd"),
    (
        {"control": "scaffold", "local": "sgd(prox=0.1)"},
        "scaffold .* steps of sgd.prox=0.1. are not rate.* without .*prox",
    ),
    ({"transforms": "fednova", "local": "sgd(momentum=0.9)"}, "fednova .* those of sgd.momentum=0.9. are not rate"),
    ({"transforms": "clip(1) + fednova", "local": "adamw"}, "fednova .* those of adamw are not rate times gradient"),
    ({"uplink": "randk(ratio=0.5, scaled=true)"}, "uplink=randk.* has no bound on its error.* with feedback=true"),
    ({"buffers": "blockq(rounding=stochastic)"}, "buffers=blockq.* has no bound on its error.* with feedback=true"),
    ({"aggregate": "trimmed", "weighting": "examples"}, "trimmed counts every client equally, but weighting=examples"),
    ({"aggregate": "trimmed", "weighting": "sampler"}, "trimmed counts every client equally, but weighting=sampler"),
]


@together(("parts", "message"), UNFIT)
def test_parts_that_do_not_fit_are_refused_by_names_of_both(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Method(**parts)
    with pytest.raises(SpecError, match=message):
        run(**parts)


LONG: list[tuple[dict[str, Any], str]] = [
    (
        {"server": "fedams(lr=cosine(1, 0.1, rounds=7))"},
        r"server\.lr=cosine.* lasts 7 rounds, but the run has rounds=6",
    ),
    ({"local": "sgd(lr=linear(1, 0.1, rounds=9))"}, r"local\.lr=linear.* lasts 9 rounds, but the run has rounds=6"),
    ({"uplink": "topk(ratio=linear(1/4, 1/2, rounds=8))"}, r"uplink\.ratio=linear.* lasts 8 rounds.*rounds=6"),
    (
        {"downlink": "replica(topk(ratio=linear(1/4, 1/2, rounds=8)))"},
        r"downlink\.codec\.ratio=linear.* lasts 8 rounds.*rounds=6",
    ),
    ({"transforms": "clip(norm=linear(1, 2, rounds=8))"}, "norm=linear.* lasts 8 rounds, but the run has rounds=6"),
]


@pytest.mark.parametrize(("parts", "message"), LONG, ids=[next(iter(parts)) for parts, _ in LONG])
def test_a_schedule_longer_than_the_run_is_refused_before_it(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        run(**parts, rounds=6)
    assert len(run(**parts, rounds=9, test=None).records) == 0


def test_what_a_server_must_know_is_asked_before_the_first_round() -> None:
    layout = Layout.flat(4)
    with pytest.raises(SpecError, match=r"control=scaffold .*population=0; give Server\(population=\.\.\.\)"):
        Server(Method(control="scaffold"), layout)
    assert Server(Method(control="scaffold"), layout, population=3).population == 3
    with pytest.raises(SpecError, match="weighting=sampler: this server does not know the sampler"):
        Server(Method(weighting="sampler"), layout)


def test_rows_are_kept_only_where_something_may_be_lost() -> None:
    layout, buffers = Layout.flat(4), Layout.flat(2)
    kept = {
        ("identity", "identity", "fedams(lr=cosine(1, 0))"): [],
        ("sign", "identity", "fedams"): ["residual"],
        ("identity", "sign", "fedams"): ["buffers"],
        ("topk(ratio=linear(1, 1/2))", "identity", "fedams"): ["residual"],
        ("identity", "topk(ratio=linear(1, 1/2))", "fedams"): ["buffers"],
    }
    for (uplink, other, server), rows in kept.items():
        assert list(Method(uplink=uplink, buffers=other, server=server).memory(layout, buffers)) == rows


# -- single clients, in a simulation and through bytes -----------------------------------------------------------------


STEEP = [*CLIENTS[:5], (CLIENTS[5][0] * 10, CLIENTS[5][1]), *CLIENTS[6:]]
"""Client 5 makes longer updates than the others."""


@pytest.mark.parametrize(
    ("bound", "parts"),
    [
        (0.22, {"uplink": "sign"}),
        (0.16, {"uplink": "topk(ratio=0.1)", "downlink": "shared(sign)", "control": "scaffold(blockq(bits=8))"}),
        (0.22, {"uplink": "identity", "downlink": "replica(blockq)", "weighting": "examples"}),
        (0.3, {"uplink": "blockq", "control": "scaffold", "buffers": "sign", "model": net(norm=True)}),
    ],
    ids=["sign", "shared", "replica", "buffers"],
)
def test_a_bound_on_norms_refuses_the_same_in_rows_and_bytes(bound: float, parts: dict[str, Any]) -> None:
    options = {
        "clients": STEEP,
        "transforms": f"max_norm({bound})",
        "cohort": 5,
        "rounds": 5,
        "test": None,
        **KEEP_PAIRS,
    }
    batched, apart = (run(**options, **parts, engine="loop", seed=3) for _ in range(2))
    assert_equal_rounds(batched, apart)
    refused = {i for record in batched.records for i in record.refused}
    accepted = {i for record in batched.records for i in record.cohort if i not in record.refused}
    assert refused
    assert accepted
    for record in batched.records:
        for reason in record.refused.values():
            assert re.fullmatch(rf"UpdateError: an update of norm \S+; at most max_norm={bound:g} is accepted", reason)
    rows = batched.simulation.client.rows
    assert rows is None or set(rows.ids()) == accepted, "who is never accepted keeps the rows it had: none"


@dataclass(frozen=True)
class Overflow(Transform):
    """Blows up the updates of clients with an odd id, at the server."""

    name = "overflow"

    def arrival_(self, rows: Tensor, facts: Facts, layout: Layout) -> None:
        for row, client in zip(rows, facts.ids, strict=True):
            row *= 1e39 if client % 2 else 1


@pytest.mark.parametrize("aggregate", ["mean", "trimmed(fraction=1/3)"])
def test_a_transform_that_overflows_at_the_server_costs_that_client_alone(aggregate: str) -> None:
    parts = {"transforms": [Overflow()], "aggregate": aggregate, "uplink": "topk(ratio=1/4)", "engine": "loop"}
    batched = run(**parts)
    assert_equal_rounds(batched, run(**parts))
    for record in batched.records:
        assert list(record.refused) == [client for client in record.cohort if client % 2]
        assert all("the update is not finite" in reason for reason in record.refused.values())


def test_losses_and_probes_cover_the_accepted_and_bytes_everybody() -> None:
    """A run in which the server refuses client 5 is that of a cohort without it, but for the bytes."""
    options = {
        "uplink": "sign",
        "cohort": "full",
        "rounds": 1,
        "engine": "loop",
        "probes": "q + gamma + cosine",
    } | KEEP_PAIRS
    refusing = run(clients=dict(enumerate(STEEP)), transforms="max_norm(0.25)", **options)
    without = run(clients={i: pair for i, pair in enumerate(STEEP) if i != 5}, **options)
    (one,), (other,) = refusing, without
    assert list(one.refused) == [5]
    assert torch.equal(refusing.state.x, without.state.x)
    assert (one.train_loss, one.probes, one.test_loss) == (other.train_loss, other.probes, other.test_loss)
    assert one.wire_up * 7 == other.wire_up * 8
    assert one.wire_down * 7 == other.wire_down * 8


LAYOUT, BUFFERS = Layout(("w", "b"), ((5, 10), (10,))), Layout(("mean",), ((4,),))
D = LAYOUT.d


def value(size: float) -> Any:
    """A training whose update has this size in every coordinate."""

    def train(received: Received, instruction: Instruction, shift: Tensor | None, rate: float) -> ClientUpdate:
        after = None if received.buffers is None else received.buffers + torch.linspace(1, 2, 4)
        update = torch.full((D,), size) * torch.linspace(1, 2, D)
        return ClientUpdate(update, after, examples=10, steps=2, loss=0.5)

    return train


class Federation:
    """Client 0 and 1 and their server, with everything that can travel."""

    def __init__(self, **parts: Any) -> None:
        settings: dict[str, Any] = {"server": "fedavg", "uplink": "sign", "control": "scaffold", "buffers": "sign"}
        self.method = Method(**{**settings, **parts})
        self.server = Server(self.method, LAYOUT, BUFFERS, population=2)
        kept = self.method.delivered(LAYOUT, BUFFERS).get("buffers")
        self.client = Client(self.method, LAYOUT, BUFFERS, held=HeldStore.in_memory(LAYOUT, kept))
        self.state = server_side.start(self.server, torch.zeros(D), torch.zeros(4))
        self.instructions, self.state = server_side.instruct(self.server, self.state, [0, 1])

    def reply(self, client: int, size: float = 1.0) -> tuple[Reply, Any]:
        reply, outgoing = client_side.answer(self.client, self.instructions[client], value(size))
        assert isinstance(reply, Reply)
        return reply, outgoing

    def conclude(self, *answers: Reply | Refusal) -> Concluded:
        intake = server_side.take_answers(self.server, self.state, [0, 1], answers)
        self.state, concluded = server_side.conclude_(self.server, self.state, intake)
        return concluded

    def next_round(self) -> None:
        self.instructions, self.state = server_side.instruct(self.server, self.state, [0, 1])

    def rows(self, client: int) -> dict[str, Tensor]:
        assert self.client.rows is not None
        return {name: self.client.rows.gather(name, [client])[0] for name in self.client.rows.layouts}


def snapshot(state: ServerState) -> list[Any]:
    parts = (state.x, state.buffers, state.control, *vars_of(state.optimizer))
    return [part.clone() if isinstance(part, Tensor) else part for part in parts]


def vars_of(state: Any) -> tuple[Any, ...]:
    return tuple(state._asdict().values())


def assert_unchanged(before: list[Any], state: ServerState) -> None:
    for old, new in zip(before, snapshot(state), strict=True):
        assert torch.equal(old, new) if isinstance(old, Tensor) else old == new


def test_who_is_refused_keeps_residual_and_control_and_is_heard() -> None:
    world = Federation(transforms="max_norm(20)", downlink="shared(sign)")
    for size, accepted in ((1.0, [0, 1]), (100.0, [0])):
        made = [world.reply(0), world.reply(1, size)]
        before = world.rows(1)
        concluded = world.conclude(*(reply for reply, _ in made))
        assert concluded.accepted == accepted
        for _, outgoing in made:
            client_side.commit(world.client, outgoing, concluded.accepted)
        world.next_round()
    assert all(bool(row.any()) for row in before.values())
    assert set(before) == {"residual", "buffers", "control"}
    for name, row in world.rows(1).items():
        assert torch.equal(row, before[name]), name
    assert world.instructions[1].accepted is not None
    assert world.instructions[1].accepted.round == 1, "the refused update is not named as accepted"
    sizes = [len(instruction.streams["model"]) for instruction in world.instructions.values()]
    assert sizes[0] == sizes[1] < 4 * D, "it holds what it was sent, so a delta is enough for it too"


@pytest.mark.parametrize("uplink", ["sign", "topk(ratio=0.5)", "identity"])
def test_a_control_variate_that_overflows_is_refused_alone(uplink: str) -> None:
    """The update is finite, its share of a tiny rate is not: that client refuses, and the others do not notice."""
    method = Method(uplink=uplink, control="scaffold", local="sgd(lr=1e-30)")
    client = Client(method, LAYOUT)
    received = Received(torch.zeros(D), None, torch.zeros(D))

    def trained(*sizes: float) -> CohortUpdate:
        rows = torch.tensor(sizes)[:, None].repeat(1, D)
        count = len(sizes)
        return CohortUpdate(rows, None, torch.zeros(count).double(), [1] * count, [1] * count, 1e-30)

    both = client_side.respond_(client, [3, 4], received, trained(1e-3, 1e20), 1, 0)
    alone = client_side.respond_(client, [3], received, trained(1e-3), 1, 0)
    assert list(both.refused) == [4]
    assert "not finite" in both.refused[4]
    assert both.arrival.facts == alone.arrival.facts
    for name, (_, code) in alone.arrival.codes.items():
        for field, tensor in code.items():
            assert torch.equal(both.arrival.codes[name][1][field], tensor)
    for name, row in alone.rows.items():
        assert torch.equal(both.rows[name], row)


# -- replies that do not belong here -----------------------------------------------------------------------------------


def without(name: str, reply: Reply) -> Reply:
    return dataclasses.replace(reply, streams={key: data for key, data in reply.streams.items() if key != name})


def changed(name: str, payload: bytes, reply: Reply) -> Reply:
    return dataclasses.replace(reply, streams={**reply.streams, name: payload})


ones, four = torch.ones(D), torch.ones(4)
WRONG: dict[str, tuple[Any, str]] = {
    "no control": (lambda r: without("control", r), "WrongStreams: a reply from client 1 carries buffers, update; exp"),
    "no buffers": (lambda r: without("buffers", r), "WrongStreams: a reply from client 1 carries control, update; exp"),
    "a stream too many": (lambda r: changed("other", b"x", r), "WrongStreams: .* carries buffers, control, other, upd"),
    "buffers by another codec": (
        lambda r: changed("buffers", encode("identity", four, BUFFERS), r),
        "UpdateError: client 1 compresses buffers with identity; expected sign",
    ),
    "control by another codec": (
        lambda r: changed("control", encode("sign", ones, LAYOUT), r),
        "UpdateError: client 1 compresses control with sign; expected identity",
    ),
    "buffers of another layout": (lambda r: changed("buffers", r.streams["update"], r), "LayoutMismatch"),
    "damaged control": (lambda r: changed("control", r.streams["control"][:-1] + b"x", r), "ChecksumMismatch"),
    "late": (lambda r: dataclasses.replace(r, round=1), "UpdateError: an update for round 1 in round 2; it came too"),
    "early": (lambda r: dataclasses.replace(r, round=3), "UpdateError: an update for round 3 in round 2; it came too"),
    "from a stranger": (
        lambda r: dataclasses.replace(r, client=7),
        "UpdateError: client 7 was not selected in round 2",
    ),
    "from another model": (
        lambda r: dataclasses.replace(r, held=Held(3, bytes(16))),
        r"UpdateError: client 1 trained from version 3 \(00000000\), but was sent None",
    ),
}


@together("what", WRONG)
@together("company", [False, True])
def test_a_reply_that_does_not_belong_here_is_refused_and_changes_nothing(what: str, company: bool) -> None:
    change, reason = WRONG[what]
    world, other = Federation(), Federation()
    for one in (world, other):
        one.conclude(one.reply(0)[0], one.reply(1)[0])
        one.next_round()
    before, good = snapshot(world.state), world.reply(0, 3.0)[0]
    bad = change(world.reply(1, 5.0)[0])
    concluded = world.conclude(bad, *([good] if company else []))
    assert list(concluded.refused) == [bad.client]
    assert re.match(reason, concluded.refused[bad.client])
    if company:
        expected = other.conclude(other.reply(0, 3.0)[0])
        assert (concluded.accepted, concluded.train_loss) == (expected.accepted, expected.train_loss) == ([0], 0.5)
        assert_unchanged(snapshot(other.state), world.state)
    else:
        assert (concluded.accepted, concluded.mean, concluded.train_loss) == ([], None, None)
        assert_unchanged(before, world.state)
        assert {i: last.round for i, last in world.state.accepted.items()} == {0: 1, 1: 1}


@pytest.mark.parametrize("order", [(0, 0, 1), (0, 1, 0), (1, 0, 0)])
def test_a_reply_that_comes_twice_counts_once(order: tuple[int, ...]) -> None:
    world, other = Federation(), Federation()
    made = [world.reply(i, 1.0 + i)[0] for i in (0, 1)]
    concluded = world.conclude(*(made[i] for i in order))
    other.conclude(*made)
    assert concluded.accepted == [0, 1]
    assert concluded.refused == {
        0: "UpdateError: client 0 already has an update in this round; send one per client and round"
    }
    assert world.state.accepted[0] == Accepted(1, made[0].digest)
    assert_unchanged(snapshot(other.state), world.state)


def test_an_instruction_with_other_streams_is_refused_before_training() -> None:
    world = Federation()
    asked = world.instructions[0]
    for streams in (
        {name: data for name, data in asked.streams.items() if name != "control"},
        {**asked.streams, "other": b"x"},
    ):
        with pytest.raises(
            WrongStreams, match=r"an instruction for client 0 carries .*; expected buffers, control, model"
        ):
            client_side.answer(world.client, dataclasses.replace(asked, streams=streams), fail)


def fail(*_: Any) -> ClientUpdate:
    raise AssertionError("it must not train")


def test_a_batch_with_a_client_that_is_in_already_is_refused_whole() -> None:
    world = Federation()
    _, outgoing = world.reply(0)
    intake = server_side.take_answers(world.server, world.state, [0, 1], [])
    intake.take(outgoing.arrival)
    with pytest.raises(UpdateError, match="client 0 already has an update in this round"):
        intake.take(outgoing.arrival)
    assert intake.facts().ids == (0,)


def test_a_schedule_of_the_whole_run_needs_its_length() -> None:
    method = Method(server="fedams(lr=cosine(1, 0))")
    for make in (lambda: Server(method, LAYOUT), lambda: Client(method, LAYOUT)):
        with pytest.raises(SpecError, match=r"server\.lr=cosine.* depends on the length of the run.*give rounds="):
            make()
    assert Server(Method(server="fedams(lr=cosine(1, 0.5, rounds=3))"), LAYOUT).rounds is None
