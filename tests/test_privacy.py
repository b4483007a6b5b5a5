"""Privacy of whole clients: bounded sums, secret noise and cohorts, what is refused, and what files reveal."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcams import Layout, Method, SpecError, compressor
from fedcams.engines import CohortUpdate
from fedcams.experiment import Experiment
from fedcams.privacy import Privacy
from fedcams.privacy.accountant import epsilon, noise_for
from fedcams.privacy.secret import chosen, gaussian, new_key
from fedcams.privacy.sums import ClippedSum
from fedcams.registry import registered
from fedcams.report.collection import collect
from fedcams.report.sections import notes
from fedcams.report.summary import summarize
from fedcams.report.tables import markdown
from fedcams.rounds import Arrival, Client, Intake, Outgoing, Received, Server, ServerState
from fedcams.rounds import client as client_side
from fedcams.rounds import server as server_side
from fedcams.rounds.private import draw_cohort
from fedcams.runs import resume, run
from fedcams.sampler import Sampler, sampler
from fedcams.sampler.bernoulli import Bernoulli
from fedcams.transforms import Facts
from halves import assert_equal_rounds, net
from halves import run as run_small
from test_runs import lasting, small, stopped
from together import together

KEY, OTHER = "5a" * 32, "a5" * 32
"""Keys for tests; no run has one of these."""
B, D, P, M = 0.5, 48, 0.25, 8
PRIVATE = {"privacy": f"server(clip={B}, noise=2, delta=1e-4)", "guard": "none"}
SAMPLED = {**PRIVATE, "sampler": "bernoulli(p=0.4)"}
CODECS = [
    spec
    for cls in registered("compressor").values()
    for spec in cls.examples
    if (codec := compressor(spec)).never_lengthens and codec.squared_error_bound(Layout.flat(D)) is not None
]
Updates = Callable[[int, int], Tensor]
"""(round, client) -> its update `[d]`."""


def server_of(d: int = D, spec: str = "bernoulli(p=0.25)", **fields: Any) -> Server:
    method = Method(**{**PRIVATE, "server": "fedavg", **fields})
    return Server(method, Layout.flat(d), population=M, sampler=sampler(spec), rounds=50)


def state_of(server: Server, key: str = KEY) -> ServerState:
    return server_side.start(server, torch.zeros(server.layout.d))._replace(secret=key)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that is zero, so that the mean shows the sum."""
    monkeypatch.setattr(
        "fedcams.privacy.server_noise.gaussian", lambda key, purpose, round, about, count: np.zeros(count)
    )


def sent(client: Client, ids: Sequence[int], round: int, updates: Updates) -> Outgoing:
    rows = torch.stack([updates(round, i) for i in ids])
    ones = [1] * len(ids)
    trained = CohortUpdate(rows.clone(), None, torch.zeros(len(ids), dtype=torch.float64), ones, ones, 0.1)
    return client_side.respond_(client, ids, Received(torch.zeros(rows.shape[1]), None), trained, round, seed=0)


def sums(server: Server, cohorts: Sequence[Sequence[int]], updates: Updates) -> Iterator[tuple[Tensor, Client]]:
    """The sum of every round, as the mean of silent noise shows it, and what the clients keep."""
    client, state = Client(server.method, server.layout), state_of(server)
    for round, cohort in enumerate(cohorts, start=1):
        intake = Intake(server, state, cohort, in_order=True)
        outgoing = sent(client, cohort, round, updates) if cohort else None
        if outgoing is not None:
            intake.take_all(outgoing)
        means = intake.means
        assert means is not None
        total = means.update.double() * (P * M)
        state, concluded = server_side.conclude_(server, state, intake)
        if outgoing is not None:
            client_side.commit(client, outgoing, concluded.accepted)
        yield total, client


# -- one client counts for at most the bound ---------------------------------------------------------------------------


def hostile(kind: str, seed: int = 0) -> Updates:
    """Sequences that make residuals as long, and as well aligned, as they can be."""

    def updates(round: int, client: int) -> Tensor:
        draw = torch.Generator().manual_seed(1000 * seed + 100 * client + round)
        spread = torch.randn(D, generator=draw)
        if kind == "huge":
            return spread * 10.0 ** (client % 4 * 9)
        if kind == "constant":  # what is dropped grows in the same place
            return torch.linspace(0.9, 1.1, D) * 3
        if kind == "alternating":
            return spread.sign() * (-1) ** round * 100
        if kind == "spikes":  # one large coordinate, then nothing: all that is left is residual
            return torch.eye(D)[(7 * client + round) % D] * (1e3 if round % 3 == 1 else 0)
        return spread * 0.05

    return updates


@pytest.mark.usefixtures("silent")
@together("codec", CODECS)
@together("kind", ["huge", "constant", "alternating", "spikes", "small"])
def test_two_runs_that_differ_in_one_client_differ_by_the_bound(codec: str, kind: str) -> None:
    """In every round, with memory of all rounds before; and the other clients keep the same in both."""
    rounds, extra = 9, 3
    cohorts = [[i for i in range(M) if (i + t) % 3 or i == extra] for t in range(rounds)]
    without = [[i for i in cohort if i != extra] for cohort in cohorts]
    server = server_of(uplink=codec)
    found = zip(sums(server, cohorts, hostile(kind)), sums(server, without, hostile(kind)), strict=True)
    largest = 0.0
    for (more, clients), (less, others) in found:
        largest = max(largest, float((more - less).norm()))
        if clients.rows is not None and others.rows is not None:
            ids = [i for i in range(M) if i != extra]
            assert torch.equal(clients.rows.gather("residual", ids), others.rows.gather("residual", ids))
    assert largest <= B * (1 + 1e-5)  # the mean is float32
    assert kind == "small" or largest > B / 50, "it does count"


@pytest.mark.usefixtures("silent")
def test_what_a_client_sends_without_clipping_counts_for_the_bound() -> None:
    server = server_of()
    state = state_of(server)
    rows = torch.stack([torch.full((D,), 1e30), torch.full((D,), -3.0), torch.full((D,), 1e-3)])
    facts = Facts(1, 0, (0, 1, 2), (1,) * 3, (1,) * 3, (1.0,) * 3, 0.1)
    intake = Intake(server, state, [0, 1, 2])
    intake.take(Arrival(facts, (0.0,) * 3, {"update": (compressor("identity"), {"values": rows})}))
    means = intake.means
    assert means is not None
    unit = torch.ones(D, dtype=torch.float64) / D**0.5
    expected = B * unit - B * unit + rows[2].double()
    assert torch.allclose(means.update.double() * P * M, expected, atol=1e-7)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("cohort", [[], [0], [0, 5], list(range(M))])
def test_the_sum_is_divided_by_the_expected_cohort_however_many_came(cohort: list[int]) -> None:
    server = server_of()
    updates = hostile("small")
    ((total, _),) = sums(server, [cohort], updates)
    expected = sum((updates(1, i).double() for i in cohort), torch.zeros(D, dtype=torch.float64))
    assert torch.allclose(total, expected, atol=1e-6)


def test_a_long_sum_does_not_round_beyond_the_bound() -> None:
    """In float32, 1e-8 added to 100 is nothing, and 1e-8 more than its half a whole unit of rounding."""
    total = Privacy.parse("server(clip=1, noise=1)").clipped_sum(Layout.flat(1), in_order=True)
    for client in range(100):
        total.add((client,), compressor("identity"), {"values": torch.ones(1, 1)})
    for client in range(100, 200):
        before = float(total.total()[0])
        total.add((client,), compressor("identity"), {"values": torch.full((1, 1), 1e-8)})
        assert float(total.total()[0]) - before == pytest.approx(1e-8, rel=1e-5)


@together("spec", [s for cls in registered("compressor").values() for s in cls.examples])
def test_what_may_lengthen_does(spec: str) -> None:
    """No compressor is kept from private methods for nothing."""
    codec, layout, spike = compressor(spec), Layout.flat(64), -1.006 * torch.eye(64)[5]
    lengths = [
        float(codec.decode(codec.encode(x, layout, key), layout).double().norm() / x.double().norm())
        for x in (spike, torch.ones(64), torch.linspace(-1, 0.9, 64))
        for key in range(5)
    ]
    assert codec.never_lengthens == (max(lengths) <= 1 + 1e-6)


def test_feedback_loses_only_what_is_clipped() -> None:
    """y = clip(Δ + e), and y - C(y) is kept: what was sent and what is kept add up to what was clipped."""
    server, updates = server_of(uplink="topk(ratio=1/8)"), hostile("small")
    client = Client(server.method, server.layout)
    e = torch.zeros(D)
    for round in range(1, 9):
        outgoing = sent(client, [2], round, updates)
        y = updates(round, 2) + e
        y = y * min(1.0, B / float(y.norm()))
        codec, code = outgoing.arrival.codes["update"]
        e = y - codec.decode(code, server.layout)[0]
        assert torch.allclose(outgoing.rows["residual"][0], e, atol=1e-6)
        client_side.commit(client, outgoing, [2])
        e = outgoing.rows["residual"][0].clone()
        assert float(e.norm()) <= B


def test_a_sum_has_the_same_bits_in_any_order_of_arrival() -> None:
    layout, codec = Layout.flat(50), compressor("identity")
    rows = torch.randn(9, 50, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 9)[:, None]
    sums = []
    for ids in (list(range(9)), [8, 3, 0, 5, 1, 7, 2, 6, 4]):
        total = ClippedSum(layout, bound=1e6)
        for client in ids:
            total.add((client,), codec, codec.encode(rows[client : client + 1], layout))
        sums.append(total.total())
    assert np.array_equal(*sums)
    at_once = ClippedSum(layout, bound=1e6, in_order=True)
    at_once.add(tuple(range(9)), codec, codec.encode(rows, layout))
    assert np.array_equal(at_once.total(), sums[0])


# -- noise -------------------------------------------------------------------------------------------------------------


def mean_of(server: Server, key: str = KEY, update: float = 0.0, round: int = 1) -> Tensor:
    state = state_of(server, key)._replace(round=round - 1)
    intake = Intake(server, state, [0])
    if update:
        client = Client(server.method, server.layout)
        intake.take_all(sent(client, [0], round, lambda t, i: torch.full((server.layout.d,), update)))
    means = intake.means
    assert means is not None
    return means.update.double()


def test_noise_is_normal_with_the_stated_deviation() -> None:
    d = 200_000
    noise = (mean_of(server_of(d)) * (P * M) / (2 * B)).numpy()  # noise=2, clip=B
    assert abs(noise.mean()) < 5 / d**0.5
    assert noise.var() == pytest.approx(1, abs=5 * (2 / d) ** 0.5)
    assert (noise**4).mean() == pytest.approx(3, abs=5 * (96 / d) ** 0.5)
    for bound, share in {0.5: 0.382925, 1.0: 0.682689, 2.0: 0.954500, 3.0: 0.997300}.items():
        assert (abs(noise) < bound).mean() == pytest.approx(share, abs=5 * (share * (1 - share) / d) ** 0.5)
    lagged = np.corrcoef(noise[:-1], noise[1:])[0, 1]
    assert abs(lagged) < 5 / d**0.5
    assert len(np.unique(noise)) > 0.9 * d


def correlation(one: Tensor, other: Tensor) -> float:
    return float(np.corrcoef(one.numpy(), other.numpy())[0, 1])


def test_noise_repeats_for_the_same_sum_and_for_nothing_else() -> None:
    """A round that is run again with other replies has unrelated noise: the difference of both would have none."""
    d = 20_000
    server = server_of(d)
    first, clip = mean_of(server, update=1e-6), 5 / d**0.5
    assert torch.equal(first, mean_of(server, update=1e-6))
    for other in (
        mean_of(server, update=1.1e-6),
        mean_of(server),
        mean_of(server, OTHER, 1e-6),
        mean_of(server, round=2),
    ):
        assert abs(correlation(first, other)) < clip


def test_pieces_of_noise_are_unrelated() -> None:
    long = gaussian(KEY, "noise", 1, b"", (1 << 16) * 2 + 3)
    assert abs(np.corrcoef(long[: 1 << 16], long[1 << 16 : 1 << 17])[0, 1]) < 5 / 2**8
    assert np.array_equal(gaussian(KEY, "noise", 1, b"", 1 << 16), long[: 1 << 16])


def test_a_round_without_clients_makes_a_step_of_noise() -> None:
    batched = run_small(
        rounds=8, cohort="bernoulli(p=0.05)", **PRIVATE, uplink="sign", downlink="replica(blockq)", test=None
    )
    batched.state = batched.state._replace(secret=KEY)
    before, empty = batched.state.x.clone(), 0
    for record in batched:
        moved = float((batched.state.x - before).norm())
        assert moved > 0
        assert record.delta_norm > 0
        before, empty = batched.state.x.clone(), empty + (not record.cohort)
    assert empty
    assert batched.state.optimizer.t == 8


# -- keys and cohorts --------------------------------------------------------------------------------------------------


def test_keys_come_from_the_system_and_not_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (run_small(rounds=3, cohort="bernoulli(p=0.5)", **PRIVATE, seed=1) for _ in range(2))
    assert first.state.secret != second.state.secret
    assert first.run().state.x.tolist() != second.run().state.x.tolist()
    assert [r.cohort for r in first] != [r.cohort for r in second]
    assert run_small(rounds=1).state.secret == "", "no key without privacy"
    assert len(bytes.fromhex(new_key())) == 32
    asked = []
    monkeypatch.setattr("secrets.token_hex", lambda count: asked.append(count) or "00" * count)
    new_key()
    assert asked == [32]


@pytest.mark.parametrize("p", [0.05, 0.5, 1.0])
def test_cohorts_are_independent_draws_from_the_key(p: float) -> None:
    ids, rounds = list(range(0, 600, 3)), 200
    cohorts = [chosen(KEY, round, ids, p) for round in range(rounds)]
    seen = np.array([[i in cohort for i in ids] for cohort in map(set, cohorts)], float)
    spread = (p * (1 - p)) ** 0.5
    assert seen.mean() == pytest.approx(p, abs=5 * spread / seen.size**0.5)
    assert abs(seen.mean(0) - p).max() <= 5.5 * spread / rounds**0.5
    assert abs(seen.mean(1) - p).max() <= 5.5 * spread / len(ids) ** 0.5
    if p < 1:
        assert abs(np.corrcoef(seen[:-1].ravel(), seen[1:].ravel())[0, 1]) < 5 / seen.size**0.5
        assert cohorts != [chosen(OTHER, round, ids, p) for round in range(rounds)]


def test_whether_a_client_is_drawn_does_not_depend_on_the_others() -> None:
    everyone = set(chosen(KEY, 1, range(500), 0.3))
    assert set(chosen(KEY, 1, range(0, 500, 7), 0.3)) == everyone & set(range(0, 500, 7))


def test_cohorts_do_not_depend_on_the_seed_that_instructions_carry() -> None:
    server = server_of(spec="bernoulli(p=0.5)")
    one, other = (draw_cohort(server, state_of(server, key), range(64)) for key in (KEY, OTHER))
    assert one != other
    assert draw_cohort(server, state_of(server), range(64)) == one


def test_a_missing_key_is_refused() -> None:
    with pytest.raises(SpecError, match="a secret key of 0 bytes"):
        chosen("", 1, [1], 0.5)


@pytest.mark.parametrize(
    "fields",
    [
        {"uplink": "topk(ratio=1/8)", "server": "fedams"},
        {"uplink": "sign", "feedback": False, "downlink": "replica(blockq)", "average": "ema(0.5)"},
        {"transforms": "clip(norm=0.2) + max_norm(bound=0.1)", "downlink": "stateless"},
    ],
)
def test_batched_rounds_are_the_two_halves_bit_for_bit(fields: dict[str, Any]) -> None:
    batched, apart = (
        run_small(**PRIVATE, **fields, cohort="bernoulli(p=0.4)", rounds=5, test=None, engine="loop") for _ in range(2)
    )
    for history in (batched, apart):
        history.state = history.state._replace(secret=KEY)
    assert_equal_rounds(batched, apart)


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED = {
    "guard=adaptive": {"guard": "adaptive"},
    "aggregate=median": {"aggregate": "median"},
    "aggregate=clipped_mean": {"aggregate": "clipped_mean"},
    "weighting=examples": {"weighting": "examples"},
    "weighting=sampler": {"weighting": "sampler"},
    "control=scaffold": {"control": "scaffold"},
    "min_replies=2": {"min_replies": 2},
    "transforms=fednova": {"transforms": "clip(norm=1) + fednova"},
    r"uplink=blockq\(bits=8\)": {"uplink": "blockq(bits=8)"},
    r"uplink=topk\(ratio=1/8, values=bf16\)": {"uplink": "topk(ratio=1/8, values=bf16)"},
    r"uplink=randk\(ratio=0.5, scaled=true\)": {"uplink": "randk(ratio=1/2, scaled=true)", "feedback": False},
    r"downlink=shared\(blockq\)": {"downlink": "shared(blockq)"},
}


@together("named", REFUSED)
def test_parts_for_which_the_claim_would_be_wrong_are_refused(named: str) -> None:
    with pytest.raises(SpecError, match=rf"privacy=server\(clip=0.5, noise=2, delta=1e-4\) and {named}: .*; "):
        Method(**{**PRIVATE, **REFUSED[named]})
    assert not Method(**REFUSED[named]).privacy.active, "without privacy it is accepted"


@together("spec", [s for cls in registered("sampler").values() for s in cls.examples])
def test_only_independent_secret_cohorts_are_accepted(spec: str) -> None:
    """A fixed number of clients drawn from the run's seed, which clients know, hides no client."""
    known: Sampler = sampler(spec)
    expected = float(known.p) if isinstance(known, Bernoulli) else 1.0 if known.name == "full" else None
    assert known.probability == expected
    if expected is None:
        with pytest.raises(SpecError, match=r"privacy=server.* and sampler=.*use bernoulli"):
            small(**{**SAMPLED, "sampler": spec}, clients=100)
    else:
        assert small(**{**SAMPLED, "sampler": spec}, clients=100).privacy.active


def test_buffers_unknown_populations_and_large_deltas_are_refused() -> None:
    with pytest.raises(
        SpecError, match=r"privacy=server.* does not cover buffers.*1.running_mean; use a model without"
    ):
        run_small(**PRIVATE, cohort="full", model=net(norm=True))
    with pytest.raises(SpecError, match=r"fixed number of clients, which is unknown; give clients"):
        Server(Method(**PRIVATE), Layout.flat(3), sampler=sampler("full"))
    with pytest.raises(SpecError, match=r"and sampler=None: "):
        Server(Method(**PRIVATE), Layout.flat(3), population=9)
    with pytest.raises(SpecError, match=r"with 6 clients: a delta of 1/clients.*below 0.17"):
        small(**{**SAMPLED, "privacy": "server(clip=1, noise=1, delta=0.2)"})
    with pytest.raises(SpecError, match=r"spreads epsilon over a run of unknown length; give rounds"):
        Server(Method(**PRIVATE | {"privacy": "server(clip=1, epsilon=8)"}), Layout.flat(3), population=9)


def test_trackers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"privacy=server.* and a tracker"):
        run_small(**PRIVATE, cohort="full", out=tmp_path / "run", trackers=["csv"])
    assert not (tmp_path / "run").exists()


# -- what a run spends, and what its files tell ------------------------------------------------------------------------


def test_every_record_says_what_was_spent() -> None:
    history = run_small(**PRIVATE, cohort="bernoulli(p=0.3)", rounds=5).run()
    spent = [record.probes["epsilon"] for record in history]
    assert spent == [epsilon(0.3, 2.0, t, 1e-4) for t in range(1, 6)]
    assert spent == sorted(set(spent))


def test_a_target_is_met_at_the_end_of_the_run() -> None:
    target = PRIVATE | {"privacy": "server(clip=1/2, epsilon=3, delta=1e-4)"}
    history = run_small(**target, cohort="bernoulli(p=0.3)", rounds=6)
    noise = noise_for(3.0, 0.3, 6, 1e-4)
    history.state = history.state._replace(secret=KEY)
    last = [record.probes["epsilon"] for record in history][-1]
    assert last is not None
    assert 2.9 < last <= 3
    same = run_small(
        **PRIVATE | {"privacy": f"server(clip=1/2, noise={noise!r}, delta=1e-4)"}, cohort="bernoulli(p=0.3)"
    )
    same.state = same.state._replace(secret=KEY)
    assert torch.equal(same.run().state.x, history.state.x)
    assert Method(**target).depends_on_rounds
    assert not Method(**PRIVATE).depends_on_rounds


def private(**changes: Any) -> Experiment:
    return small(**{**SAMPLED, **changes})


def test_resumption_repeats_the_noise_from_the_key_in_the_checkpoint(tmp_path: Path) -> None:
    folder = stopped(tmp_path / "run", 4, private(), every=100)
    saved = json.loads((folder / "checkpoint" / "state.json").read_text())
    assert saved["round"] == 4, "a round is durable before its model is seen, whatever checkpoint_every says"
    assert len(saved["state"]["secret"]) == 64
    shutil.copytree(folder, tmp_path / "copy")
    resume(folder)
    resume(tmp_path / "copy")
    assert lasting(folder) == lasting(tmp_path / "copy")
    again = run(private(), tmp_path / "again")
    assert (folder / "rounds.jsonl").read_bytes() != (again.path / "rounds.jsonl").read_bytes(), "another key"


def test_a_stop_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcams.rounds.server.new_key", lambda: KEY)
    whole = run(private(), tmp_path / "whole")
    stopped(tmp_path / "run", 3, private())
    monkeypatch.setattr("fedcams.rounds.server.new_key", lambda: OTHER)
    resume(tmp_path / "run")
    assert lasting(tmp_path / "run") == lasting(whole.path)


def test_what_epsilon_does_not_cover_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        found = run(private(), tmp_path / "run").path
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in found.rglob("*")}
    for name in ("rounds.jsonl", "timings.jsonl", "partition.json", "state.json", "7.safetensors"):
        assert modes[name] == 0o600, name
    assert modes["checkpoint"] == 0o700
    note = (found / "PRIVATE.txt").read_text()
    assert f"privacy={private().privacy}, sampler=bernoulli(p=0.4)" in note
    assert "rounds.jsonl" in note


def test_the_key_is_in_one_file_and_gone_with_the_last_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcams.rounds.server.new_key", lambda: KEY)
    folder = stopped(tmp_path / "run", 4, private())

    def holding() -> list[str]:
        return [path.name for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]

    assert holding() == ["state.json"]
    resume(folder)
    assert holding() == []


def test_reports_tell_what_was_spent_and_that_they_are_private(tmp_path: Path) -> None:
    found = run(private(label="hidden"), tmp_path / "run")
    collection = collect([found.path])
    spent = f"{epsilon(0.4, 2.0, 7, 1e-4):.4g}"
    said = f"Private: hidden: the models of each run together spend ε = {spent} with server(clip=0.5"
    assert said in notes(collection)
    assert said in markdown(collection, summarize(collection)).replace("\\", "")
    assert "keep this report private" in notes(collection)
    spent = epsilon(0.4, 2.0, 7, 1e-4)
    assert f"(ε {spent:.4g} spent)" in markdown(collection, summarize(collection))
    assert summarize(collection).rows[0].epsilon == pytest.approx(spent)
    plain = run(small(), tmp_path / "plain")
    assert "Private" not in notes(collect([plain.path]))


def test_the_page_on_privacy_works() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "privacy.md").read_text("utf-8")
    shown = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(shown) == 2
    for block in shown:
        exec(compile(block, "privacy.md", "exec"), {})
    assert [f"{epsilon(0.1, 1.0, 100, 1e-5):.3f}", f"{noise_for(8, 0.1, 100, 1e-5):.4f}"] == re.findall(
        r"# (\d\.\d+)$", text, re.MULTILINE
    )


def test_a_model_with_group_norm_is_accepted() -> None:
    """What the error about batch-norm recommends."""
    model = nn.Sequential(nn.Linear(8, 12), nn.GroupNorm(3, 12), nn.Linear(12, 3))
    spent = run_small(**PRIVATE, cohort="full", rounds=1, model=model).run()[0].probes["epsilon"]
    assert spent is not None
    assert spent > 0
