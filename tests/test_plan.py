"""Plans, compared with what simulations send and store, and with the paper's tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from fedcams import Layout, SpecError, compressor
from fedcams.downlink import Downlink, DownlinkCost, downlink
from fedcams.experiment import Experiment, build
from fedcams.plan import (
    CANDIDATES,
    Plan,
    Setting,
    advise,
    expected_contacts,
    plan,
    plan_recipes,
    recommend,
    simulated_contacts,
)
from fedcams.plan.advice import arriving
from fedcams.plan.paper import paper_tables
from fedcams.recipes import RECIPES
from fedcams.registry import registered
from fedcams.report.profiles import PROFILES, Profile
from fedcams.sampler import Contacts, sampler
from fedcams.wire import encode
from fedcams.wire.estimate import payload_bytes
from together import together

POPULATION, ROUNDS = 12, 16


def simulated(**changes: Any) -> tuple[Experiment, list[Any], Any]:
    """A short run that really encodes, its records and the server at its end."""
    values = {"model": "mlp(hidden=8)", "clients": POPULATION, "sampler": "uniform(n=3)", "rounds": ROUNDS}
    values |= {"local": "sgd(lr=0.1, steps=1, batch=2)", "evaluate_every": 99, "engine": "stacked"}
    experiment = Experiment.from_dict({**values, **changes})
    built = build(experiment)
    state, records = built.state, []
    for _ in range(ROUNDS):
        state, record = built.simulation.advance_(state)
        records.append(record)
    return experiment, records, (built.simulation.server, state)


def planned(experiment: Experiment, d: int, buffers: int = 0) -> Plan:
    contacts = simulated_contacts(experiment.sampler, experiment.clients, experiment.rounds, experiment.seed)
    setting = Setting(d, buffers, experiment.uplink, experiment.rounds, experiment.method.buffers)
    return plan(setting, experiment.downlink, contacts)


FIXED = [
    "none",
    "stateless",
    "replica(blockq)",
    "replica(sign, warm=true)",
    "shared(blockq)",
    "shared(blockq(bits=2))",
    "shared(sign, warm=true)",
    "shared(identity)",
]
"""Downlinks whose payloads are all of one length."""
WITH_BUFFERS = [*zip(FIXED, ["identity", "blockq", "blockq", "identity"] * 2, strict=True)]
"""Every downlink with buffers, of either kind with half of them; each family of downlinks has both."""


@pytest.mark.parametrize(("downlink", "buffers"), [*((downlink, "") for downlink in FIXED), *WITH_BUFFERS])
def test_a_plan_is_what_a_run_sends_and_keeps(downlink: str, buffers: str) -> None:
    """To the byte."""
    changes = {"model": "convmixer(dim=4, depth=1, kernel=3)", "buffers": buffers} if buffers else {}
    experiment, records, (server, state) = simulated(uplink="sign", downlink=downlink, **changes)
    found = planned(experiment, server.layout.d, 0 if server.buffer_layout is None else server.buffer_layout.d)
    sums = {key: sum(getattr(record, key) for record in records) for key in vars(records[0]) if key.startswith("wire")}
    assert (found.up, found.down) == (sums["wire_up"], sums["wire_down"])
    parts = (sums["wire_down_deltas"], sums["wire_down_catchup"], sums["wire_down_dense"])
    assert (found.deltas, found.catchup, found.dense) == parts
    assert found.memory == kept(server, state)


def kept(server: Any, state: Any) -> int:
    """Bytes of all tensors of the downlink's state, and of its rows."""
    rows = 0 if server.replicas is None else server.replicas.nbytes
    return rows + _tensors(state.downlink)


def _tensors(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_tensors, value.values()))
    return sum(map(_tensors, value)) if isinstance(value, tuple) else 0


@pytest.mark.parametrize("downlink", ["shared(topk(ratio=1/16))", "replica(topk(ratio=1/16))"])
def test_sparse_deltas_are_planned_as_if_they_chose_anew(downlink: str) -> None:
    experiment, records, (server, _) = simulated(uplink="topk(ratio=1/16)", downlink=downlink)
    found = planned(experiment, server.layout.d)
    assert found.up == pytest.approx(sum(record.wire_up for record in records), rel=0.05)
    assert found.down == pytest.approx(sum(record.wire_down for record in records), rel=0.3)


@pytest.mark.parametrize("n", [1, 3, 12])
def test_participation_on_average(n: int) -> None:
    """The closed form against the mean over many seeds, and against what must hold for any."""
    expected = expected_contacts(POPULATION, n, ROUNDS)
    runs = [simulated_contacts(sampler(f"uniform(n={n})"), POPULATION, ROUNDS, seed) for seed in range(100)]
    assert all(run.total == n * ROUNDS for run in runs)
    assert expected.total == pytest.approx(n * ROUNDS)
    for key in ("first", "gaps"):
        found = np.array([getattr(run, key) for run in runs])
        spread = found.std(0) / len(runs) ** 0.5
        assert (np.abs(found.mean(0) - getattr(expected, key)) <= 5 * spread + 0.05).all()
    assert expected.seen <= POPULATION


def test_cohorts_are_those_of_the_simulation() -> None:
    _, records, _ = simulated(sampler="bernoulli(p=0.3)", downlink="none")
    contacts = simulated_contacts(sampler("bernoulli(p=0.3)"), POPULATION, ROUNDS, 1)
    assert contacts.total == sum(len(record.cohort) for record in records)
    assert contacts.seen == len({client for record in records for client in record.cohort})


@together("spec", [spec for cls in registered("compressor").values() for spec in cls.examples])
def test_payloads_are_as_long_as_planned(spec: str) -> None:
    d = 20_000
    x = torch.randn(d, generator=torch.Generator().manual_seed(1))
    exact = not any(field.kind == "index" for field in compressor(spec).fields(Layout.flat(d)).values())
    assert payload_bytes(compressor(spec), Layout.flat(d)) == pytest.approx(
        len(encode(spec, x)), rel=0 if exact else 0.02
    )


def test_advice() -> None:
    setting = Setting(11_173_962, 9600, compressor("sign"), 500)
    plans = [plan(setting, spec, expected_contacts(100, 10, 500)) for spec in CANDIDATES]
    assert str(recommend(plans, 64e9, 0.9).downlink) == "replica(blockq(bits=2))"
    assert str(recommend(plans, 64e9, 0.5).downlink) == "replica(blockq)"
    assert str(recommend(plans, 1e9, 0.9).downlink) == "stateless"
    assert str(recommend(plans, 1e9, 1.0).downlink) == "shared(topk(ratio=1/64))"
    assert recommend(plans[1:2], -1, 0.9) is None
    everybody = [plan(setting, spec, expected_contacts(100, 100, 500)) for spec in CANDIDATES]
    assert str(recommend(everybody, 1e9, 0.9).downlink) == "shared(blockq)"


@pytest.mark.parametrize(("uplink", "downlink"), [("topk(ratio={})", "none"), ("sign", "shared(topk(ratio={}))")])
def test_a_schedule_is_refused_by_name(uplink: str, downlink: str) -> None:
    up, down = (spec.format("linear(1/16, 1/4)") for spec in (uplink, downlink))
    with pytest.raises(SpecError, match=r"(up|down)link=.*linear.*: a plan needs numbers that do not change"):
        plan(Setting(1000, 0, compressor(up), 5), down, expected_contacts(10, 2, 5))


# -- recipes ---------------------------------------------------------------------------------------------------------

RESNET18 = Setting(11_173_962, 9600, compressor("sign"), 500)
NETWORKS = {profile.name: profile for profile in PROFILES}


def advised(
    setting: Setting = RESNET18, clients: int = 100, cohort: int = 10, network: str = "4G", memory: float = 64e9
) -> tuple[str, str]:
    contacts = expected_contacts(clients, cohort, setting.rounds)
    found = advise(plan_recipes(setting, contacts), contacts, memory, NETWORKS[network])
    return found.option.name, found.reason


def test_every_recipe_is_planned_with_fewer_bytes_than_the_one_before() -> None:
    options = plan_recipes(RESNET18, expected_contacts(100, 10, 500))
    assert [option.name for option in options] == ["none", *RECIPES]
    totals = [option.plan.total for option in options]
    assert totals == sorted(totals, reverse=True)


@together(
    ("changes", "name", "why"),
    [
        ({}, "lighter", r"67x fewer bytes .*; lightest would make it 1\.4x shorter, but lose more accuracy\.$"),
        ({"memory": 1e9}, "one-way", r"light would keep 4\.52 GB of models at the server, which has 1\.00 GB"),
        (
            {"clients": 5000, "cohort": 10, "memory": 1e13},
            "one-way",
            "light needs clients that take part about 4 times",
        ),
        ({"clients": 1000, "cohort": 10}, "light", r"lighter needs .* about 8 times, .* and yours take part 5 times"),
        (
            {"setting": Setting(5000, 0, compressor("sign"), 500)},
            "none",
            r"7.% of that is latency, which compression cannot",
        ),
        ({"setting": Setting(50_000, 0, compressor("sign"), 500), "network": "Satellite"}, "none", "is latency"),
        ({"setting": Setting(500_000, 0, compressor("sign"), 500), "network": "Satellite"}, "one-way", "is latency"),
        (
            {"setting": Setting(5_000_000, 0, compressor("sign"), 500), "network": "Satellite"},
            "light",
            "takes 1.01 s instead of 18.2 s",
        ),
    ],
)
def test_recipes_are_advised_by_memory_clients_and_networks(changes: dict[str, Any], name: str, why: str) -> None:
    found, reason = advised(**changes)
    assert (found, bool(re.search(why, reason))) == (name, True), reason


def test_where_only_the_way_down_is_slow_one_way_is_passed_over_and_both_ways_are_advised() -> None:
    contacts = expected_contacts(100, 10, 500)
    options = plan_recipes(RESNET18, contacts)
    network = Profile("slow down", down=1, up=1000, latency=10)
    dense, one_way = (option.plan.seconds(network) for option in options[:2])
    assert dense < 1.01 * one_way
    assert advise(options, contacts, 64e9, network).option.name == "lighter"


@pytest.mark.parametrize("ratio", [1 / 2, 1 / 13, 1 / 22])
def test_what_arrives_of_gaussian_coordinates(ratio: float) -> None:
    x, layout = torch.randn(100_000, generator=torch.Generator().manual_seed(1)), Layout.flat(100_000)
    codec = compressor(f"ternary(ratio={Fraction(ratio).limit_denominator(100)})")
    left = x - codec.decode(codec.encode(x, layout), layout)
    assert 1 - float(left.square().sum() / x.square().sum()) == pytest.approx(arriving(ratio), rel=0.01)


def test_times_are_transfers_and_latency() -> None:
    setting = Setting(1000, 0, compressor("identity"), 10)
    one = plan(setting, "none", expected_contacts(5, 5, 10))
    profile = Profile("test", down=8, up=0.8, latency=100)
    assert one.seconds(profile, 10) == pytest.approx(10 * 0.1 + one.down / 5 / 1e6 + one.up / 5 / 1e5)


def test_the_papers_tables_are_its_rule_to_the_digits_it_prints() -> None:
    one, two = paper_tables()
    assert (len(one), len(two)) == (5, 5)
    for row in one + two:
        assert float(f"{row.bits:.2e}") == float(row.printed)


@dataclass(frozen=True)
class Own(Downlink):
    """What it sends only it knows."""

    name = "own"
    send = deliver = paper_bits = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Priced(Own):
    """It can compute what it sends: two bytes per coordinate and contact."""

    name = "priced"

    def cost(self, layout: Layout, contacts: Contacts, rounds: int) -> DownlinkCost:
        return DownlinkCost(2.0 * layout.d * contacts.total, 0.0, 0.0, memory=rounds, bound=0.25)


def test_a_downlink_of_ones_own_is_planned_by_its_own_cost_and_never_taken_for_a_dense_one() -> None:
    setting, contacts = Setting(1000, 0, compressor("identity"), 10), expected_contacts(5, 5, 10)
    with pytest.raises(SpecError, match=r"own: its cost is not known before it runs; write Own\.cost"):
        plan(setting, Own(), contacts)
    found, dense = plan(setting, Priced(), contacts), plan(setting, "none", contacts)
    assert (found.deltas, found.catchup, found.dense) == (2.0 * 1000 * 50, 0.0, 0.0)
    assert (found.memory, found.bound) == (10, 0.25)
    assert (found.up, found.rest) == (dense.up, dense.rest)


@together("spec", [spec for cls in registered("downlink").values() for spec in cls.examples])
def test_every_downlink_says_what_it_costs(spec: str) -> None:
    """With all clients in every round, twice the clients cost twice the bytes; the bound is a part of the whole."""
    layout = Layout.flat(5000)
    one, two = (downlink(spec).cost(layout, expected_contacts(n, n, 20), 20) for n in (4, 8))
    sent = [sum(cost[:3]) for cost in (one, two)]
    assert sent[1] == pytest.approx(2 * sent[0])
    assert sent[0] > 0
    assert 0 <= one.bound <= 1
    assert one.memory >= 0
