"""Noise at the client: what is sent, which key is used, how much ε it spends, and what is refused."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

import oracle
from fedcams import Layout, Method, SpecError, encode
from fedcams.engines import CohortUpdate
from fedcams.errors import ResidualError, UpdateError
from fedcams.flower import FedCAMS, uplink
from fedcams.flower.checkpoint import read_ledger
from fedcams.flower.records import ABOUT, REPLY, message_parts
from fedcams.own import simulate
from fedcams.privacy import Participation, Privacy
from fedcams.privacy.accountant import ORDERS, epsilon, noise_for
from fedcams.privacy.secret import client_key
from fedcams.report.collection import collect
from fedcams.report.sections import notes
from fedcams.rounds import Client, ClientUpdate, Outgoing, Received, Reply, Server, answer_from_parts
from fedcams.rounds import client as client_side
from fedcams.rounds import server as server_side
from fedcams.rounds.durable import DurableClient
from fedcams.rounds.private import simulated_keys
from fedcams.rounds.site_secret import FILE, SiteSecret
from fedcams.runs import resume, run
from flower_apps import Stopped, experiment, quick, run_method, simulation
from flower_grid import LocalGrid, copied
from halves import Point, assert_equal_rounds, net, quadratic_loss, quadratics
from halves import run as run_small
from test_flower import plain_app, two_by_three
from test_flower_methods import assert_simulated
from test_privacy import KEY, OTHER, correlation, hostile
from test_runs import lasting, small, stopped

__all__ = ["quick"]  # a fixture for these tests
B, D = 0.5, 48
NOISY = {"privacy": f"client(clip={B}, noise=2, delta=1e-4)", "guard": "none"}


def sent(updates: Callable[[int, int], Tensor], d: int = D, key: str = KEY, round: int = 1, **fields: Any) -> Outgoing:
    """What three clients send after these updates."""
    client = Client(Method(**{**NOISY, **fields}), Layout.flat(d), noise_keys=simulated_keys(key))
    ids = [0, 1, 2]
    rows = torch.stack([updates(round, i) for i in ids])
    losses = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
    trained = CohortUpdate(rows.clone(), None, losses, [7, 8, 9], [3, 4, 5], 0.1)
    return client_side.respond_(client, ids, Received(torch.zeros(d), None), trained, round, seed=0)


def decoded(outgoing: Outgoing, d: int = D) -> Tensor:
    codec, code = outgoing.arrival.codes["update"]
    return codec.decode(code, Layout.flat(d)).double()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that is zero, so that what is sent shows the update under it."""
    monkeypatch.setattr("fedcams.privacy.client_noise.gaussian", lambda *used: np.zeros(used[-1]))


# -- what leaves a client ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("kind", ["huge", "constant", "alternating", "spikes", "small"])
def test_no_update_under_the_noise_is_longer_than_the_bound(kind: str) -> None:
    for round in range(1, 6):
        norms = decoded(sent(hostile(kind), round=round)).norm(dim=1)
        assert float(norms.max()) <= B * (1 + 1e-6)
        assert kind in ("small", "spikes") or float(norms.min()) > B * (1 - 1e-6)


def test_the_noise_comes_before_the_memory_which_is_not_clipped() -> None:
    """h = clip(Δ) + noise + e: what compression loses of the noise is owed too."""
    made = run_small(**NOISY, uplink="topk(ratio=1/8)", rounds=3, cohort="full").run()
    rows = made.simulation.client.rows
    assert rows is not None
    assert float(rows.gather("residual", range(8)).norm(dim=1).min()) > 2 * B


def test_noise_has_the_stated_deviation_and_is_unrelated_unless_everything_repeats() -> None:
    d = 50_000
    quiet = lambda round, client: torch.full((d,), 1e-6)  # noqa: E731
    noise = decoded(sent(quiet, d), d) / (2 * B)
    assert noise.std(dim=1).numpy() == pytest.approx(1, abs=5 * (0.5 / d) ** 0.5)
    assert abs(float(noise.mean())) < 5 / (3 * d) ** 0.5
    assert torch.equal(noise, decoded(sent(quiet, d), d) / (2 * B))
    louder = lambda round, client: torch.full((d,), 1.1e-6)  # noqa: E731
    others = [sent(louder, d), sent(quiet, d, OTHER), sent(quiet, d, round=2)]
    for other in [noise[1], noise[2], *(decoded(outgoing, d)[0] for outgoing in others)]:
        assert abs(correlation(noise[0], other)) < 5 / d**0.5


def test_a_client_tells_nothing_but_its_noisy_update() -> None:
    outgoing = sent(hostile("small"))
    assert outgoing.arrival.losses == (0.0,) * 3
    assert outgoing.arrival.facts.examples == outgoing.arrival.facts.steps == (0,) * 3
    record = run_small(**NOISY, rounds=1).run()[0]
    assert record.train_loss is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
def test_a_client_whose_training_failed_sends_noise(bad: float) -> None:
    """A refusal would tell the server, and missing noise would tell everyone else."""
    outgoing = sent(lambda round, client: torch.full((D,), bad if client == 1 else 0.0))
    assert not outgoing.refused
    assert bool(torch.isfinite(decoded(outgoing)).all())
    losing = CohortUpdate(torch.ones(1, D), None, torch.tensor([math.nan]), [1], [1], 0.1)
    client = Client(Method(**NOISY), Layout.flat(D), noise_keys=simulated_keys(KEY))
    alone = client_side.respond_(client, [1], Received(torch.zeros(D), None), losing, 1, seed=0)
    assert torch.equal(decoded(alone)[0], decoded(sent(lambda round, client: torch.zeros(D)))[1])


def test_rounds_are_the_oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping and noise first, then error feedback and top-k, the mean and FedAMS."""

    def standard(key: str, purpose: str, round: int, about: bytes, count: int) -> np.ndarray:
        return np.random.default_rng([int(key[:12], 16), round]).standard_normal(count)

    monkeypatch.setattr("fedcams.privacy.client_noise.gaussian", standard)
    clients, d, rounds = 6, 12, 8
    made = simulate(
        Point(d), quadratics(clients, d), loss=quadratic_loss, cohort=4, rounds=rounds, seed=2, engine="loop",
        privacy="client(clip=0.7, noise=0.3, delta=0.01)", guard="none", uplink="topk(ratio=1/3)",
        server="fedams(lr=0.1, eps=1e-3)", local="sgd(lr=0.05, steps=3)",
    )  # fmt: skip
    made.state = made.state._replace(secret=KEY)
    noise = {(t, i): standard(client_key(KEY, i), "", t, b"", d) for t in range(1, rounds + 1) for i in range(clients)}
    update = oracle.noisy(oracle.descent(oracle.quadratic(clients, d), 3, 0.05), 0.7, 0.3, lambda t, i: noise[t, i])
    models, cohorts = [], []
    for record in made:
        cohorts.append(list(record.cohort))
        models.append(made.state.x.double().numpy().copy())
    step = lambda memory, x, delta: oracle.fedams(memory, x, delta, lr=0.1, eps=1e-3)  # noqa: E731
    expected = oracle.fedcams(np.zeros(d), update, cohorts, step, lambda h: oracle.topk(h, "1/3"))
    np.testing.assert_allclose(models, expected, atol=2e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"uplink": "topk(ratio=1/8)", "server": "fedams", "downlink": "shared(blockq)", "cohort": 3},
        {"uplink": "blockq", "average": "ema(0.5)", "cohort": "bernoulli(p=0.3)", "min_replies": 2},
        {"transforms": "clip(norm=0.2)", "privacy": "client(clip=1, epsilon=500, delta=1e-3)", "cohort": "full"},
    ],
)
def test_batched_rounds_are_the_two_halves_bit_for_bit(fields: dict[str, Any]) -> None:
    batched, apart = (run_small(**{**NOISY, **fields}, rounds=4, test=None, engine="loop") for _ in range(2))
    for history in (batched, apart):
        history.state = history.state._replace(secret=KEY)
    assert_equal_rounds(batched, apart)


# -- what it costs -----------------------------------------------------------------------------------------------------


def gaussian_epsilon(squared_distances: float, delta: float) -> float:
    """ε of Gaussian noise of deviation 1 on vectors this far apart, squared and summed over rounds."""
    orders = np.array(ORDERS)
    rdp = orders * squared_distances / 2
    return float((rdp + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)).min())


def test_the_server_and_those_who_see_models_learn_what_records_say() -> None:
    """Against the server every answer counts with its own noise; a mean of n updates has n noises."""
    history = run_small(**NOISY, rounds=6, cohort="bernoulli(p=0.5)", seed=3)
    answers, shares = dict.fromkeys(range(8), 0), dict.fromkeys(range(8), 0.0)
    for record in history:
        for client in record.cohort:
            answers[client] += 1
            shares[client] += 1 / len(record.cohort)
        most, share = max(answers.values()), max(shares.values())
        assert record.probes["local_epsilon"] == pytest.approx(gaussian_epsilon(most / 2**2, 1e-4))
        assert record.probes["epsilon"] == pytest.approx(gaussian_epsilon(share / 2**2, 1e-4))
    assert len({*answers.values()}) > 1
    assert most < 6, "no client is asked in every round, nor counted as if it were"


@pytest.mark.parametrize("fields", [{"uplink": "sign"}, {"transforms": "max_norm(1e6)"}, {"uplink": "blockq(bits=8)"}])
def test_noises_of_compressed_or_refused_updates_do_not_add_up(fields: dict[str, Any]) -> None:
    """The mean of sign(y_i) is no function of the sum of the y_i."""
    last = run_small(**{**NOISY, **fields}, rounds=3, cohort="full").run()[-1].probes
    assert last["epsilon"] == last["local_epsilon"] == epsilon(1.0, 2.0, 3, 1e-4)
    plain = run_small(**NOISY, rounds=3, cohort="full").run()[-1].probes
    assert plain["epsilon"] == pytest.approx(epsilon(1.0, 2.0 * 8**0.5, 3, 1e-4))


def test_a_target_is_what_a_client_may_lose_to_the_server() -> None:
    noise = noise_for(300.0, 1.0, 5, 1e-4)
    target = {**NOISY, "privacy": "client(clip=1/2, epsilon=300, delta=1e-4)"}
    last = run_small(**target, rounds=5, cohort="full").run()[-1].probes["local_epsilon"]
    assert last is not None
    assert 295 < last <= 300
    who = Participation(1.0, 8, 5)
    assert Privacy.parse(target["privacy"]).multiplier(who) == noise
    assert Method(**target).depends_on_rounds
    with pytest.raises(SpecError, match="run of unknown length; give rounds"):
        Method(**target).check_rounds(None)


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED = {
    "guard=adaptive": {"guard": "adaptive"},
    "aggregate=median": {"aggregate": "median"},
    "weighting=examples": {"weighting": "examples"},
    "weighting=sampler": {"weighting": "sampler"},
    "control=scaffold": {"control": "scaffold"},
    "transforms=fednova": {"transforms": "fednova"},
}


@pytest.mark.parametrize("named", REFUSED)
def test_parts_for_which_the_claim_would_be_wrong_are_refused(named: str) -> None:
    with pytest.raises(SpecError, match=rf"privacy=client\(clip=0.5, noise=2, delta=1e-4\) and {named}: .*; "):
        Method(**{**NOISY, **REFUSED[named]})


def test_samplers_by_size_buffers_and_large_deltas_are_refused() -> None:
    with pytest.raises(SpecError, match=r"and sampler=weighted.*use uniform, bernoulli or full"):
        run_small(**NOISY, cohort="weighted(n=3)")
    with pytest.raises(SpecError, match=r"does not cover buffers.*1.running_mean"):
        run_small(**NOISY, model=net(norm=True))
    with pytest.raises(SpecError, match=r"with 8 clients: a delta of 1/clients"):
        run_small(privacy="client(clip=1, noise=1, delta=0.2)", guard="none")
    client, received = Client(Method(**NOISY), Layout.flat(D)), Received(torch.zeros(D), None)
    trained = CohortUpdate(torch.ones(1, D), None, torch.zeros(1), [1], [1], 0.1)
    with pytest.raises(SpecError, match=r"there are no keys; give Client\(noise_keys"):
        client_side.respond_(client, [0], received, trained, 1, seed=0)


def test_a_fixed_bound_stands_where_the_guard_is_refused() -> None:
    """The server does not clip these rows: one client that sends 1e30 would ruin every round."""
    with pytest.raises(SpecError, match="set guard=none; max_norm is the bound instead"):
        Method(**{**NOISY, "guard": "adaptive"})
    history = run_small(**NOISY, transforms="max_norm(100)", cohort="full")
    server, layout = history.simulation.server, history.simulation.server.layout
    rows = {client: torch.full((layout.d,), 1e30 if client == 2 else 0.1) for client in range(8)}
    replies = [Reply(1, client, {"update": encode("identity", row, layout)}, 1, 1, 0.0) for client, row in rows.items()]
    intake = server_side.take_answers(server, history.state, range(8), replies)
    _, concluded = server_side.conclude_(server, history.state, intake)
    assert concluded.accepted == [0, 1, 3, 4, 5, 6, 7]
    assert "at most max_norm=100 is accepted" in concluded.refused[2]


# -- keys and files ----------------------------------------------------------------------------------------------------


def test_simulated_keys_come_from_the_system_and_differ_by_client() -> None:
    first, second = (run_small(**NOISY, rounds=2, seed=1) for _ in range(2))
    assert first.state.secret != second.state.secret
    assert first.run().state.x.tolist() != second.run().state.x.tolist()
    keys = {client_key(KEY, client) for client in range(50)}
    assert len(keys) == 50
    assert {len(bytes.fromhex(key)) for key in keys} == {32}


def test_a_stop_changes_neither_noise_nor_what_was_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private = small(**NOISY, uplink="topk(ratio=1/8)")
    monkeypatch.setattr("fedcams.simulation.rounds.new_key", lambda: KEY)
    whole = run(private, tmp_path / "whole")
    folder = stopped(tmp_path / "run", 3, private)
    monkeypatch.setattr("fedcams.simulation.rounds.new_key", lambda: OTHER)
    shutil.copytree(folder, tmp_path / "copy")
    resume(folder)
    assert lasting(folder) == lasting(whole.path)
    assert KEY not in (folder / "rounds.jsonl").read_text()
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    spent = epsilon(1.0, 2.0, max(sum(i in line["cohort"] for line in lines) for i in range(6)), 1e-4)
    assert f"and what the server sees of one client spends ε = {spent:.4g}" in notes(collect([folder]))


def test_a_sites_key_is_made_once_and_belongs_to_its_owner(tmp_path: Path) -> None:
    first = SiteSecret(tmp_path)
    assert len(bytes.fromhex(first.key)) == 32
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    first.spend(3)
    again = SiteSecret(tmp_path)
    assert (again.key, again.answers) == (first.key, 1)
    (tmp_path / "other").mkdir()
    assert SiteSecret(tmp_path / "other").key != first.key


def test_a_site_answers_no_more_often_than_the_run_has_rounds(tmp_path: Path) -> None:
    site = SiteSecret(tmp_path)
    for _ in range(3):
        site.spend(3)
    with pytest.raises(ValueError, match="answered 3 times in a run of 3 rounds; another answer would spend more"):
        SiteSecret(tmp_path).spend(3)
    SiteSecret(tmp_path).spend(4)
    SiteSecret(tmp_path).spend(None)


@pytest.mark.parametrize(
    "change", [lambda data: data[:-5], lambda data: data.replace(b'"answers": 1', b'"answers": 0')]
)
def test_a_damaged_count_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    SiteSecret(tmp_path).spend(None)
    (tmp_path / FILE).write_bytes(change((tmp_path / FILE).read_bytes()))
    with pytest.raises(ResidualError, match="it is unknown what this site has spent"):
        SiteSecret(tmp_path)


@pytest.mark.parametrize("fields", [{}, {"uplink": "topk(ratio=1/8)"}, {"downlink": "replica(blockq)"}], ids=str)
def test_a_lost_count_is_refused_and_not_begun_again(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Whatever else shows that the site has answered: its reply, its rows or its model."""
    method, layout, site = Method(**{**NOISY, **fields}), Layout.flat(D), tmp_path / "site"
    server = Server(method, layout, population=4)
    instructions, _ = server_side.instruct(server, server_side.start(server, torch.zeros(D)), [1])
    update = ClientUpdate(torch.ones(D), None, examples=1, steps=1, loss=0.0)
    DurableClient(site, method, layout).answer(instructions[1].to_parts(), lambda *_: update)
    DurableClient(site, method, layout)
    (site / FILE).unlink()
    with pytest.raises(ResidualError, match=r"noise\.json: missing, so it is unknown what this site has spent"):
        DurableClient(site, method, layout)
    assert not (site / FILE).exists()


def test_who_has_another_sites_folder_is_not_told_to_delete_the_count(tmp_path: Path) -> None:
    """A site that deletes it could answer as often again as the run allows."""
    method, layout = Method(**{**NOISY, "uplink": "topk(ratio=1/8)"}), Layout.flat(D)
    server = Server(method, layout, population=4)
    instructions, _ = server_side.instruct(server, server_side.start(server, torch.zeros(D)), [1, 2])
    update = ClientUpdate(torch.ones(D), None, examples=1, steps=1, loss=0.0)
    DurableClient(tmp_path, method, layout).answer(instructions[1].to_parts(), lambda *_: update)
    with pytest.raises(ResidualError, match=r"rows of client 1, but this is client 2; .* take part under another run"):
        DurableClient(tmp_path, method, layout).answer(instructions[2].to_parts(), lambda *_: update)


# -- over Flower -------------------------------------------------------------------------------------------------------


@pytest.fixture
def same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """One key for all sites, and for all simulated clients."""
    monkeypatch.setattr("fedcams.rounds.site_secret.new_key", lambda: KEY)
    monkeypatch.setattr("fedcams.rounds.private.client_key", lambda secret, client: KEY)


@pytest.mark.usefixtures("same_keys")
@pytest.mark.parametrize("spec", ["topk(ratio=1/8)", "identity"])
def test_a_federation_is_the_simulators_with_the_same_keys(tmp_path: Path, spec: str) -> None:
    keys = {**NOISY, "privacy": "client(clip=1, noise=1/2, delta=1e-3)", "uplink": spec}
    expected = simulation(experiment(**keys))
    found = run_method(tmp_path, restarts=(2,), **keys)
    assert_simulated(found, expected)
    for name in ("epsilon", "local_epsilon"):
        assert [line[name] for line in found.ledger] == [record.probes[name] for record in expected[1]]
    assert [line["train_loss"] for line in found.ledger] == [None] * len(found.ledger)
    holding = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert {path.name for path in holding} == {FILE}, "no key at the server"
    assert {path.parent.name for path in holding} == {"0", "1", "2", "3"}


def replies(
    folder: Path, mods: list[Any], app: Callable[[Message, Context], Message] | None = None, **options: Any
) -> tuple[list[RecordDict], list[dict[str, Any]]]:
    """What sites 0, 1, … with these mods answer in one round; node 90 has none. And the ledger."""
    train = app or plain_app(1.0)._registered_funcs["train.default"]
    apps = {100 + site: ClientApp(mods=[mod]) for site, mod in enumerate(mods)} | {90: ClientApp()}
    for made in apps.values():
        made.train()(train)
        made.evaluate()(train)
    heard: list[RecordDict] = []

    def keep(node: int, asked: Message, reply: Message | None) -> Message | None:
        if reply is not None and reply.has_content() and asked.metadata.group_id:
            heard.append(copied(reply.content))
        return reply

    grid = LocalGrid(apps, {100 + site: {"site-id": site} for site in range(len(mods))} | {90: {}}, keep)
    given = {**PINNED, "clients": len(mods), "checkpoint": folder / "server", "server": "fedavg", **options}
    FedCAMS(**given).start(grid, two_by_three(), 1, timeout=5.0)
    return heard, read_ledger(folder / "server")


PINNED: dict[str, Any] = {"privacy": "client(clip=1, noise=2, delta=1e-3)", "guard": "none"}


def test_sites_send_no_metrics_and_nodes_without_the_mod_are_not_asked(tmp_path: Path) -> None:
    heard, (line,) = replies(tmp_path, [uplink(state_dir=tmp_path / "sites")] * 2)
    assert sorted(line["accepted"]) == ["0", "1"]
    assert line["cohort"] == [0, 1]
    for reply in heard:
        assert not reply.metric_records
        assert set(reply) == {REPLY, ABOUT}
        told = answer_from_parts(message_parts(reply.array_records[REPLY], 2**20))
        assert isinstance(told, Reply)
        assert (told.examples, told.steps, told.loss) == (0, 0, 0.0)
    plain, _ = replies(tmp_path / "plain", [uplink(state_dir=tmp_path / "others")], **{**PINNED, "privacy": "none"})
    assert any(reply.metric_records for reply in plain), "without privacy they do"


def test_a_site_that_insists_on_noise_gets_it_or_stays_out(tmp_path: Path) -> None:
    pinned = [uplink(state_dir=tmp_path / "a", privacy=PINNED["privacy"])]
    _, (line,) = replies(tmp_path / "same", pinned)
    assert list(line["accepted"]) == ["0"]
    for privacy in ("none", "client(clip=1, noise=0.1, delta=1e-3)", "server(clip=1, noise=2, delta=1e-3)"):
        _, (line,) = replies(tmp_path / privacy[:14], pinned, privacy=privacy)
        assert f"but this site adds privacy={PINNED['privacy']}" in line["refused"]["0"]
    content = RecordDict({"arrays": two_by_three(), "config": ConfigRecord()})
    for kind in ("train", "evaluate"):
        asked = Message(content, 1, kind)
        told = pinned[0](asked, Context(1, 1, {"site-id": 0}, RecordDict(), {}), plain_app(1.0))
        assert "it answers only FedCAMS, and only requests to train" in str(
            told.content.config_records[ABOUT]["refused"]
        )
        assert not told.content.array_records


def test_a_server_cannot_make_a_site_send_weights_as_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers travel without noise, and the server says which arrays are buffers."""
    monkeypatch.setattr("fedcams.rounds.server.check_privacy", lambda server: None)
    mods = [uplink(state_dir=tmp_path / "sites", privacy=PINNED["privacy"])]
    heard, (line,) = replies(tmp_path, mods, averaged=("w",))
    assert "does not cover buffers, which travel without noise, but this model has w" in line["refused"]["0"]
    assert not any(REPLY in reply.array_records for reply in heard)


def test_a_server_cannot_lengthen_the_run_for_which_a_site_chose_its_noise(tmp_path: Path) -> None:
    """Told that the run has 1, 2, 3, … rounds, a site would give its first answers with hardly any noise."""
    delta = 1e-3
    growing = sum(1 / (2 * noise_for(50, 1.0, rounds, delta) ** 2) for rounds in range(1, 101))
    assert epsilon(1.0, math.sqrt(1 / (2 * growing)), 1, delta) > 150, "what 100 answers would spend, instead of 50"

    def site(folder: str, rounds: int, **amount: Any) -> DurableClient:
        privacy = ", ".join(f"{key}={value}" for key, value in {"clip": 1, **amount, "delta": delta}.items())
        method = Method(privacy=f"client({privacy})", guard="none")
        (tmp_path / folder).mkdir(exist_ok=True)
        return DurableClient(tmp_path / folder, method, Layout.flat(D), None, rounds, 9)

    site("total", 1, epsilon=50)
    site("total", 1, epsilon=50)
    with pytest.raises(UpdateError, match="was for a run of 1 rounds, but the server now says 2; continue as before"):
        site("total", 2, epsilon=50)
    site("each", 1, noise=2)
    site("each", 2, noise=2)  # each answer has its own noise, and a run may get more rounds later


def test_a_round_in_which_nobody_is_asked_spends_nothing(tmp_path: Path) -> None:
    _, (line,) = replies(tmp_path, [uplink(state_dir=tmp_path / "sites")], min_available=9)
    assert line["skipped"] == "2 clients connected, min_available=9"
    assert (line["epsilon"], line["local_epsilon"]) == (0.0, 0.0)


@pytest.mark.parametrize("downlink", ["shared(blockq, warm=true)", "replica(blockq, warm=true)"])
def test_a_site_that_is_told_again_in_one_round_spends_one_answer(tmp_path: Path, downlink: str) -> None:
    """It cannot make the initial model, so it refuses the first instruction before it trains."""
    keys = {**PINNED, "uplink": "identity", "downlink": downlink, "sampler": "full", "rounds": 3}
    ledger = run_method(tmp_path, **keys).ledger
    assert "out of step, so sent another instruction" in ledger[0]["notes"]["0"]
    for line in ledger:
        assert (sorted(line["accepted"]), line["refused"]) == (["0", "1", "2", "3"], {})
    with pytest.raises(UpdateError, match="answered 3 times in a run of 3 rounds"):
        SiteSecret(next((tmp_path / "sites").glob("*/0"))).spend(3)


@pytest.mark.parametrize("spec", ["identity", "topk(ratio=1/8)"])
def test_a_round_that_a_server_asks_for_again_spends_one_answer(tmp_path: Path, spec: str) -> None:
    """The server ends in the middle of a round; sites repeat their answers, also where they keep nothing else."""

    def ends(node: int, asked: Message, reply: Message | None) -> Message | None:
        if (node, asked.metadata.group_id) == (103, "2"):
            raise Stopped
        return reply

    keys = {**PINNED, "uplink": spec, "sampler": "full", "rounds": 3}
    with pytest.raises(Stopped):
        run_method(tmp_path, fault=ends, **keys)
    ledger = run_method(tmp_path, **keys).ledger
    assert ledger[1]["notes"] == dict.fromkeys(["0", "1", "2", "3"], "repeated")
    for line in ledger:
        assert (sorted(line["accepted"]), line["refused"]) == (["0", "1", "2", "3"], {})


def test_a_mod_with_another_compressor_is_refused(tmp_path: Path) -> None:
    """The server states an ε for noises that add up, which those of compressed updates do not."""
    _, (line,) = replies(tmp_path, [uplink("sign", state_dir=tmp_path / "sites")])
    assert "the server's epsilon is that of uplink=identity" in line["refused"]["0"]


def test_why_an_app_failed_stays_at_the_site(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def failing(message: Message, context: Context) -> Message:
        raise RuntimeError("patient 17 has no age")

    with caplog.at_level(logging.ERROR):
        heard, (line,) = replies(tmp_path, [uplink(state_dir=tmp_path / "sites")], failing)
    assert line["refused"]["0"].endswith("UpdateError: the app failed; the log of its node says why")
    assert "patient" not in str(heard)
    assert "patient 17" in caplog.text


def test_evaluation_on_clients_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"privacy=client.* and evaluation on clients: .*evaluate on the server"):
        FedCAMS(**PINNED, clients=9, checkpoint=tmp_path, fraction_evaluate=0.5)
    with pytest.raises(SpecError, match=r"number of clients, which is unknown; give clients"):
        FedCAMS(**PINNED, checkpoint=tmp_path)
