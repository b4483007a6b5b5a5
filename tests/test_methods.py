"""Methods: for whatever is registered, the batched simulator is the two halves through bytes, bit for bit."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from fedcams import Layout, Method, SpecError, compressor
from fedcams.local import local
from fedcams.registry import registered
from halves import KEEP_PAIRS, assert_equal_rounds, net, run
from pairs import Option, pairs_of, pairwise


def examples_of(kind: str) -> list[str]:
    return [spec for cls in registered(kind).values() for spec in cls.examples]


def small(spec: str) -> str:
    """The local rule with few short batches, none of a single example, which batch-norm cannot train on."""
    rule = local(spec)
    return str(dataclasses.replace(rule, batch=min(rule.batch, 8), drop_last=True))  # type: ignore[call-arg]


CONTRACTIVE = [spec for spec in examples_of("compressor") if compressor(spec).squared_error_bound(Layout.flat(1))]
NO_BUFFERS = "no buffers"
AXES = {  # the last value of each fits everything
    "uplink": [*examples_of("compressor"), "topk(ratio=linear(1/16, 1/4))", "identity"],
    "downlink": [*examples_of("downlink"), "replica(ternary(ratio=linear(1/32, 1/8)))", "none"],
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


def method(**options: str) -> Method:
    buffers = options.pop("buffers", NO_BUFFERS)
    feedback = options.pop("feedback", "false") == "true"
    return Method(**options, feedback=feedback, buffers="identity" if buffers == NO_BUFFERS else buffers)  # type: ignore[arg-type]


@cache
def fits(one: Option, other: Option) -> bool:
    """Whether a method may have both, everything else being harmless."""
    try:
        method(**{axis: values[-1] for axis, values in AXES.items()} | dict([one, other]))
    except SpecError:
        return False
    return True


CASES = pairwise(AXES, fits)


def test_every_pair_that_fits_is_run() -> None:
    run_ones = {frozenset((a, b)) for case in CASES for a in case.items() for b in case.items() if a[0] < b[0]}
    assert run_ones == pairs_of(AXES, fits)
    largest = sorted(map(len, AXES.values()))[-2:]
    assert len(CASES) < 1.5 * largest[0] * largest[1], "far fewer than the product"


@pytest.mark.parametrize("number", range(len(CASES)))
def test_batched_rounds_are_the_two_halves_bit_for_bit(number: int) -> None:
    case = CASES[number]
    options = {"model": net(case["buffers"] != NO_BUFFERS), "method": method(**case), "test": None, "rounds": 3}
    batched, apart = (run(**options, local=case["local"], engine="loop", seed=number) for _ in range(2))
    assert_equal_rounds(batched, apart)


@pytest.mark.parametrize("codec", CONTRACTIVE)
@pytest.mark.parametrize("name", ["shared", "replica"])
def test_downlinks_of_every_compressor_over_many_rounds(name: str, codec: str) -> None:
    """Long enough for clients to miss rounds, come back and catch up."""
    options = {"uplink": "sign", "downlink": f"{name}({codec})", "rounds": 9, "test": None, **KEEP_PAIRS}
    batched, apart = (run(**options, model=net(name == "shared"), engine="loop", seed=3) for _ in range(2))
    assert_equal_rounds(batched, apart)
