"""Local training: which examples make up which batch, and what the rules do with gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
from fedcams.errors import SpecError
from fedcams.local import Local, batches, local, step_count
from fedcams.local.base import mixes_rows
from fedcams.registry import registered, resolve
from together import together

SPECS = [spec for cls in registered("local").values() for spec in cls.examples]
every_rule = pytest.mark.parametrize("rule", [local(spec) for spec in SPECS], ids=str)


@pytest.mark.parametrize("spec", SPECS)
@given(examples=st.integers(1, 70))
def test_the_number_of_steps_is_as_announced(spec: str, examples: int) -> None:
    plan = batches(local(spec), examples, seed=0, round=1, client=2)
    assert len(plan) == step_count(local(spec), examples) >= 1
    assert all(0 < len(batch) <= local(spec).batch for batch in plan)
    assert local(spec).replace or all(len(set(batch.tolist())) == len(batch) for batch in plan)


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


# -- rules -------------------------------------------------------------------------------------------------------------

RATES = [0.1, 0.05, 0.2, 0.1]


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(count: int, clients: int = 3, d: int = 20) -> list[Tensor]:
    return [rows(clients, d, seed=10 + step) for step in range(count)]


def trained(rule: Local, x: Tensor, steps: list[Tensor], rates: list[float]) -> Tensor:
    """The rows after these gradients, each with its own rate."""
    now, slots = x.clone(), rule.init(x)
    for gradient, rate in zip(steps, rates, strict=True):
        rule.step_(now, gradient.clone(), slots, rate)
    return now


def by_torch(
    make: Callable[[list[Tensor]], torch.optim.Optimizer],
    x: Tensor,
    steps: list[Tensor],
    clip: float = 0,
    prox: float = 0,
) -> Tensor:
    """The same, row after row, by an optimizer of torch."""
    found = []
    for i, row in enumerate(x):
        w = row.clone().requires_grad_()
        optimizer = make([w])
        for gradient, rate in zip(steps, RATES, strict=True):
            w.grad = gradient[i].to(w.dtype) + prox * (w.detach() - row)
            if clip:
                torch.nn.utils.clip_grad_norm_([w], clip)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        found.append(w.detach())
    return torch.stack(found)


@together("momentum", [0, 0.9])
@together("decay", [0, 0.1])
@together("clip", [0, 2])
@together("prox", [0, 0.5])
def test_sgd_is_that_of_torch(momentum: float, decay: float, clip: float, prox: float) -> None:
    clipped = f", clip={clip}" if clip else ""
    rule = local(f"sgd(momentum={momentum}, weight_decay={decay}, prox={prox}{clipped})")
    assert rule.is_plain == rule.steps_are_rates == (not any((momentum, decay, clip, prox)))
    x, steps = rows(3, 20), gradients(4)
    truth = by_torch(lambda w: torch.optim.SGD(w, 1.0, momentum, weight_decay=decay), x, steps, clip, prox)
    torch.testing.assert_close(trained(rule, x, steps, RATES), truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("decay", [0, 0.1])
def test_adam_and_nesterov_are_those_of_torch(decay: float, dtype: torch.dtype, tolerance: float) -> None:
    x, steps = rows(3, 20, dtype=dtype), [gradient.to(dtype) for gradient in gradients(4)]
    adam = trained(local(f"adam(beta1=0.8, beta2=0.99, eps=1e-6, weight_decay={decay})"), x, steps, RATES)
    truth = by_torch(lambda w: torch.optim.Adam(w, 1.0, (0.8, 0.99), 1e-6, decay), x, steps)
    torch.testing.assert_close(adam, truth, rtol=tolerance, atol=tolerance)
    nesterov = trained(local(f"sgd(momentum=0.9, nesterov=true, weight_decay={decay})"), x, steps, RATES)
    truth = by_torch(lambda w: torch.optim.SGD(w, 1.0, 0.9, weight_decay=decay, nesterov=True), x, steps)
    torch.testing.assert_close(nesterov, truth, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("decay", [0, 0.1])
def test_adamw_is_that_of_torch_and_of_the_oracle(decay: float, dtype: torch.dtype, tolerance: float) -> None:
    rule = local(f"adamw(beta1=0.8, beta2=0.99, eps=1e-6, weight_decay={decay})")
    assert not rule.is_plain
    x, steps = rows(3, 20, dtype=dtype), [gradient.to(dtype) for gradient in gradients(4)]
    ours = trained(rule, x, steps, RATES)
    truth = by_torch(lambda w: torch.optim.AdamW(w, 1.0, (0.8, 0.99), 1e-6, decay), x, steps)
    torch.testing.assert_close(ours, truth, rtol=tolerance, atol=tolerance)
    for row, start, *seen in zip(ours, x, *steps, strict=True):
        memory, w = oracle.Memory(), start.double().numpy()
        for gradient, rate in zip(seen, RATES, strict=True):
            w = oracle.adamw(memory, w, gradient.double().numpy(), rate, 0.8, 0.99, 1e-6, decay)
        np.testing.assert_allclose(row.double().numpy(), w, rtol=tolerance, atol=tolerance)


@together("name", ["adam", "adamw"])
def test_the_smallest_eps_keeps_coordinates_without_gradients(name: str) -> None:
    rule, x = local(f"{name}(eps=1e-30)"), torch.ones(1, 3)
    rule.step_(x, torch.tensor([[0.0, 1e-20, 1.0]]), rule.init(x), 0.1)
    assert bool(x.isfinite().all())
    with pytest.raises(SpecError, match=r"eps=1e-46: out of range; allowed: a number in \[1e-30, inf\)"):
        local(f"{name}(eps=1e-46)")  # is zero in float32


@every_rule
def test_a_rule_works_on_each_row_alone(rule: Local) -> None:
    x, steps = rows(3, 20), gradients(4)
    kept = x.clone()
    together = trained(rule, x, steps, RATES)
    assert torch.equal(x, kept), "init keeps copies"
    assert not torch.equal(together, x)
    for i in range(3):
        alone = trained(rule, x[i : i + 1], [gradient[i : i + 1] for gradient in steps], RATES)
        torch.testing.assert_close(alone[0], together[i], rtol=1e-12, atol=1e-12)


@every_rule
def test_a_rate_for_each_row_may_be_a_tensor(rule: Local) -> None:
    x, steps = rows(3, 20), gradients(4)
    now, slots = x.clone(), rule.init(x)
    scales = torch.tensor([1.0, 0.5, 0.0], dtype=x.dtype)
    for gradient, rate in zip(steps, RATES, strict=True):
        rule.step_(now, gradient.clone(), slots, rate * scales)
    for i, scale in enumerate(scales.tolist()):
        alone = trained(rule, x[i : i + 1], [each[i : i + 1] for each in steps], [scale * rate for rate in RATES])
        torch.testing.assert_close(now[i], alone[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(now[2], x[2]), "a rate of zero moves nothing"


@every_rule
def test_rows_that_are_not_active_keep_everything(rule: Local) -> None:
    """Whatever their gradient is; the others move as ever."""
    assert not mixes_rows(rule)
    x, (first, second, *_) = rows(3, 20), gradients(4)
    slots, free = rule.init(x), rule.init(x)
    masked, moved = x.clone(), x.clone()
    for now, held in ((masked, slots), (moved, free)):
        rule.step_(now, first.clone(), held, 0.1)
    before, kept = masked.clone(), {name: slot.clone() for name, slot in slots.items()}
    bad = second.clone()
    bad[1] = torch.nan
    rule.step_(masked, bad, slots, 0.1, torch.tensor([True, False, True]))
    rule.step_(moved, second.clone(), free, 0.1)
    assert torch.equal(masked[1], before[1])
    assert torch.equal(masked[[0, 2]], moved[[0, 2]])
    for name, slot in slots.items():
        assert len(slot) == 3, "slots have a row for each client"
        assert torch.equal(slot[1], kept[name][1]), name
        assert torch.equal(slot[[0, 2]], free[name][[0, 2]]), name


@every_rule
def test_an_elementwise_rule_takes_any_order_of_storage(rule: Local) -> None:
    """With zeros between coordinates, as engines that align tensors have them; they stay zero."""
    assert rule.elementwise
    x, steps = rows(3, 20), gradients(4)
    places = torch.from_numpy(np.random.default_rng(0).permutation(32))[:20]

    def spread(values: Tensor) -> Tensor:
        wide = torch.zeros(3, 32, dtype=values.dtype)
        wide[:, places] = values
        return wide

    stored = trained(rule, spread(x), [spread(gradient) for gradient in steps], RATES)
    truth = spread(trained(rule, x, steps, RATES))
    torch.testing.assert_close(stored, truth, rtol=1e-12, atol=1e-12)


@every_rule
def test_a_plain_rule_is_the_rate_times_the_gradient(rule: Local) -> None:
    x, (gradient, *_) = rows(3, 20, dtype=torch.float32), [each.float() for each in gradients(4)]
    slots, now = rule.init(x), x.clone()
    rule.step_(now, gradient.clone(), slots, 0.1)
    assert rule.is_plain == (not slots and torch.equal(now, x.sub(gradient, alpha=0.1)))


def test_a_rule_in_sections_clips_as_torch_does_to_the_bit() -> None:
    sizes = [5, 300, 1, 77]
    x, gradient = rows(1, sum(sizes), dtype=torch.float32), rows(1, sum(sizes), seed=1, dtype=torch.float32)
    weights = [part.clone().requires_grad_() for part in x[0].split(sizes)]
    for weight, part in zip(weights, gradient[0].split(sizes), strict=True):
        weight.grad = part.clone()
    torch.nn.utils.clip_grad_norm_(weights, 0.5)
    torch.optim.SGD(weights, 0.1).step()
    rule = local("sgd(clip=0.5)")
    rule.in_sections(sizes).step_(x, gradient.clone(), {}, 0.1)
    assert torch.equal(x[0], torch.cat([weight.detach() for weight in weights]))
    assert rule.sections == ()
    assert rule.in_sections(sizes) == rule
    assert float(rule.norms(gradient)) == pytest.approx(float(rule.in_sections(sizes).norms(gradient)), rel=1e-6)


def test_examples_may_be_drawn_anew_in_every_step() -> None:
    """With `replace` batches have the sizes of epochs, but every example of every batch is drawn from all."""
    drawn = [batches(local("sgd(epochs=2, batch=4, replace=true)"), 10, 1, t, 0) for t in range(500)]
    assert [len(batch) for batch in drawn[0]] == [4, 4, 2, 4, 4, 2]
    counts = np.bincount(np.concatenate([batch for round in drawn for batch in round]), minlength=10)
    assert abs(counts - 1000).max() <= 5 * 1000**0.5
    twice = np.mean([len(set(batch.tolist())) < 4 for round in drawn for batch in round if len(batch) == 4])
    assert twice == pytest.approx(1 - 0.9 * 0.8 * 0.7, abs=0.06)
    again = batches(local("sgd(epochs=2, batch=4, replace=true)"), 10, 1, 0, 0)
    assert all((a == b).all() for a, b in zip(again, drawn[0], strict=True))
