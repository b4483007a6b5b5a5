"""The simulator: the two halves in one process, bit for bit, and the paper's algorithm."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fedcams
import oracle
from fedcams import FedcamsError
from fedcams.layout import Layout
from fedcams.own import simulate
from fedcams.registry import registered
from fedcams.rounds.messages import instruction_size
from fedcams.rows import RowStore
from fedcams.simulation import RoundRecord
from fedcams.tasks import accuracy
from halves import CLIENTS, KEEP_PAIRS, TEST, Point, assert_equal_rounds, examples, net, quadratic_loss, quadratics, run
from together import together

# -- the paper's algorithm ---------------------------------------------------------------------------------------------


def test_a_quadratic_is_the_papers_algorithm_round_by_round() -> None:
    clients, d = 6, 40
    data, gradient = quadratics(clients, d), oracle.quadratic(clients, d)
    for uplink, compress in {"sign": oracle.scaled_sign, "topk(ratio=0.1)": partial(oracle.topk, ratio="1/10")}.items():
        history = simulate(
            Point(d),
            data,
            server="fedams(lr=0.1)",
            uplink=uplink,
            rounds=20,
            cohort=3,
            local="sgd(lr=0.05, steps=5)",
            loss=quadratic_loss,
        )
        cohorts = [record.cohort for record in history.run().records]
        expected = oracle.run(np.zeros(d), gradient, cohorts, 5, 0.05, partial(oracle.fedams, lr=0.1), compress)
        assert np.linalg.norm(history.state.x.numpy() - expected[-1]) <= 1e-5 * np.linalg.norm(expected[-1])


# -- what a run gives --------------------------------------------------------------------------------------------------


def test_two_runs_with_one_seed_are_identical_and_others_are_not() -> None:
    def lines(seed: int) -> list[str]:
        return [record.to_json() for record in run(uplink="topk(ratio=0.1)", seed=seed, probes="q + gamma")]

    assert lines(1) == lines(1)
    assert lines(1) != lines(2)
    assert [RoundRecord.from_json(line).to_json() for line in lines(1)] == lines(1)


def test_records_of_before_the_downlink_was_told_apart_are_read() -> None:
    record = next(iter(run()))
    values = json.loads(record.to_json())
    added = ("wire_down_deltas", "wire_down_catchup", "wire_down_dense", "held_loss", "held_accuracy")
    old = {key: value for key, value in values.items() if key not in added}
    read = RoundRecord.from_json(json.dumps(old))
    assert read == dataclasses.replace(record, **dict.fromkeys(added))
    assert record.wire_down_dense == record.wire_down - instruction_size({"model": 0}) * len(record.cohort)


def test_stacked_and_loop_tell_the_same_story() -> None:
    stories = [run(engine=name, uplink="sign").run() for name in ("loop", "stacked")]
    assert float((stories[0].state.x - stories[1].state.x).norm()) <= 1e-4 * float(stories[0].state.x.norm())


def test_it_learns_and_compression_costs_few_bytes() -> None:
    dense, sign = (run(uplink=uplink, rounds=40, server="fedams(lr=0.05)").run() for uplink in ("identity", "sign"))
    assert dense.records[-1].test_accuracy > 0.85
    assert sign.records[-1].test_accuracy > 0.8
    assert sign.records[-1].wire_up * 3 < dense.records[-1].wire_up
    assert sign.records[-1].paper_bits_up == 32 + sign.simulation.server.layout.d
    assert 0 < sign.records[-1].probes["q"] < 1
    assert dense.records[-1].probes["q"] == 0


def test_rounds_run_while_the_history_is_read() -> None:
    history = run()
    assert history.records == []
    first = list(itertools.islice(history, 2))
    assert len(history.records) == 2
    assert list(history)[:2] == first
    assert len(history.records) == 6
    frame = history.to_frame()
    assert list(frame.index) == [1, 2, 3, 4, 5, 6]
    assert frame["wire_up"].sum() == sum(record.wire_up for record in history.records)


def test_the_final_model_is_the_servers() -> None:
    original = net(norm=True)
    before = {name: value.clone() for name, value in original.state_dict().items()}
    history = run(model=original, **KEEP_PAIRS).run()
    model = history.model
    assert all(torch.equal(value, original.state_dict()[name]) for name, value in before.items()), "the model is copied"
    assert torch.equal(history.simulation.problem.layout.read(model), history.state.x)
    outputs = model(TEST[0])
    assert float((outputs.argmax(1) == TEST[1]).float().mean()) == pytest.approx(history.records[-1].test_accuracy)


def test_an_empty_cohort_makes_no_step_and_is_recorded() -> None:
    history = run(cohort="bernoulli(p=0.05)", rounds=30)
    x = history.state.x.clone()
    for record in history:
        if not record.cohort:
            assert torch.equal(history.state.x, x)
            assert (record.wire_up, record.train_loss, record.delta_norm) == (0, None, 0.0)
            assert record.test_accuracy is not None
        x = history.state.x.clone()
    assert {len(record.cohort) for record in history.records} >= {0, 1}


def test_evaluation_every_few_rounds() -> None:
    assert [record.test_loss is not None for record in run(evaluate_every=3)] == [False, False, True] * 2
    assert all(r.test_loss is None for r in simulate(net(), CLIENTS, rounds=2, cohort=2))


@pytest.mark.parametrize("every", [2, 99])
def test_the_last_round_is_always_evaluated(every: int) -> None:
    assert [r.round for r in run(rounds=3, evaluate_every=every) if r.test_loss is not None] == [2, 3][every == 99 :]


def test_a_history_says_its_last_score_and_that_it_has_no_round_yet() -> None:
    history = simulate(net(), CLIENTS, TEST, rounds=3, cohort=2, evaluate_every=2)
    with pytest.raises(IndexError, match=r"no round has run yet; call history.run\(\) first"):
        history[-1]
    steps = iter(history)
    first, second = repr(next(steps) and history), next(steps)
    assert first.endswith("test accuracy None)")
    assert repr(history).endswith(f"test accuracy {second.test_accuracy})")
    assert len(history.run()) == 3


def test_gamma_is_zero_without_compression_and_not_with_it() -> None:
    assert all(record.probes["gamma"] < 1e-6 for record in run(probes="q + gamma"))
    assert all(record.probes["gamma"] > 0.01 for record in run(probes="q + gamma", uplink="sign"))


@pytest.mark.parametrize("transforms", ["clip(norm=0.05)", "fednova", "clip(norm=0.05) + fednova"])
def test_gamma_compares_what_transforms_made_of_updates(transforms: str) -> None:
    """Without compression nothing is apart, whatever updates went through; with it something is."""
    options = {"transforms": transforms, "weighting": "examples", "probes": "gamma", "test": None}
    assert all(record.probes["gamma"] < 1e-6 for record in run(**options))
    assert all(record.probes["gamma"] > 0.01 for record in run(**options, uplink="sign"))


def test_gamma_follows_the_weights_of_the_mean() -> None:
    options = {"uplink": "identity", "weighting": "examples", "probes": "q + gamma", "server": "fedavg"}
    assert max(record.probes["gamma"] for record in run(**options)) < 1e-5


def test_probes_leave_out_the_clients_that_were_refused() -> None:
    """A bound at the root mean square of the norms refuses those above it, so that of the others is below it."""
    bound = run(probes="norms", guard="none", rounds=1).run().records[0].probes["update_norm"]
    (record,) = run(probes="norms", guard="none", rounds=1, transforms=f"max_norm({bound:.9g})").run().records
    assert 0 < len(record.refused) < len(record.cohort)
    assert record.probes["update_norm"] < bound


def test_weighting_by_examples_and_sampling_by_them() -> None:
    uniform, weighted = (run(weighting=weighting, cohort="full").run() for weighting in ("uniform", "examples"))
    assert not torch.equal(uniform.state.x, weighted.state.x)
    assert len(run(cohort="weighted(n=2)").run().records[0].cohort) == 2


def test_residuals_may_be_kept_on_disk(tmp_path: Any) -> None:
    model = net()
    store = RowStore.on_disk({"residual": Layout.of(model)}, tmp_path)
    on_disk, in_memory = run(model=model, uplink="sign", rows=store).run(), run(model=model, uplink="sign").run()
    assert torch.equal(on_disk.state.x, in_memory.state.x)
    assert store.ids()


@pytest.mark.parametrize("downlink", [spec for cls in registered("downlink").values() for spec in cls.examples])
def test_the_model_that_clients_hold_is_evaluated_where_all_hold_one(downlink: str) -> None:
    history = run(downlink=downlink, uplink="sign", rounds=3).run()
    common = history.simulation.server.method.downlink.common(history.state.downlink)
    for record in history.records:
        assert (record.held_accuracy is None) == (record.held_loss is None) == (not common)


def test_the_held_model_is_evaluated_with_the_buffers_that_clients_hold() -> None:
    ways = {"downlink": "shared(blockq(bits=2))", "buffers": "blockq(bits=2, block=8)"}
    history = run(model=net(norm=True), rounds=3, **ways, **KEEP_PAIRS).run()
    simulation, (x, y) = history.simulation, TEST
    held = simulation.server.method.downlink.common(history.state.downlink)
    with torch.no_grad():
        losses = [
            float(F.cross_entropy(simulation.problem.load(held["model"], buffers).eval()(x), y))
            for buffers in (held["buffers"], history.state.buffers)
        ]
    assert history.records[-1].held_loss == pytest.approx(losses[0], rel=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[0], "the server's own buffers are others"


# -- people's own data and models --------------------------------------------------------------------------------------


class Lazy(Mapping[int, Any]):
    """Ten thousand clients that are made when asked for."""

    def __init__(self) -> None:
        self.loaded: set[int] = set()

    def __getitem__(self, client: int) -> Any:
        self.loaded.add(client)
        return examples(10, client)

    def __iter__(self) -> Iterator[int]:
        return iter(range(10_000))

    def __len__(self) -> int:
        return 10_000


def test_clients_that_never_take_part_are_never_loaded() -> None:
    lazy = Lazy()
    history = run(clients=lazy, cohort=5, uplink="sign").run()
    taken = set().union(*(record.cohort for record in history.records))
    assert lazy.loaded == taken | {0}, "the first one tells how many classes there are"
    assert history.simulation.client.rows.ids() == sorted(taken)


class Pairs:
    """A map-style dataset of plain Python and NumPy values."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.items = [(row.numpy(), int(label)) for row, label in zip(x, y, strict=True)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self.items[i]


def test_datasets_and_arrays_are_as_good_as_tensors() -> None:
    tensors = run().run()
    for clients in (
        [Pairs(*pair) for pair in CLIENTS],
        [(x.numpy(), y.numpy()) for x, y in CLIENTS],
        [[x.double().numpy(), y.numpy()] for x, y in CLIENTS],
    ):
        assert torch.equal(tensors.state.x, run(clients=clients).run().state.x)


def test_regression() -> None:
    data = [(x, x @ torch.arange(8.0)[:, None] / 8) for x, _ in CLIENTS]
    history = simulate(
        nn.Linear(8, 1),
        data,
        data[0],
        rounds=40,
        cohort=4,
        server="fedavg",
        local="sgd(lr=0.05, epochs=2)",
        loss=lambda out, y: (out - y).square().mean(-1),
        metric=lambda out, y: -(out - y).abs().mean(-1),
    ).run()
    assert history.records[-1].test_loss < 0.1 * history.records[0].test_loss
    assert history.records[-1].test_accuracy > -0.3


def test_token_models_with_a_mean_loss() -> None:
    """Next-token prediction; the loss is a mean over examples and positions, so clients are grouped by size."""
    rows = [torch.arange(n * 6).reshape(n, 6) % 7 for n in (5, 8, 3, 9)]
    data = [(row[:, :-1], row[:, 1:]) for row in rows]
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))
    history = simulate(
        model,
        data,
        data[0],
        rounds=30,
        cohort=2,
        server="fedavg",
        local="sgd(lr=1, epochs=3, batch=4)",
        loss=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        metric=lambda out, y: (out.argmax(-1) == y).float().mean(-1),
    ).run()
    assert history.records[-1].test_accuracy > 0.9


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_copy_of_a_run_goes_on_as_the_run_does(rounds: int) -> None:
    first = run(model=net(norm=True), **KEEP_PAIRS)
    for _ in range(rounds):
        next(iter(first))
    second = copy.deepcopy(first)
    assert first.run().records == second.run().records
    assert torch.equal(first.state.x, second.state.x)


class Moving(nn.Linear):
    """Puts a new tensor in place of its buffer."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return super().forward(x - self.mean)


def test_the_model_that_is_tested_has_the_servers_buffers() -> None:
    history = run(model=Moving()).run()
    loss = F.cross_entropy(history.model(TEST[0]), TEST[1]).item()
    assert history.records[-1].test_loss == pytest.approx(loss, rel=1e-6)


def test_numpys_integers_are_as_good_as_pythons() -> None:
    truth = run(seed=3).run()
    few = {np.int64(i): (x, y.int()) for i, (x, y) in enumerate(CLIENTS)}
    ours = run(clients=few, seed=np.int64(3), cohort=np.int64(3), rounds=np.int32(6), test=(TEST[0], TEST[1].byte()))
    assert ours.run().records == truth.records
    assert [record.to_json() for record in ours] == [record.to_json() for record in truth]


def test_places_of_a_sequence_count_alike() -> None:
    """Outputs `[n, classes, places]`: loss and accuracy are means over examples and places."""
    clients = [(x, y[:, None].repeat(1, 2)) for x, y in CLIENTS]
    model = nn.Sequential(net(), nn.Unflatten(1, (3, 1)), nn.Upsample(scale_factor=2))
    twice = run(model=model, clients=clients, test=(TEST[0], TEST[1][:, None].repeat(1, 2)))
    once = run(model=net())
    for ours, truth in zip(twice, once, strict=True):
        assert ours.test_loss == pytest.approx(truth.test_loss, rel=1e-5)
        assert ours.test_accuracy == truth.test_accuracy


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_trains_wherever_it_is_called(mode: Any) -> None:
    truth = run().run()
    with mode():
        ours = run().run()
    assert ours.records == truth.records
    assert not ours.model[0].weight.is_inference()


def test_the_default_precision_of_tensors_does_not_matter() -> None:
    options = {"uplink": "sign", "weighting": "examples"}
    truth = run(**options, model=(model := net(norm=True)), **KEEP_PAIRS).run()
    torch.set_default_dtype(torch.float64)
    try:
        ours = run(**options, model=model, **KEEP_PAIRS).run()
    finally:
        torch.set_default_dtype(torch.float32)
    assert ours.records == truth.records


def test_runs_in_threads_draw_as_if_alone() -> None:
    """Dropout draws from torch's one generator, which is given back as it was."""
    before = torch.get_rng_state()
    dropping = partial(simulate, nn.Sequential(net(), nn.Dropout(0.5)), CLIENTS, TEST, rounds=4, cohort=3)
    truth = dropping().run()
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: dropping().run(), range(3)))
    assert all(ours.records == truth.records for ours in found)
    assert torch.equal(torch.get_rng_state(), before)


# -- what is refused ---------------------------------------------------------------------------------------------------

MARKED = (CLIENTS[5][0], CLIENTS[5][1] + 3)


def marked_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of marked targets not a number, with a gradient that is one."""
    mark = torch.where(targets > 2, float("nan"), 0.0)
    return F.cross_entropy(outputs, targets % 3, reduction="none") + mark


def test_a_client_whose_loss_is_not_finite_is_refused_alone_and_alike_through_bytes() -> None:
    clients = [*CLIENTS[:5], MARKED, *CLIENTS[6:]]
    options = {"clients": clients, "loss": marked_loss, "uplink": "sign", "engine": "loop", "seed": 3, "cohort": 5}
    for downlink in ("none", "replica(blockq)", "shared(sign)"):
        batched, apart = (run(**options, downlink=downlink, rounds=5) for _ in range(2))
        assert_equal_rounds(batched, apart)
        met = [record for record in batched.records if 5 in record.cohort]
        assert met
        for record in batched.records:
            assert (5 in record.refused) == (5 in record.cohort)
            assert record.train_loss is not None
        assert met[0].refused == {5: "UpdateError: the training reports the loss nan; lower the learning rate or clip"}
        assert 5 not in batched.simulation.client.rows.ids(), "who is refused keeps the residual it had: none"


def test_gamma_compares_what_a_client_sends_whose_loss_is_not_finite_under_noise() -> None:
    """It sends noise in place of its update, so without compression nothing is apart."""
    clients = [*CLIENTS[:5], MARKED, *CLIENTS[6:]]
    noisy = {"privacy": "client(clip=0.1, noise=0.1)", "guard": "none", "uplink": "identity", "probes": "gamma"}
    records = run(clients=clients, loss=marked_loss, **noisy, engine="loop", cohort="full", rounds=2).run().records
    assert all(record.probes["gamma"] < 1e-6 and not record.refused for record in records)


def steep_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of marked targets as usual, with a gradient that overflows."""
    steep = (outputs[:, 0] * 3e38).where(targets > 2, torch.zeros(()))
    return F.cross_entropy(outputs, targets % 3, reduction="none") + (steep - steep.detach())


def test_an_update_that_is_not_finite_is_refused_alone() -> None:
    clients = [*CLIENTS[:5], (MARKED[0] * 100, MARKED[1]), *CLIENTS[6:]]
    for by in ("loop", "stacked"):
        for uplink in ("sign", "topk(ratio=0.1)", "identity"):
            options = {"clients": clients, "loss": steep_loss, "uplink": uplink, "local": "sgd(lr=10, steps=1)"}
            history = run(**options, cohort="full", engine=by, rounds=3).run()
            assert [set(record.refused) for record in history.records] == [{5}] * 3
            assert "the update is not finite: '0.weight' has" in history.records[0].refused[5]
            assert torch.isfinite(history.state.x).all()
            batched, apart = (run(**options, engine="loop", rounds=4, seed=1) for _ in range(2))
            assert_equal_rounds(batched, apart)


def test_a_round_in_which_all_are_refused_makes_no_step() -> None:
    history = run(local="sgd(lr=1e30, epochs=9)", uplink="sign")
    before = history.state.x.clone()
    for record in history:
        assert sorted(record.refused) == record.cohort
        assert all(re.search("not finite|reports the loss|has the norm inf", why) for why in record.refused.values())
        assert (record.delta_norm, record.train_loss) == (0.0, None)
        assert record.wire_up > 0, "refusals are sent too"
    assert torch.equal(history.state.x, before)


class Locked(nn.Linear):
    """A model that cannot be copied."""

    def __init__(self) -> None:
        super().__init__(8, 2)
        self.lock = threading.Lock()


class Complex(nn.Module):
    """A model with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 2, dtype=torch.complex64))


def hooked() -> nn.Module:
    """Keeps a bias as it is, by a hook."""
    bias = nn.Parameter(torch.zeros(3))
    bias.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
    model = nn.Linear(8, 3)
    model.bias = bias
    return model


REGRESSION = [(x, x[:, 0]) for x, _ in CLIENTS]
THREE = (torch.ones(3, 8), torch.tensor([0, 1, 2]))
BAD: list[tuple[str, dict[str, Any]]] = [
    ("cohort=9, but there are only 8 clients; give at most 8", {"cohort": 9}),
    ("n=9 of only 8 clients", {"cohort": "uniform(n=9)"}),
    ("clients is empty", {"clients": []}),
    ("client 1 has 0 inputs and 0 targets", {"clients": [CLIENTS[0], (torch.empty(0, 8), torch.empty(0).long())]}),
    ("client 0 is a int; give a pair of tensors", {"clients": [3, 4, 5]}),
    (
        r"client 2 has targets from 0 to 3; allowed: integers from 0 to 2",
        {"clients": [*CLIENTS[:2], (torch.ones(4, 8), torch.arange(4))]},
    ),
    ("test has targets from 5 to 7; allowed: integers", {"test": (CLIENTS[0][0][:3], torch.tensor([5, 6, 7]))}),
    (
        "client 0 has targets from 0.0 to 2.0 of type float32, but .* needs integers from 0 to 2; convert them",
        {"clients": [(x, y.float()) for x, y in CLIENTS]},
    ),
    ("client 0 is a DataLoader; give its .dataset", {"clients": [DataLoader(TensorDataset(*CLIENTS[0]))]}),
    ("clients has the id 'ada'; give each client an integer", {"clients": {"ada": CLIENTS[0], 1: CLIENTS[1]}}),
    ("client 0 is a Tensor; give a pair of tensors", {"clients": CLIENTS[0]}),
    ("client 0: an example is a Tensor; make it a pair", {"clients": [[torch.ones(8)] * 3]}),
    ("client 0: the model takes input, but examples have x, y; rename", {"clients": [[{"x": torch.ones(8), "y": 1}]]}),
    ("clients is a set; give a list, or a mapping", {"clients": {1, 2}}),
    ("no trainable parameter", {"model": net().requires_grad_(False)}),
    ("rounds=0; allowed: 1 or more", {"rounds": 0}),
    (r"rounds=2.5; give a whole number", {"rounds": 2.5}),
    (r"seed='a'; give a whole number", {"seed": "a"}),
    (r"theory_every=True; give a whole number", {"theory_every": True}),
    (r"cohort=0.5; give a whole number from 1, or a sampler", {"cohort": 0.5}),
    (r"cohort=0; give a whole number from 1", {"cohort": 0}),
    (r"cohort=True; give a whole number from 1", {"cohort": True}),
    (r"cohort='5'; give a whole number from 1", {"cohort": "5"}),
    ("give a torch.nn.Module", {"model": nn.Linear}),
    ("model: the parameter 'weight' has no shape yet; call the model once", {"model": nn.LazyLinear(3)}),
    ("model: the parameter 'bias' has a hook, which copies of the model lose; change", {"model": hooked()}),
    ("model: parameters on the device meta have no values", {"model": nn.Linear(8, 3, device="meta")}),
    ("model: parameters on the device meta have no values", {"device": "meta"}),
    (
        r"the model fails with the inputs of client 0, float64 \[2, 8\]: .*; .*\(its parameters are float32\), or ",
        {"clients": [(x.double(), y) for x, y in CLIENTS]},
    ),
    ("the model has one output, but .*; give loss=torch.nn.BCEWithLogitsLoss()", {"model": nn.Linear(8, 1)}),
    (
        r"outputs \[2, 3\] and targets \[2, 1\] do not fit; give targets \[2\], one class number each",
        {"clients": [(x, y[:, None]) for x, y in CLIENTS]},
    ),
    (
        r"outputs \[2, 8, 3\] and targets \[2\] do not fit; give targets \[2, 3\] or \[2, 8\], one class number each",
        {"model": nn.Sequential(nn.Unflatten(1, (8, 1)), nn.Linear(1, 3))},
    ),
    (
        r"the model returns shape \[6\] for 2 examples; make it \[2, classes\]",
        {"model": nn.Sequential(net(), nn.Flatten(0))},
    ),
    ("the model returns a tuple for 2 examples; .*or give a loss", {"model": nn.LSTM(8, 3)}),
    ("rows has residual with d=3", {"uplink": "sign", "rows": RowStore.in_memory({"residual": Layout.flat(3)})}),
    ("no server is named 'fedamz'", {"server": "fedamz"}),
    ("uplink=randk.* has no bound on its error.*feedback=true", {"uplink": "randk(ratio=0.5, scaled=true)"}),
    ("no engine is named 'stackd'", {"engine": "stackd"}),
    ("probes=None is a NoneType; give specs joined by", {"probes": None}),
    (r"clients has the id -1; give each client an integer from 0", {"clients": {-1: CLIENTS[0]}}),
    ("loss='mse'; give a function", {"loss": "mse"}),
    ("metric=3; give a function, or a dict of functions by name", {"metric": 3}),
    ("metric: the name 'accuracy' at position 2", {"metric": {"f1": accuracy, "accuracy": accuracy}}),
    (
        r"metric scores returns a dict \(f1\); return one number",
        {"metric": {"scores": lambda outputs, y: {"f1": 1.0}}, "test": CLIENTS[0]},
    ),
    (r"loss returns the shape \[3\] for 2 examples; .*\[2\], or their mean", {"loss": lambda out, y: out.mean(0)}),
    ("loss returns a float; return a float tensor", {"loss": lambda out, y: out.mean().item()}),
    ("loss=CrossEntropyLoss is a class; give an instance", {"loss": nn.CrossEntropyLoss}),
    ("metric=Module is a class; give an instance", {"metric": {"mine": nn.Module}}),
    ("loss does not depend on the trainable parameters", {"loss": lambda out, y: out.detach().mean()}),
    (r"loss fails with outputs float32 \[2, 3\] and targets int64 \[2\]: .*; give targets", {"loss": nn.MSELoss()}),
    (
        r"loss returns the shape \[2, 2\] for 2 examples: outputs float32 \[2, 1\] and targets float32 \[2\] broadcast",
        {"model": nn.Linear(8, 1), "clients": REGRESSION, "loss": lambda out, y: (out - y).square()},
    ),
    (
        r"loss compares every output with every target: outputs float32 \[2, 1\] and targets float32 \[2\] broadcast",
        {"model": nn.Linear(8, 1), "clients": REGRESSION, "loss": lambda out, y: (out - y).square().mean()},
    ),
    (
        r"loss compares every output with every target: .*; give both the same shape",
        {"model": nn.Linear(8, 1), "clients": REGRESSION, "loss": lambda out, y: (out - y).abs().sum()},
    ),
    (
        r"test: the shape of targets is \[\d+, 1\], but \[\d+\] for client 0; give both the same number of axes",
        {
            "model": nn.Sequential(nn.Linear(8, 1), nn.Flatten(0)),
            "clients": REGRESSION,
            "loss": nn.MSELoss(),
            "test": (REGRESSION[0][0], REGRESSION[0][1][:, None]),
        },
    ),
    (
        r"client 1: the shape of targets is \[\d+, 1\], but \[\d+\] for client 0; give both the same number of axes",
        {
            "model": nn.Sequential(nn.Linear(8, 1), nn.Flatten(0)),
            "clients": [REGRESSION[0], (REGRESSION[1][0], REGRESSION[1][1][:, None])],
            "loss": nn.MSELoss(),
            "engine": "loop",
        },
    ),
    (
        "test has inputs/input, targets/input, but client 0 has inputs, targets; give both examples in the same form",
        {"test": {"input": CLIENTS[0][0]}},
    ),
    (
        r"the model fails with the inputs of test, float32 \[2, 5\]: ",
        {"test": (torch.ones(3, 5), torch.ones(3).long())},
    ),
    (
        "loss fails with .*: Using a target size .* different to the input size",
        {"model": nn.Linear(8, 1), "clients": REGRESSION, "loss": nn.MSELoss()},
    ),
    ("loss returns the sum over 2 examples, .*; return one number per", {"loss": nn.CrossEntropyLoss(reduction="sum")}),
    (
        "loss returns the sum over 2 examples",
        {"loss": nn.CrossEntropyLoss(reduction="sum"), "clients": [(x[:1], y[:1]) for x, y in CLIENTS[:1]] + CLIENTS},
    ),
    ("model: cannot pickle .*; give one that copy.deepcopy can copy", {"model": Locked()}),
    ("the parameter 'w' is torch.complex64; give its real and imaginary parts", {"model": Complex()}),
    (r"out=3; give a folder such as out='runs/mine'", {"out": 3}),
    (
        r"metric mine returns the shape \[2\] for 3 examples; return one number, or one per example",
        {"metric": {"mine": lambda out, y: [0.5, 1.0]}, "test": THREE},
    ),
    (
        r"metric mine returns the shape \[3, 3\]: it compares all pairs; give outputs and targets one shape",
        {"metric": {"mine": lambda out, y: out.argmax(1) == y[:, None]}, "test": THREE},
    ),
    (
        r"metric mine returns the shape \[2\] for the whole test set; return one number, and give the others names",
        {"metric": {"mine": fedcams.over_test_set(lambda out, y: [0.5, 1.0])}, "test": THREE},
    ),
    ("device='cuda:99': .*; cpu always works", {"device": "cuda:99"}),
    ("augment=3; give something with the methods draw and apply", {"augment": 3}),
    ("callbacks=.*; give a list of functions that take a record", {"callbacks": print}),
    ("checkpoint_every='often'; give a whole number", {"checkpoint_every": "often"}),
    ("rows='here'; give a RowStore", {"rows": "here", "uplink": "sign"}),
    (r"client 1: Expected more than 1 value per channel.*; set drop_last=true", {"model": net(True), "cohort": "full"}),
]


@together(("message", "options"), BAD)
def test_bad_input_is_refused_with_what_to_do(message: str, options: dict[str, Any]) -> None:
    if "clients" in options:
        options = {"cohort": "full", **options}
    with pytest.raises(FedcamsError, match=message):
        run(**options).run()


def test_a_cohort_larger_than_the_population_is_refused_before_anything_runs() -> None:
    with pytest.raises(FedcamsError, match="cohort=9, but there are only 8 clients"):
        run(cohort=9)


@pytest.mark.parametrize(("population", "cohort"), [(4, 4), (12, 10)])
def test_a_cohort_has_ten_clients_or_all_if_there_are_fewer(population: int, cohort: int) -> None:
    history = run(clients=[examples(3, seed) for seed in range(population)], cohort=None, rounds=1).run()
    assert len(history.records[0].cohort) == cohort


def test_a_client_with_fewer_examples_than_a_batch_makes_one_of_what_it_has() -> None:
    history = run(clients=[examples(3, 0)], cohort=1, local="sgd(batch=20, drop_last=true)", rounds=1).run()
    assert history.records[0].train_loss is not None
