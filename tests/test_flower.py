"""The Flower adapter in one process: Flower's messages and apps, no sockets."""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from fedcams import LayoutError, RowStore, SpecError, decode, encode
from fedcams.experiment import build
from fedcams.flower import FedCAMS, uplink
from fedcams.flower.arrays import ArrayNames
from fedcams.flower.checkpoint import read_ledger
from fedcams.flower.records import INSTRUCTION, REPLY, from_array, message_parts, message_record, to_array
from fedcams.keys import derive
from fedcams.layout import Layout
from fedcams.rounds import Instruction, Reply
from fedcams.runs import RunError
from flower_apps import CLIENTS, ROUNDS, Log, client_app, experiment, federation, quick, run, simulated, vector, vectors
from flower_grid import LocalGrid
from together import together

__all__ = ["quick"]  # a fixture for these tests


# -- the same numbers as the simulator -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"uplink": "sign"},
        {"uplink": "identity", "weighting": "examples"},
        {"uplink": "randk(ratio=1/4)", "feedback": False},
        {"task": "digits", "model": "mlp(hidden=8)", "uplink": "topk(ratio=1/64, values=bf16)"},
        {"task": "digits", "model": "convmixer(dim=4, depth=1, kernel=3)", "rounds": 2, "local": "sgd(steps=3)"},
    ],
    ids=lambda changes: ",".join(map(str, changes.values())),
)
def test_the_model_is_bit_for_bit_the_simulators(tmp_path: Path, changes: dict[str, Any]) -> None:
    what = experiment(**changes)
    result = run(*federation(tmp_path, what), what.rounds)
    (x, buffers), (expected, averaged) = vectors(result.arrays, what), simulated(what)
    assert torch.equal(x, expected)
    assert (buffers is None) == (averaged is None)
    if buffers is not None and averaged is not None:
        assert torch.equal(buffers, averaged)  # of batch-norm: averaged, never stepped


def test_a_run_that_is_started_again_goes_on_and_ends_in_the_same_model(tmp_path: Path) -> None:
    what = experiment()
    for rounds in (1, 3, ROUNDS):  # each in a process that knows nothing of the one before
        result = run(*federation(tmp_path, what), rounds=rounds)
    assert torch.equal(vector(result.arrays, what), simulated(what)[0])
    assert [line["round"] for line in read_ledger(tmp_path / "checkpoint")] == [1, 2, 3, 4]
    names = sorted(path.name for path in (tmp_path / "checkpoint").glob("*.safetensors*"))
    assert names == ["4.safetensors", "spare.safetensors"]
    run(*federation(tmp_path / "whole", what))
    assert read_ledger(tmp_path / "checkpoint") == read_ledger(tmp_path / "whole" / "checkpoint")


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    run(*federation(tmp_path, experiment()), rounds=1)
    with pytest.raises(RunError, match=r"another run: seed is 3 there and 4 here; give its settings, or another"):
        run(*federation(tmp_path, experiment(seed=4)))


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    run(*federation(tmp_path, experiment()), rounds=1)
    path = tmp_path / "checkpoint" / "1.safetensors"
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    with pytest.raises(RunError, match="damaged, checksum"):
        run(*federation(tmp_path, experiment()))


def test_replies_that_cannot_be_stored_end_the_run_by_name_and_it_can_continue(tmp_path: Path) -> None:
    replies, what = tmp_path / "checkpoint" / "replies", experiment()
    run(*federation(tmp_path, what), rounds=1)
    shutil.rmtree(replies)
    replies.touch()
    with pytest.raises(RunError, match=r"cannot make .*replies: File exists; free space or make the folder writable"):
        run(*federation(tmp_path, what))
    replies.unlink()
    assert torch.equal(vector(run(*federation(tmp_path, what)).arrays, what), simulated(what)[0])


def test_a_new_run_of_the_same_name_does_not_meet_the_old_residuals(tmp_path: Path) -> None:
    what = experiment()
    run(*federation(tmp_path, what))
    (tmp_path / "checkpoint").rename(tmp_path / "old")
    result = run(*federation(tmp_path, what))
    assert torch.equal(vector(result.arrays, what), simulated(what)[0])
    assert len(list((tmp_path / "sites").iterdir())) == 2


# -- who takes part ----------------------------------------------------------------------------------------------------


def plain_app(value: float) -> ClientApp:
    """An app without the mod: adds a number to every weight."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        state = message.content.array_records["arrays"].to_torch_state_dict()
        assert state, "nothing to train"
        arrays = ArrayRecord({name: tensor + value for name, tensor in state.items()})
        return Message(RecordDict({"arrays": arrays, "m": MetricRecord({"num-examples": 10})}), reply_to=message)

    return app


def adding_app(folder: Path, value: float, spec: str | None = None) -> ClientApp:
    """The same with the mod."""
    return client_app(folder, plain_app(value)._registered_funcs["train.default"], spec)


def two_by_three() -> ArrayRecord:
    return ArrayRecord({"w": torch.zeros(2, 3), "b": torch.zeros(3)})


def test_dense_and_compressed_clients_meet_in_one_round(tmp_path: Path) -> None:
    apps = {5: adding_app(tmp_path, 1.0, "sign"), 6: plain_app(2.0), 7: adding_app(tmp_path, 6.0, "identity")}
    grid = LocalGrid(apps, {5: {"site-id": 1}, 6: {}, 7: {"partition-id": 0}})
    strategy = FedCAMS(server="fedavg", checkpoint=tmp_path / "server", min_available=3)
    result = strategy.start(grid, two_by_three(), 1, timeout=5.0)
    assert np.array_equal(result.arrays["w"].numpy(), np.full((2, 3), 3.0))
    (line,) = read_ledger(tmp_path / "server")
    assert line["cohort"] == [0, 1, 6]
    assert sorted(line["accepted"]) == ["0", "1", "6"]


def test_two_lines_make_an_app_of_flowers_own_one_of_ours(tmp_path: Path) -> None:
    """The same training under Flower's FedAvg without a mod, and with the two lines changed: the same model."""

    def ended(mods: list[Any], strategy: FedAvg) -> Any:
        apps = {5: ClientApp(mods=mods), 6: ClientApp(mods=mods)}
        for node, app in apps.items():
            app.train()(plain_app(float(node))._registered_funcs["train.default"])
        grid = LocalGrid(apps, {5: {"site-id": 0}, 6: {"site-id": 1}})
        return strategy.start(grid, two_by_three(), num_rounds=2).arrays

    theirs = ended([], FedAvg(fraction_evaluate=0.0))
    ours = ended([uplink("identity", state_dir=tmp_path)], FedCAMS(server="fedavg", checkpoint=tmp_path / "server"))
    assert list(theirs) == list(ours)
    assert all(np.array_equal(theirs[name].numpy(), ours[name].numpy()) for name in theirs)
    assert np.array_equal(ours["w"].numpy(), np.full((2, 3), 11.0))


def test_a_node_without_a_site_and_a_second_one_for_a_site_stay_out(tmp_path: Path) -> None:
    apps = {5: adding_app(tmp_path, 1.0), 6: adding_app(tmp_path, 1.0), 7: adding_app(tmp_path, 1.0)}
    grid = LocalGrid(apps, {5: {"site-id": 1}, 6: {}, 7: {"site-id": 1}})
    FedCAMS(server="fedavg", checkpoint=tmp_path / "server").start(grid, two_by_three(), 2, timeout=5.0)
    assert [line["cohort"] for line in read_ledger(tmp_path / "server")] == [[1], [1]]


def test_a_site_beyond_the_number_of_clients_is_named_and_not_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would never be drawn, but a round would begin as if all were there."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    grid = LocalGrid(dict.fromkeys((5, 6), adding_app(tmp_path, 1.0)), {5: {"site-id": 0}, 6: {"site-id": 2}})
    strategy = FedCAMS(server="fedavg", checkpoint=tmp_path / "server", clients=2, min_available=2)
    strategy.start(grid, two_by_three(), 1, timeout=0.2)
    assert read_ledger(tmp_path / "server")[0]["skipped"] == "1 clients connected, min_available=2"
    assert "node 6 cannot take part: it claims to be site 2; allowed: an integer from 0 to 1" in caplog.text


def test_a_node_that_restarts_as_another_site_takes_part_as_that_site(tmp_path: Path) -> None:
    """It keeps its id if it has a key, and may be back before the server has noticed that it was gone."""

    def restarted(node: int, message: Message, reply: Message | None) -> Message | None:
        if (node, message.metadata.group_id) == (6, "1"):
            grid.sites[6] = {"site-id": 3}
        return reply

    apps = {5: adding_app(tmp_path, 1.0), 6: adding_app(tmp_path, 1.0)}
    grid = LocalGrid(apps, {5: {"site-id": 1}, 6: {"site-id": 2}}, restarted)
    strategy = FedCAMS(server="fedavg", uplink="sign", checkpoint=tmp_path / "server", min_available=2)
    strategy.start(grid, two_by_three(), 4, timeout=5.0)
    first, second, *others = read_ledger(tmp_path / "server")
    assert sorted(first["accepted"]) == ["1", "2"]
    assert (sorted(second["accepted"]), second["absent"]) == (["1"], {"2": "its node is now site 3"})
    for line in others:
        assert (sorted(line["accepted"]), line["absent"], line["notes"]) == (["1", "3"], {}, {})
    rows = {(path.parent.parent.name, path.name.split("-")[0]) for path in tmp_path.rglob("*.rows")}
    assert rows == {("1", "1"), ("2", "2"), ("3", "3")}


def test_what_the_arrays_are(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    arrays = ArrayRecord(model.state_dict())
    for names in (ArrayNames.of(arrays), ArrayNames.of(arrays, model)):
        assert names.layout == Layout.of(model)
        assert names.buffer_layout == Layout.of_buffers(model)
        assert ArrayNames.from_json(names.to_json()) == names
        assert list(names.rest(arrays)) == ["1.num_batches_tracked"]
        x, buffers = names.vectors(ArrayRecord(dict(arrays)))
        again = names.join(x, buffers, names.rest(arrays))
        assert list(again) == list(arrays)
        assert all(np.array_equal(again[name].numpy(), arrays[name].numpy()) for name in arrays)
    with pytest.raises(LayoutError, match="no array of floating-point numbers"):
        ArrayNames.of(ArrayRecord({"n": torch.zeros(3, dtype=torch.int64)}))
    with pytest.raises(LayoutError, match="is not among the initial arrays"):
        ArrayNames.of(ArrayRecord({"0.weight": torch.zeros(2, 3)}), model)


@together("dtype", ["float32", "float64", "int64", "uint8"])
@together("shape", [(), (0,), (3,), (2, 3)])
def test_arrays_are_those_of_flower(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    made = to_array(values)
    theirs = Array(values)
    assert (made.dtype, made.shape, made.stype, made.data) == (theirs.dtype, theirs.shape, theirs.stype, theirs.data)
    assert np.array_equal(from_array(theirs), values)


class Tied(nn.Module):
    """A model whose output layer shares its weights with the embedding, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.embed.weight)
        self.out.weight = self.embed.weight


@pytest.mark.parametrize("mod", [True, False])
def test_tied_weights_travel_once_and_the_app_gets_them_under_all_their_names(tmp_path: Path, mod: bool) -> None:
    """An app that loads the arrays would otherwise overwrite the new weights with those of the first round."""
    app = ClientApp(mods=[uplink(state_dir=tmp_path / "site")] if mod else [])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = Tied()
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        with torch.no_grad():
            model.embed.weight += 1
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict())}), reply_to=message)

    strategy = FedCAMS(server="fedavg", checkpoint=tmp_path / "server", model=Tied())
    arrays = strategy.start(LocalGrid({5: app}, {5: {"site-id": 0}}), ArrayRecord(Tied().state_dict()), 3).arrays
    assert list(arrays) == ["embed.weight", "out.weight"]
    for array in arrays.values():
        assert np.array_equal(array.numpy(), np.full((3, 2), 3.0))
    assert read_ledger(tmp_path / "server")[0]["wire_up"] < 2 * 24 + 200


@pytest.mark.parametrize("run", ["", "../up", "a/b", ".hidden", "x" * 101])
def test_a_run_name_leads_nowhere_else(tmp_path: Path, run: str) -> None:
    with pytest.raises(SpecError, match="run="):
        FedCAMS(checkpoint=tmp_path, run=run)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


KINDS = ["lost", "damaged", "late", "", "error", ""]


class Faults:
    """What happens to replies on their way, as (round, node) decides; remembers what clients really sent."""

    def __init__(self) -> None:
        self.sent: dict[str, Tensor] = {}
        self.kept: dict[int, Message] = {}

    def __call__(self, node: int, message: Message, reply: Message | None) -> Message | None:
        if INSTRUCTION not in message.content.array_records or reply is None or reply.has_error():
            return reply
        record = reply.content.array_records[REPLY]
        answer = Reply.from_parts(message_parts(record, 10**9))
        self.sent[answer.digest.hex()] = decode(answer.streams["update"], max_d=100).double()
        kind, late = KINDS[derive(1, "fault", answer.round, node) % len(KINDS)], self.kept.pop(node, None)
        if kind == "damaged":
            record["0"] = Array("uint8", record["0"].shape, record["0"].stype, record["0"].data[:-1] + b"x")
        if kind == "late":
            self.kept[node] = reply
        if kind == "error":
            return Message(Error(5, "gone"), reply_to=message)
        return None if kind in ("lost", "late") else late or reply


def test_lost_refused_and_late_updates_leave_every_residual_right(tmp_path: Path) -> None:
    """In the end, for every site: accepted payloads + residual = the sum of its updates in accepted rounds."""
    what, rounds, log, faults = experiment(sampler="full", uplink="topk(k=2)"), 16, Log(), Faults()
    run(*federation(tmp_path, what, faults, log, min_available=1), rounds, timeout=0.15)
    ledger = read_ledger(tmp_path / "checkpoint")
    reasons = [reason for line in ledger for reason in line["refused"].values()]
    assert any("it came too late" in reason for reason in reasons)
    assert any("ChecksumMismatch" in reason for reason in reasons)
    assert any("no reply before the deadline" in line["absent"].values() for line in ledger)
    run(*federation(tmp_path, what, None, log), rounds + 1)  # settles what still waits
    for site in range(CLIENTS):
        accepted = {line["round"]: line["accepted"][str(site)] for line in ledger if str(site) in line["accepted"]}
        assert 0 < len(accepted) < rounds
        total = torch.stack([faults.sent[digest] for digest in accepted.values()]).sum(0) + residual(tmp_path, site)
        assert torch.allclose(total, torch.stack([log[site, round] for round in accepted]).sum(0), atol=1e-5)


def residual(tmp_path: Path, site: int) -> Tensor:
    """What the site still owes, where a reply waits that before it."""
    (folder,) = (tmp_path / "sites").iterdir()
    layout = build(experiment()).simulation.problem.layout
    store = RowStore.on_disk({"residual": layout}, folder / str(site) / "rows")
    store.rollback(store.snapshot_round or 0)
    return store.gather("residual", [site])[0].double()


def test_too_few_replies_or_clients_skip_the_round_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    what, log, faults = experiment(sampler="full"), Log(), Faults()
    grid, strategy, arrays = federation(tmp_path, what, faults, log, min_available=1, min_replies=CLIENTS)
    result = run(grid, strategy, arrays, 1, timeout=0.15)
    (line,) = read_ledger(tmp_path / "checkpoint")
    assert line["skipped"].endswith("valid replies, min_replies=4")
    assert line["accepted"] == {}
    assert torch.equal(vector(result.arrays, what), build(what).state.x)
    strategy = FedCAMS(server="fedavg", checkpoint=tmp_path / "lonely", min_available=9)
    result = strategy.start(LocalGrid(grid.apps, grid.sites), arrays, 1, timeout=0.2)
    (line,) = read_ledger(tmp_path / "lonely")
    assert line["skipped"] == "4 clients connected, min_available=9"
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert "[ROUND 1/1] skipped: 4 clients connected, min_available=9" in warned


def test_a_sampler_waits_for_as_many_as_it_draws(tmp_path: Path) -> None:
    what = experiment()
    grid, _, arrays = federation(tmp_path, what)
    strategy = FedCAMS(server="fedavg", checkpoint=tmp_path / "few", sampler="uniform(n=3)")
    everybody, grid.nodes = grid.nodes, grid.nodes[:2]
    strategy.start(grid, arrays, 1, timeout=0.2)
    grid.nodes = everybody
    strategy.start(grid, arrays, 2, timeout=60.0)
    first, second = read_ledger(tmp_path / "few")
    assert (first["skipped"], first["cohort"]) == ("2 clients connected, sampler=uniform(n=3)", [])
    assert len(second["accepted"]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": "weighted(n=2)"}, "does not know how many examples clients have; use uniform"),
        ({"sampler": "uniform(n=2)", "min_replies": 3}, "min_replies=3, but a cohort has at most 2 clients"),
        ({"sampler": "uniform(n=3)", "clients": 2}, "n=3 of only 2 clients"),
        ({"min_replies": 0}, "method: min_replies=0: out of range; allowed: an integer in [1, inf)"),
        ({"max_norm": 10}, "FedCAMS has no option 'max_norm'"),
        ({"uplnk": "sign"}, "FedCAMS has no option 'uplnk' (did you mean 'uplink'?); known: server, local, uplink"),
        ({"method": "fedavg"}, "method='fedavg' is a str; give a fedcams.Method, or its fields as keyword arguments"),
    ],
)
def test_options_that_cannot_work_are_refused_at_once(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        FedCAMS(server="fedavg", checkpoint=tmp_path / "server", **options)  # type: ignore[misc]


def test_an_app_that_fails_is_refused_and_its_residual_kept(tmp_path: Path) -> None:
    what, log = experiment(sampler="full"), Log()
    grid, strategy, arrays = federation(tmp_path, what, None, log)
    working = grid.apps[101]
    grid.apps[101] = ClientApp(mods=[uplink(state_dir=tmp_path / "sites")])

    @grid.apps[101].train()
    def train(message: Message, context: Context) -> Message:
        raise ValueError("no data today")

    run(grid, strategy, arrays, 1)
    grid.apps[101] = working
    run(grid, strategy, arrays, 2)
    first, second = read_ledger(tmp_path / "checkpoint")
    assert "no data today" in first["refused"]["1"]
    assert sorted(first["accepted"]) == ["0", "2", "3"]
    assert sorted(second["accepted"]) == ["0", "1", "2", "3"]


OWN = Layout(("w", "b"), ((2, 3), (3,)))


# -- hostile clients ---------------------------------------------------------------------------------------------------


def evil_app(folder: Path, change: Callable[[Message], None]) -> ClientApp:
    """A client that introduces itself properly, and then changes what it sends."""

    def evil(message: Message, context: Context, app: Callable[[Message, Context], Message]) -> Message:
        if INSTRUCTION not in message.content.array_records:
            return app(message, context)
        asked = Instruction.from_parts(message_parts(message.content.array_records[INSTRUCTION], 10**9))
        answer = Reply(asked.round, asked.client, {"update": encode("topk(k=3)", torch.ones(9), OWN)}, 10, 1, 0.5)
        reply = Message(RecordDict({REPLY: message_record([answer.to_bytes()])}), reply_to=message)
        change(reply)
        return reply

    app = ClientApp(mods=[evil, uplink(state_dir=folder)])
    app.train()(plain_app(1.0)._registered_funcs["train.default"])
    return app


def resent(reply: Message, answer: Reply) -> None:
    reply.content.array_records[REPLY] = message_record(answer.to_parts())


def mutate(seed: int) -> Callable[[Message], None]:
    """One of a thousand ways to change a valid reply."""
    rng = np.random.default_rng(seed)

    def change(reply: Message) -> None:
        parts = [bytearray(part) for part in message_parts(reply.content.array_records[REPLY], 10**9)]
        whole = bytearray(b"".join(parts))
        kind = seed % 5
        if kind == 0:
            whole[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            whole = whole[: rng.integers(len(whole))]
        elif kind == 2:
            whole += rng.bytes(int(rng.integers(1, 50)))
        elif kind == 3:
            start = int(rng.integers(len(whole)))
            whole[start : start + 8] = b"\xff" * 8
        else:
            whole = bytearray(rng.bytes(int(rng.integers(1, 300))))
        cut = int(rng.integers(len(whole) + 1))
        pieces = [bytes(whole)] if rng.integers(2) else [bytes(whole[:cut]), bytes(whole[cut:])]
        reply.content.array_records[REPLY] = message_record(pieces)

    return change


def test_a_thousand_mutated_replies_take_nothing_down_and_change_nothing(tmp_path: Path) -> None:
    """Every mutated reply is offered to the server as Flower would; a good client's update counts in every round."""
    seeds = iter(range(10**6))
    evil = {6 + i: evil_app(tmp_path / "evil", lambda reply: mutate(next(seeds))(reply)) for i in range(100)}
    grid = LocalGrid({5: adding_app(tmp_path, 1.0, "identity"), **evil}, {5 + i: {"site-id": i} for i in range(101)})
    strategy = FedCAMS(server="fedavg", checkpoint=tmp_path / "server", min_available=101)
    result = strategy.start(grid, two_by_three(), 10, timeout=60.0)
    assert next(seeds) >= 1000
    for line in read_ledger(tmp_path / "server"):
        assert list(line["accepted"]) == ["0"]
        assert len(line["refused"]) == 100
    assert np.array_equal(result.arrays["w"].numpy(), np.full((2, 3), 10.0))


def lie(**changes: Any) -> Callable[[Message], None]:
    def change(reply: Message) -> None:
        answer = Reply.from_parts(message_parts(reply.content.array_records[REPLY], 10**9))
        resent(reply, dataclasses.replace(answer, **changes))

    return change


def newer(reply: Message) -> None:
    """As a client would send it whose wire format is of the next version."""
    (data,) = message_parts(reply.content.array_records[REPLY], 10**9)
    reply.content.array_records[REPLY] = message_record([data[:4] + b"\2" + data[5:]])


NAN = encode("identity", torch.ones(9), OWN)
NAN = NAN[:-8] + b"\0\0\xc0\x7f"
NAN += zlib.crc32(NAN).to_bytes(4, "little")
LIES: list[tuple[str, Callable[[Message], None]]] = [
    ("NonFinite: field 'values': 1 of 9 numbers are NaN", lie(streams={"update": NAN})),
    ("LayoutMismatch: the payload has layout", lie(streams={"update": encode("sign", torch.ones(9))})),
    ("UpdateError: client 1 answers for client 0", lie(client=0)),
    ("UpdateError: an update for round 9 in round 1", lie(round=9)),
    ("UpdateError: a message of 1000065 bytes; at most", lie(streams={"update": bytes(10**6)})),
    (
        "UpdateError: an update of norm 3e\\+10; at most max_norm=100",
        lie(streams={"update": encode("sign", torch.full((9,), 1e10), OWN)}),
    ),
    ("NonFinite: client 1 reports the loss nan", lie(loss=float("nan"))),
    ("UnknownVersion: version 2; this reader knows version 1, update fedcams", newer),
    ("UpdateError: the reply contains nothing", lambda reply: reply.content.array_records.pop(REPLY) and None),
]


@pytest.mark.parametrize(("reason", "change"), LIES, ids=[reason for reason, _ in LIES])
def test_a_client_that_lies_is_refused_with_the_reason(
    tmp_path: Path, reason: str, change: Callable[[Message], None]
) -> None:
    apps = {5: adding_app(tmp_path, 1.0, "identity"), 6: evil_app(tmp_path / "evil", change)}
    grid = LocalGrid(apps, {5: {"site-id": 0}, 6: {"site-id": 1}})
    strategy = FedCAMS(server="fedavg", checkpoint=tmp_path / "server", min_available=2, transforms="max_norm(100)")
    result = strategy.start(grid, two_by_three(), 1, timeout=5.0)
    (line,) = read_ledger(tmp_path / "server")
    assert re.match(reason, line["refused"]["1"])
    assert list(line["accepted"]) == ["0"]
    assert np.array_equal(result.arrays["w"].numpy(), np.ones((2, 3)))
