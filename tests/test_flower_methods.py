"""Methods over Flower: each gives the simulator's model, despite restarts, and refuses the same bad clients."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedcams import SpecError
from fedcams.engines import Problem
from fedcams.experiment import build
from fedcams.flower import FedCAMS, uplink
from fedcams.flower.checkpoint import read_ledger
from fedcams.flower.records import ABOUT, INSTRUCTION, about
from fedcams.rounds.server import ServerState
from fedcams.runs import RunError
from fedcams.runs.files import write_private
from fedcams.simulation import RoundRecord
from flower_apps import (
    CLIENTS,
    Federated,
    Stopped,
    experiment,
    federation,
    quick,
    run,
    run_method,
    simulation,
    started,
    vector,
    vectors,
)
from flower_grid import LocalGrid, identify
from test_flower import adding_app, plain_app, two_by_three
from test_flower_downlink import Kinds

__all__ = ["quick"]  # a fixture for these tests
BATCH_NORM = {"task": "digits", "model": "convmixer(dim=4, depth=1, kernel=3)", "local": "sgd(steps=2)", "rounds": 3}
METHODS: dict[str, dict[str, Any]] = {
    "average": {"average": "ema(0.5)"},
    "server rate": {"server": "fedams(lr=cosine(0.2, 0.01), eps=1e-3)"},
    "local rate": {"local": "sgd(lr=warmup(2, then=linear(0.1, 0.01)), steps=5, batch=8)"},
    "ratio": {"uplink": "topk(ratio=linear(1/8, 1/2))"},
    "ratio down": {"downlink": "replica(topk(ratio=linear(1/8, 1/2)))"},
    "scaffold": {"control": "scaffold"},
    "compressed": {"control": "scaffold(blockq(bits=8))", "downlink": "shared(topk(ratio=1/8))", "average": "ema(0.9)"},
    "fednova": {"transforms": "fednova", "local": "sgd(epochs=1, batch=8)", "partition": "dirichlet(alpha=0.3)"},
    "clip": {"transforms": "clip(norm=0.5) + max_norm(0.4)", "uplink": "sign"},
    "buffers": {**BATCH_NORM, "buffers": "blockq", "average": "ema(0.5)"},
    "buffers replica": {**BATCH_NORM, "buffers": "blockq", "downlink": "replica(blockq(bits=2))", "rounds": 4},
    "buffers shared": {**BATCH_NORM, "buffers": "topk(ratio=1/4)", "downlink": "shared(topk(ratio=1/8))", "rounds": 4},
    "buffers stateless": {**BATCH_NORM, "buffers": "blockq", "downlink": "stateless"},
    "trimmed": {"aggregate": "trimmed(fraction=1/4)", "sampler": "full"},
    "sampler": {"weighting": "sampler"},
    "adamw": {"local": "adamw(lr=0.01, steps=3, batch=8)"},
}


def assert_simulated(found: Federated, expected: tuple[ServerState, list[RoundRecord]]) -> None:
    """The same model, buffers, average and record of every round."""
    state, records = expected
    average = (None, None) if state.average is None else state.average
    for ours, theirs in zip(found[:3], (state.x, state.buffers, average[0]), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, theirs)
    for line, record in zip(found.ledger, records, strict=True):
        refused = {str(client): reason for client, reason in record.refused.items()}
        assert line["refused"] == refused
        assert sorted(line["accepted"]) == [str(client) for client in record.cohort if str(client) not in refused]
        assert [line[key] for key in KEYS] == [getattr(record, key) for key in KEYS]


KEYS = ("round", "cohort", "delta_norm", "wire_up", "wire_down")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_bit_for_bit_the_simulators_also_after_a_restart(tmp_path: Path, name: str) -> None:
    """Server and clients know nothing after round 2 but what is on disk."""
    expected = simulation(experiment(**METHODS[name]))
    assert_simulated(run_method(tmp_path, restarts=(2,), **METHODS[name]), expected)
    if name == "clip":  # some updates are refused, and some are not
        assert 0 < sum(len(record.refused) for record in expected[1]) < sum(len(r.cohort) for r in expected[1])
    if name == "fednova":  # clients take different numbers of steps
        assert len(set(map(len, build(experiment(**METHODS[name])).simulation.problem.clients.parts))) > 1  # type: ignore[attr-defined]


def test_a_private_method_is_the_simulators_with_the_same_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secret cohorts, noise and ε; after a restart the key is that of the checkpoint, and not a new one."""
    saved = tmp_path / "checkpoint" / "state.json"
    monkeypatch.setattr("fedcams.rounds.server.new_key", lambda: ("00" if saved.exists() else "5a") * 32)
    keys = {"privacy": "server(clip=1, epsilon=30)", "guard": "none", "sampler": "bernoulli(p=0.4)", "rounds": 6}
    state, records = expected = simulation(experiment(**keys))
    assert any(record.cohort for record in records)
    found = run_method(tmp_path, restarts=(2,), **keys)
    assert_simulated(found, expected)
    assert [line["epsilon"] for line in found.ledger] == [record.probes["epsilon"] for record in records]
    assert 29 < found.ledger[-1]["epsilon"] <= 30
    files = [tmp_path / "checkpoint" / name for name in ("state.json", "ledger.jsonl")]
    assert [path.stat().st_mode & 0o777 for path in files] == [0o600, 0o600]
    assert state.secret.encode() not in files[1].read_bytes()


def test_one_client_more_or_less_connected_moves_a_private_mean_by_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the round wanted as many as are there with it: a skipped round would lose all others' updates too."""
    monkeypatch.setattr("fedcams.privacy.server_noise.gaussian", lambda *used: np.zeros(used[-1]))
    what = experiment(privacy="server(clip=1, noise=1)", guard="none", sampler="full", server="fedavg")
    models = []
    for connected in (CLIENTS, CLIENTS - 1):
        grid, strategy, arrays = federation(tmp_path / str(connected), what, min_available=CLIENTS)
        grid.nodes = grid.nodes[:connected]
        models.append(vector(run(grid, strategy, arrays, 1, timeout=0.2).arrays, what))
        (line,) = read_ledger(tmp_path / str(connected) / "checkpoint")
        assert (line["skipped"], len(line["accepted"])) == ("", connected)
    assert 0 < CLIENTS * float((models[0] - models[1]).norm()) <= 1 + 1e-5


def test_a_private_round_without_nodes_is_a_step_of_noise(tmp_path: Path) -> None:
    what = experiment(privacy="server(clip=1, noise=1)", guard="none", sampler="full")
    grid, strategy, arrays = federation(tmp_path, what)
    grid.nodes = []
    run(grid, strategy, arrays, 2, timeout=0.05)
    for line in read_ledger(tmp_path / "checkpoint"):
        assert (line["skipped"], line["accepted"]) == ("", {})
        assert line["delta_norm"] > 0
        assert line["epsilon"] > 0


def test_a_private_federation_needs_to_know_its_clients_and_a_secret_sampler(tmp_path: Path) -> None:
    private = {"privacy": "server(clip=1, noise=1)", "guard": "none", "checkpoint": tmp_path / "checkpoint"}
    with pytest.raises(SpecError, match=r"privacy=server.* divides by a fixed number of clients.*give clients"):
        FedCAMS(**private, sampler="bernoulli(p=0.5)")
    with pytest.raises(SpecError, match=r"privacy=server.* and sampler=uniform\(n=3\)"):
        FedCAMS(**private, sampler="uniform(n=3)", clients=9)


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_server_killed_while_it_saves_goes_on_with_control_average_and_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The kill falls before the checkpoint replaces the old one, or before its rows are marked."""
    what = experiment(**METHODS["server rate"], **METHODS["compressed"])
    saves = iter(range(10))

    def dying(path: Path, data: bytes) -> None:
        last = next(saves) == 2
        if moment == "between" or not last:
            write_private(path, data)
        if last:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr("fedcams.runs.checkpoint.write_private", dying)
        with pytest.raises(Stopped):
            started(what, federation(tmp_path, what), None)
    assert_simulated(run_method(tmp_path, **METHODS["server rate"], **METHODS["compressed"]), simulation(what))


def test_a_method_with_schedules_that_span_the_run_goes_on_only_with_as_many_rounds(tmp_path: Path) -> None:
    what = experiment(**METHODS["server rate"])
    run(*federation(tmp_path, what), 4)
    with pytest.raises(RunError, match="another run: rounds is 4 there and 5 here"):
        run(*federation(tmp_path, what), 5)


def test_the_average_is_evaluated_beside_the_model(tmp_path: Path) -> None:
    what = experiment(average="ema(0.5)")
    grid, strategy, arrays = federation(tmp_path, what)

    def norm(round: int, found: ArrayRecord) -> MetricRecord:
        return MetricRecord({"norm": float(vector(found, what).norm())})

    result = strategy.start(grid, arrays, what.rounds, timeout=5.0, evaluate_fn=norm)
    last = result.evaluate_metrics_serverapp[what.rounds]
    state, _ = simulation(what)
    assert state.average is not None
    assert strategy.averaged_arrays is not None
    assert last == {"norm": float(state.x.norm()), "averaged_norm": float(state.average.x.norm())}
    assert torch.equal(vectors(strategy.averaged_arrays, what)[0], state.average.x)


# -- clients whose training fails --------------------------------------------------------------------------------------


def poison(problem: Problem) -> None:
    """Some examples of clients 1 and 2 are not finite: training fails in the rounds whose batches draw one."""
    problem.clients.x = problem.clients.x.clone()  # type: ignore[attr-defined]
    for client in (1, 2):
        places = problem.clients.places(client)[::60]  # type: ignore[attr-defined]
        problem.clients.x[places] = float("nan")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"downlink": "shared(topk(ratio=1/8))"},
        {"downlink": "replica(blockq(bits=2))"},
        {"control": "scaffold"},
        {"aggregate": "trimmed(fraction=1/4)", "uplink": "sign"},
    ],
    ids=str,
)
def test_a_client_whose_training_is_not_finite_is_refused_as_in_the_simulator(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """It says what it holds, so it is in step: it is not told again, and the next message builds on that."""
    changes = {**changes, "rounds": 6, "sampler": "full"}
    kinds = Kinds() if "downlink" in changes else None
    found = run_method(tmp_path, restarts=(3,), fault=kinds, change=poison, **changes)
    assert_simulated(found, simulation(experiment(**changes), poison))
    refused = [set(line["refused"]) for line in found.ledger]
    assert set.union(*refused) == {"1", "2"}
    assert min(map(len, refused)) < 2
    for line in found.ledger:
        assert all(re.match("UpdateError: the training reports the loss nan", why) for why in line["refused"].values())
        assert not line["notes"]
    if kinds is not None:
        assert all(kinds.dense[round, node] == [round == 1] for round, node in kinds.dense)


# -- control variates --------------------------------------------------------------------------------------------------


def test_an_app_that_ignores_the_shift_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    grid = LocalGrid({5: adding_app(tmp_path, 1.0)}, {5: {"site-id": 0}})
    strategy = FedCAMS(server="fedavg", control="scaffold", clients=1, checkpoint=tmp_path / "server")
    strategy.start(grid, two_by_three(), 2, timeout=5.0)
    for line in read_ledger(tmp_path / "server"):
        assert "must add the array record 'fedcams.shift' to each of them and report" in line["refused"]["0"]
        assert "shift-applied=1 and num-steps" in line["refused"]["0"]


def test_a_node_without_the_mod_cannot_take_part_in_control(tmp_path: Path) -> None:
    grid = LocalGrid({6: plain_app(1.0)}, {6: {}})
    strategy = FedCAMS(server="fedavg", control="scaffold", clients=1, checkpoint=tmp_path / "server")
    strategy.start(grid, two_by_three(), 1, timeout=5.0)
    (line,) = read_ledger(tmp_path / "server")
    assert "control=scaffold needs what only clients with the fedcams mod keep" in line["refused"]["6"]


def test_control_needs_to_know_how_many_clients_there_are(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"control=scaffold: the server must know how many clients .* give clients="):
        FedCAMS(control="scaffold", checkpoint=tmp_path)


@pytest.mark.parametrize(
    "parts", [{"control": "scaffold", "local": "adamw"}, {"uplink": "randk(ratio=1/4, scaled=true)"}]
)
def test_parts_that_do_not_fit_are_refused_before_anything_runs(tmp_path: Path, parts: dict[str, str]) -> None:
    with pytest.raises(SpecError, match=r"scaffold.*adamw|randk.*feedback"):
        FedCAMS(checkpoint=tmp_path / "server", clients=2, **parts)
    assert not (tmp_path / "server").exists()


@pytest.mark.parametrize("transforms", ["fednova", "clip(norm=3)", "clip(norm=3) + max_norm(4)"])
def test_transforms_reach_clients_without_the_mod(tmp_path: Path, transforms: str) -> None:
    """The server does their side: updates of norms 3 and 6, by three steps each under fednova."""
    apps = {5: plain_app(1.0), 6: plain_app(2.0)}
    for app in apps.values():
        train = app._registered_funcs["train.default"]
        app._registered_funcs["train.default"] = stepping(train)
    strategy = FedCAMS(
        server="fedavg", transforms=transforms, local="sgd", checkpoint=tmp_path / "server", min_available=2
    )
    result = strategy.start(LocalGrid(apps, {5: {}, 6: {}}), two_by_three(), 1, timeout=5.0)
    assert np.allclose(result.arrays["w"].numpy(), 1.5 if transforms == "fednova" else 1.0)


def stepping(train: Any) -> Any:
    """The same training, which says that it took three steps and finds the local rate of the round."""

    def stepped(message: Message, context: Context) -> Message:
        reply = train(message, context)
        assert float(message.content.config_records["config"]["local-rate"]) > 0  # type: ignore[arg-type]
        next(iter(reply.content.metric_records.values()))["num-steps"] = 3
        return reply

    return stepped


# -- peers of another version ------------------------------------------------------------------------------------------


def test_a_node_of_another_version_is_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def older(node: int, message: Message, reply: Message | None) -> Message | None:
        if reply is not None and node in (6, 7) and INSTRUCTION not in message.content.array_records:
            told = {key: value for key, value in reply.content.config_records[ABOUT].items() if key != "protocol"}
            reply.content[ABOUT] = ConfigRecord(told if node == 6 else {**told, "protocol": 3})
        return reply

    apps = {node: adding_app(tmp_path, 1.0) for node in (5, 6, 7)}
    grid = LocalGrid(apps, {node: {"site-id": node} for node in apps}, older)
    FedCAMS(server="fedavg", checkpoint=tmp_path / "server").start(grid, two_by_three(), 1, timeout=5.0)
    assert [line["cohort"] for line in read_ledger(tmp_path / "server")] == [[5]]
    told = " ".join(caplog.messages)
    assert "node 6 speaks protocol 1 (fedcams 0.1); this is protocol 2 (fedcams 0.2): update it" in told
    assert "node 7 speaks protocol 3 (another fedcams); this is protocol 2 (fedcams 0.2): update this side" in told


@pytest.mark.parametrize("kind", ["greeting", "instruction"])
@pytest.mark.parametrize(("protocol", "who"), [(None, "protocol 1 (fedcams 0.1)"), (3, "protocol 3 (another fedcams)")])
def test_a_server_of_another_version_is_refused_by_name(
    tmp_path: Path, kind: str, protocol: int | None, who: str
) -> None:
    identify()
    told = about(kind=kind, **({} if protocol is None else {"protocol": protocol}))
    message = Message(RecordDict({ABOUT: told}), 5, "train")
    reply = uplink(state_dir=tmp_path)(message, Context(1, 5, {"site-id": 0}, RecordDict(), {}), unreachable)
    assert f"UnknownVersion: the server speaks {who}" in str(reply.content.config_records[ABOUT]["refused"])


def unreachable(message: Message, context: Context) -> Message:
    raise AssertionError("the app is not to be asked")


# -- folders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.json", "state.json"])
def test_damage_of_a_single_byte_is_refused_by_a_sentence(tmp_path: Path, name: str) -> None:
    what = experiment(average="ema(0.5)", control="scaffold")
    run(*federation(tmp_path, what), 1)
    path = tmp_path / "checkpoint" / name
    data = path.read_bytes()
    _, strategy, arrays = federation(tmp_path, what)
    for place in range(0, len(data), max(1, len(data) // 60)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(RunError, match=rf"{name}: damaged, its contents do not match its digest; restore it, or"):
            strategy.start(LocalGrid({}, {}), arrays, 2, timeout=0.1)
    path.write_bytes(data)
    assert torch.equal(run_method(tmp_path, average="ema(0.5)", control="scaffold").x, simulation(what)[0].x)


def test_folders_of_version_0_1_are_refused_and_told_who_reads_them(tmp_path: Path) -> None:
    what = experiment()
    _, strategy, arrays = federation(tmp_path, what)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    run_json, state_json = {"fedcams_flower": 1, "name": "run", "run": "run-1"}, {"round": 1, "state": {}, "tensors": 1}
    for name, values in {"run.json": run_json, "state.json": state_json}.items():
        (folder / name).write_text(json.dumps(values, indent=1))
    for use in (lambda: strategy.start(LocalGrid({}, {}), arrays, 2), lambda: read_ledger(folder)):
        with pytest.raises(RunError, match=r"written by fedcams 0\.1; version 0\.1\.0 is the last one that reads it"):
            use()
    assert sorted(path.name for path in folder.iterdir()) == ["run.json", "state.json"]


def test_a_site_folder_of_version_0_1_keeps_its_site_out(tmp_path: Path) -> None:
    what = experiment(sampler="full")
    run(*federation(tmp_path, what), 1)
    (folder,) = (tmp_path / "sites").iterdir()
    (folder / "1" / "residuals").mkdir()
    run(*federation(tmp_path, what), 2)
    line = read_ledger(tmp_path / "checkpoint")[-1]
    assert "written by fedcams 0.1; version 0.1.0 is the last one that reads it" in line["refused"]["1"]
    assert sorted(line["accepted"]) == ["0", "2", "3"]
