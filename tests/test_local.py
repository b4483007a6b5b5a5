"""Local training: which examples make up which batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcams.local import batches, local, step_count
from fedcams.registry import registered, resolve

SPECS = [spec for cls in registered("local").values() for spec in cls.examples]


@pytest.mark.parametrize("spec", SPECS)
@given(examples=st.integers(1, 70))
def test_the_number_of_steps_is_as_announced(spec: str, examples: int) -> None:
    plan = batches(local(spec), examples, seed=0, round=1, client=2)
    assert len(plan) == step_count(local(spec), examples) >= 1
    assert all(0 < len(batch) <= local(spec).batch for batch in plan)
    assert all(len(set(batch.tolist())) == len(batch) for batch in plan)


@given(st.integers(1, 70), st.integers(1, 4), st.integers(1, 25))
def test_an_epoch_sees_every_example_once(examples: int, epochs: int, size: int) -> None:
    plan = batches(local(f"sgd(epochs={epochs}, batch={size})"), examples, seed=0, round=1, client=2)
    counts = np.bincount(np.concatenate(plan), minlength=examples)
    assert (counts == epochs).all()


def test_the_last_batch_is_kept_or_dropped() -> None:
    sizes = {
        "sgd(batch=20, epochs=2)": [20, 20, 5, 20, 20, 5],
        "sgd(batch=20, epochs=2, drop_last=true)": [20, 20, 20, 20],
        "sgd(batch=20, steps=4)": [20, 20, 5, 20],
        "sgd(batch=20, steps=4, drop_last=true)": [20, 20, 20, 20],
        "sgd(batch=60, drop_last=true)": [45],
    }
    for spec, expected in sizes.items():
        assert [len(batch) for batch in batches(local(spec), 45, 0, 1, 2)] == expected


def test_order_is_a_function_of_seed_round_and_client() -> None:
    plans = {
        tuple(np.concatenate(batches(local("sgd"), 40, *key)).tolist())
        for key in ((0, 1, 2), (1, 1, 2), (0, 2, 2), (0, 1, 3))
    }
    assert len(plans) == 4
    again = np.concatenate(batches(local("sgd"), 40, 0, 1, 2))
    assert tuple(again.tolist()) in plans
    first, second = np.split(np.concatenate(batches(local("sgd(epochs=2)"), 40, 0, 1, 2)), 2)
    assert not np.array_equal(first, second), "every epoch has an order of its own"


def test_bad_specs_are_refused() -> None:
    for cls in registered("local").values():
        for spec, message in cls.refused:
            with pytest.raises(ValueError, match=message):
                resolve("local", spec)
