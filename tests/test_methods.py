"""Methods: for everything registered, the batched simulator equals both sides exchanging bytes, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import oracle
from fedcams import Layout, Method, SpecError, compressor, simulate
from fedcams.local import local
from fedcams.own import History
from fedcams.registry import registered
from halves import Point, assert_equal_rounds, examples, net, quadratic_loss, quadratics, run
from pairs import Option, kinds, pairs_of, pairwise
from together import together


def examples_of(kind: str) -> list[str]:
    return [spec for cls in registered(kind).values() for spec in cls.examples]


def small(spec: str) -> str:
    """The local rule with few short batches, none of a single example, which batch-norm cannot train on."""
    rule = local(spec)
    return str(dataclasses.replace(rule, epochs=rule.epochs and 1, batch=min(rule.batch, 8), drop_last=True))


CONTRACTIVE = [
    spec for spec in examples_of("compressor") if compressor(spec).squared_error_bound(Layout.flat(9)) is not None
]
NO_BUFFERS = "no buffers"
AXES = {  # the last value of each fits everything
    "uplink": [*examples_of("compressor"), "topk(ratio=linear(1/16, 1/4))", "identity"],
    "downlink": [*examples_of("downlink"), "replica(topk(ratio=linear(1/32, 1/8)))", "none"],
    "server": [*registered("server"), "fedams(lr=cosine(1, 0))", "fedavg"],
    "local": [*map(small, examples_of("local")), "sgd(lr=linear(0.1, 0.01), batch=8, drop_last=true)", small("sgd")],
    "buffers": ["identity", "blockq(bits=8)", "topk(ratio=0.1)", NO_BUFFERS],
    "transforms": [*examples_of("transform"), "clip(norm=0.1) + fednova", "max_norm(bound=0.4)", ""],
    "control": [*examples_of("control"), "none"],
    "aggregate": [*examples_of("aggregate"), "mean"],
    "weighting": ["examples", "sampler", "uniform"],
    "average": [*examples_of("average"), "none"],
    "feedback": ["true", "false"],
}
AXES = {axis: list(dict.fromkeys(reversed(values)))[::-1] for axis, values in AXES.items()}


def fields(options: dict[str, str]) -> dict[str, str | bool]:
    """The fields of a method that has these options."""
    return {
        axis: value == "true" if axis == "feedback" else "identity" if value == NO_BUFFERS else value
        for axis, value in options.items()
    }


HARMLESS = Method(**fields({axis: values[-1] for axis, values in AXES.items()}))


@cache
def fits(one: Option, other: Option) -> bool:
    """Whether a method may have both, everything else being harmless."""
    try:
        dataclasses.replace(HARMLESS, **fields(dict([one, other])))
    except SpecError:
        return False
    return True


def kind(option: Option) -> Option:
    """The option without its settings, where they are the business of one stream or of one client alone."""
    axis, spec = option
    name, scheduled = spec.partition("(")[0], "linear(" in spec
    return (axis, f"{name} in rounds" if scheduled else name) if axis in ("uplink", "downlink", "local") else option


@cache
def cases() -> list[dict[str, str]]:
    return pairwise(AXES, fits, kind)


def test_every_two_kinds_that_fit_are_run() -> None:
    run_ones = {frozenset((a, b)) for case in cases() for a in case.items() for b in case.items() if a[0] < b[0]}
    assert run_ones <= pairs_of(AXES, fits)
    assert {kinds(pair, kind) for pair in run_ones} == {kinds(pair, kind) for pair in pairs_of(AXES, fits)}
    for axis, values in AXES.items():
        assert {case[axis] for case in cases()} == set(values), "every option is run"
    largest = sorted(len({kind((axis, value)) for value in values}) for axis, values in AXES.items())[-2:]
    assert len(cases()) < 1.5 * largest[0] * largest[1], "far fewer than the product"


SHORT = [examples(8 + 2 * i, i) for i in range(8)]
"""Clients of one or two batches."""


def check_halves(case: dict[str, str], seed: int) -> None:
    options = {
        "clients": SHORT,
        "model": net(case["buffers"] != NO_BUFFERS),
        "method": Method(**fields(case)),
        "test": None,
        "rounds": 3,
    }
    batched, apart = (run(**options, local=case["local"], engine="loop", seed=seed) for _ in range(2))
    assert_equal_rounds(batched, apart)


@together(("number", "case"), lambda: enumerate(cases()))
def test_batched_rounds_are_the_two_halves_bit_for_bit(number: int, case: dict[str, str]) -> None:
    check_halves(case, number)


@pytest.mark.slow
def test_batched_rounds_of_every_two_examples_are_the_two_halves() -> None:
    for number, case in enumerate(pairwise(AXES, fits)):
        check_halves(case, number)


DOWNLINKS = [
    f"{name}({codec})" for codec in [*CONTRACTIVE, "topk(ratio=linear(1, 1/16))"] for name in ("shared", "replica")
]
QUARTER = [*DOWNLINKS[::8], *DOWNLINKS[5::8]]
"""Half of the compressors, each in one of the two downlinks."""
HALF = [*DOWNLINKS[::4], *DOWNLINKS[3::4]]
"""Every compressor in one of the two downlinks."""


def check_downlink(downlink: str) -> None:
    """Long enough for clients to miss rounds, come back and catch up; buffers follow the same rule."""
    options = {"uplink": "sign", "downlink": downlink, "buffers": downlink.partition("(")[2][:-1], "rounds": 6}
    options |= {"local": "sgd(lr=0.1, steps=1, batch=8)", "model": net(True), "engine": "loop", "seed": 3, "test": None}
    batched, apart = (run(**options) for _ in range(2))
    assert_equal_rounds(batched, apart)


@together("downlink", QUARTER)
def test_downlinks_of_every_compressor_over_many_rounds(downlink: str) -> None:
    check_downlink(downlink)


@pytest.mark.slow
@together("downlink", sorted({*DOWNLINKS} - {*QUARTER} - {*HALF}))
def test_the_other_downlinks_of_every_compressor_over_many_rounds(downlink: str) -> None:
    check_downlink(downlink)


# -- whole algorithms against their oracles ----------------------------------------------------------------------------

POPULATION, D, ROUNDS = 6, 40, 12
GRADIENT = oracle.quadratic(POPULATION, D)
ZERO = np.zeros(D)


def federate(sizes: Sequence[int] | None = None, **options: Any) -> tuple[History, list[list[int]]]:
    """A run on quadratics, and its cohorts."""
    settings = {"server": "fedavg", "rounds": ROUNDS, "cohort": 3, "local": "sgd(lr=0.05, steps=5)"} | options
    data = quadratics(POPULATION, D, sizes)
    history = simulate(Point(D), data, loss=quadratic_loss, engine="loop", **settings).run()
    return history, [record.cohort for record in history.records]


def assert_near(ours: Tensor | None, theirs: Any) -> None:
    assert ours is not None
    assert np.linalg.norm(ours.numpy() - theirs) <= 1e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("rate", ["0.05", "linear(0.1, 0.02)"])
@pytest.mark.parametrize("cohort", [3, 6])
def test_scaffold_is_its_oracle(rate: str, cohort: int) -> None:
    history, cohorts = federate(control="scaffold", local=f"sgd(lr={rate}, steps=5)", cohort=cohort)
    method = history.simulation.server.method
    rates = [float(method.in_round(t, ROUNDS).local.lr) for t in range(1, ROUNDS + 1)]
    xs, c, rows = oracle.scaffold(ZERO, GRADIENT, cohorts, POPULATION, 5, rates)
    assert_near(history.state.x, xs[-1])
    assert_near(history.state.control, c)
    kept = history.simulation.client.rows
    assert kept is not None
    assert_near(kept.gather("control", range(POPULATION)), rows)
    assert_near(kept.gather("control", range(POPULATION)).mean(0), c)


def test_scaffold_takes_drift_away_where_fedavg_does_not() -> None:
    zero, one = (np.mean([GRADIENT(i, np.full(D, at)) for i in range(POPULATION)], axis=0) for at in (0.0, 1.0))
    best = -zero / (one - zero)
    options = {"cohort": "full", "rounds": 25, "local": "sgd(lr=0.3, steps=5)"}
    drift, corrected = (
        np.linalg.norm(federate(control=control, **options)[0].state.x.numpy() - best)
        for control in ("none", "scaffold")
    )
    assert corrected < 0.05 * drift


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_fednova_is_its_oracle(weighting: str) -> None:
    """As many steps as examples."""
    sizes = [1, 2, 3, 5, 8, 13]
    history, cohorts = federate(sizes, transforms="fednova", weighting=weighting, local="sgd(lr=0.05, batch=1)")
    weights = [float(n) for n in sizes] if weighting == "examples" else None
    assert_near(history.state.x, oracle.fednova(ZERO, GRADIENT, cohorts, sizes, 0.05, weights)[-1])


def test_clipped_updates_with_feedback_are_their_oracle() -> None:
    free = oracle.descent(GRADIENT, 5, 0.05)

    def clipped(t: int, i: int, x: Any) -> Any:
        lengths.append(float(np.linalg.norm(free(t, i, x))))
        return oracle.clip(free(t, i, x), 1.5)

    lengths: list[float] = []
    history, cohorts = federate(transforms="clip(norm=1.5)", uplink="sign", server="fedams(lr=0.1)")
    step = partial(oracle.fedams, lr=0.1)
    assert_near(history.state.x, oracle.fedcams(ZERO, clipped, cohorts, step, oracle.scaled_sign)[-1])
    assert min(lengths) < 1.5 < max(lengths), "some are clipped and some are not"


@pytest.mark.parametrize("uplink", ["identity", "topk(ratio=0.1)"])
def test_local_adamw_is_its_oracle(uplink: str) -> None:
    spec = "adamw(lr=0.05, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1, steps=5)"
    history, cohorts = federate(local=spec, uplink=uplink)
    values = {"lr": 0.05, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1}
    compress = None if uplink == "identity" else partial(oracle.topk, ratio="1/10")
    expected = oracle.fedcams(ZERO, oracle.local_adamw(GRADIENT, 5, **values), cohorts, oracle.fedavg, compress)
    assert_near(history.state.x, expected[-1])


def test_cosines_trimmed_means_and_averages_are_their_oracles() -> None:
    history, cohorts = federate(
        uplink="sign", aggregate="trimmed(0.2)", average="ema(0.8)", probes="cosine", cohort="full"
    )
    seen: list[tuple[Any, Any]] = []
    trim = partial(oracle.trimmed_mean, fraction="0.2")
    update = oracle.descent(GRADIENT, 5, 0.05)
    xs = oracle.fedcams(ZERO, update, cohorts, oracle.fedavg, oracle.scaled_sign, trim, seen)
    assert_near(history.state.x, xs[-1])
    assert history.state.average is not None
    assert_near(history.state.average.x, oracle.ema(xs, 0.8)[-1])
    for record, (rows, mean) in zip(history.records, seen, strict=True):
        cosines = oracle.cosines(rows, mean)
        assert record.probes["cosine_mean"] == pytest.approx(cosines.mean(), abs=1e-5)
        assert record.probes["cosine_min"] == pytest.approx(cosines.min(), abs=1e-5)
