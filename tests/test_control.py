"""Control variates: SCAFFOLD step by step against its oracle, and the contract of every control."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import oracle
from fedcams import simulate
from fedcams.compress import Compressor
from fedcams.control import Control
from fedcams.errors import SpecError, UpdateError
from fedcams.layout import Layout
from fedcams.registry import registered

CONTROLS = [Control.parse(spec) for cls in registered("control").values() for spec in cls.examples]
everyone = pytest.mark.parametrize("control", CONTROLS, ids=str)
CLIENTS, D, STEPS, LR = 7, 15, 4, 0.05
COHORTS = [[0, 2, 5], [1, 2], [3, 4, 6], [0], [1, 2, 3, 4, 5, 6]] * 4
GRAD = oracle.quadratic(CLIENTS, D)


class Rule(SimpleNamespace):
    """A local rule, as a control sees it."""

    def __str__(self) -> str:
        return "sgd(momentum=0.9)"


def run(control: Control, rates: list[float], codec: Compressor | None = None) -> tuple[list[Tensor], Tensor, Tensor]:
    """Rounds of local gradient descent with a control, in float64 but for what a codec makes of a change."""
    x = torch.zeros(D, dtype=torch.float64)
    c, rows, xs = control.init(x), torch.zeros(CLIENTS, D, dtype=torch.float64), []
    for cohort, rate in zip(COHORTS, rates, strict=True):
        delta = descend(x, cohort, control.shift(c, rows[cohort]), rate)
        change = control.change(c, rows[cohort], delta, torch.full((len(cohort),), STEPS * rate, dtype=torch.float64))
        if codec is not None:
            change = codec.decode(codec.encode(change.float(), Layout.flat(D)), Layout.flat(D)).double()
        rows[cohort] += change
        control.step_(c, change.mean(0), len(cohort), CLIENTS)
        x = x + delta.mean(0)
        xs.append(x)
    return xs, c, rows


def descend(x: Tensor, cohort: list[int], shift: Tensor, rate: float) -> Tensor:
    y = x.repeat(len(cohort), 1)
    for _ in range(STEPS):
        gradients = np.stack([GRAD(i, row.numpy()) for i, row in zip(cohort, y, strict=True)])
        y = y - rate * (torch.from_numpy(gradients) + shift)
    return y - x


@pytest.mark.parametrize("rates", [[LR] * len(COHORTS), [LR / (1 + t) for t in range(len(COHORTS))]])
def test_scaffold_is_the_oracles(rates: list[float]) -> None:
    xs, c, rows = run(Control.parse("scaffold"), rates)
    expected, expected_c, expected_rows = oracle.scaffold(np.zeros(D), GRAD, COHORTS, CLIENTS, STEPS, rates)
    for x, wanted in zip(xs, expected, strict=True):
        np.testing.assert_allclose(x.numpy(), wanted, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(c.numpy(), expected_c, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(rows.numpy(), expected_rows, rtol=1e-11, atol=1e-13)


def test_the_servers_variate_is_the_mean_of_all() -> None:
    for codec in (None, Compressor.parse("blockq(bits=8)"), Compressor.parse("sign")):
        _, c, rows = run(Control.parse("scaffold"), [LR] * len(COHORTS), codec)
        torch.testing.assert_close(c, rows.mean(0), rtol=1e-10, atol=1e-12)
        assert float(c.norm()) > 0.1


def test_scaffold_finds_the_optimum_where_plain_descent_does_not() -> None:
    """With all clients in every round and many rounds, the drift of local steps is gone."""
    everybody = [list(range(CLIENTS))] * 400
    xs, _, _ = oracle.scaffold(np.zeros(D), GRAD, everybody, CLIENTS, 10, 0.1)
    plain = oracle.run(np.zeros(D), GRAD, everybody, 10, 0.1, server_step=oracle.fedavg)
    slope = [float(np.linalg.norm(np.mean([GRAD(i, x) for i in range(CLIENTS)], axis=0))) for x in (xs[-1], plain[-1])]
    assert slope[0] < 1e-10
    assert slope[1] > 1e-3


@everyone
def test_what_every_control_keeps(control: Control) -> None:
    """It starts at zero, only reads what it must not change, and a client alone does what the cohort does."""
    draw = torch.Generator().manual_seed(1)
    c = control.init(torch.ones(D, requires_grad=True))
    assert torch.equal(c, torch.zeros(D))
    assert not c.requires_grad
    c = torch.randn(D, generator=draw)
    rows, delta = torch.randn(3, D, generator=draw), torch.randn(3, D, generator=draw)
    rates = torch.tensor([0.1, 0.0, 0.3])
    if not type(control).__module__.startswith("fedcams."):
        delta[1] = 0  # without a step, an engine reports no change; ours do not even look at it
    kept = c.clone(), rows.clone(), delta.clone()
    shift, change = control.shift(c, rows), control.change(c, rows, delta, rates)
    assert all(torch.equal(a, b) for a, b in zip((c, rows, delta), kept, strict=True))
    assert bool(torch.isfinite(change).all())
    assert not bool(change[1].any()), "no step, no change"
    for i in range(3):
        one = slice(i, i + 1)
        assert torch.equal(control.shift(c, rows[one]), shift[one])
        assert torch.equal(control.change(c, rows[one], delta[one], rates[one]), change[one])
    assert control.active == bool(shift.any())
    assert isinstance(control.codec, Compressor)


def test_the_codec_is_part_of_the_spec() -> None:
    assert str(Control.parse("scaffold").codec) == "identity"
    assert str(Control.parse("scaffold(codec=sign)")) == "scaffold(sign)"


def method(steps_are_rates: bool) -> Any:
    return SimpleNamespace(local=Rule(steps_are_rates=steps_are_rates))


def test_scaffold_refuses_what_it_cannot_use() -> None:
    scaffold = Control.parse("scaffold")
    scaffold.check(method(True))
    with pytest.raises(
        SpecError, match=r"scaffold computes .* steps of sgd\(momentum=0.9\) are not rate times gradient; choose"
    ):
        scaffold.check(method(False))
    Control.parse("none").check(method(False))
    for population in (0, 2):
        with pytest.raises(UpdateError, match=f"accepted=3 of population={population}; give the number of clients"):
            scaffold.step_(torch.zeros(D), torch.ones(D), 3, population)


@dataclass(frozen=True)
class Wrong(Control):
    """Returns what the test gives it."""

    def shift(self, c: Tensor, rows: Tensor) -> Tensor:
        return self.shifted(c, rows)

    def change(self, c: Tensor, rows: Tensor, delta: Tensor, rate_sum: Tensor) -> Tensor:
        return self.changed(delta, rate_sum)

    def step_(self, c: Tensor, mean_change: Tensor, accepted: int, population: int) -> None:
        c.copy_(mean_change)

    shifted: ClassVar[Callable[..., Tensor]]
    changed: ClassVar[Callable[..., Tensor]]


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_what_has_another_shape_or_dtype_names_the_control(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """A shift `[d]` would otherwise give each client one number of it."""
    clients = [(torch.randn(10, 4), torch.arange(10) % 2) for _ in range(3)]
    for shifted, changed, message in (
        (
            lambda c, rows: c,
            lambda delta, rates: delta,
            r"shift returns torch.float32 \[10\]; return torch.float32 \[3, 10\]",
        ),
        (lambda c, rows: rows, lambda delta, rates: delta.mean(0), r"change returns torch.float32 \[10\]; return"),
        (lambda c, rows: rows, lambda delta, rates: delta / rates[:, None], r"change returns torch.float64 \[3, 10\]"),
    ):
        monkeypatch.setattr(Wrong, "shifted", staticmethod(shifted), raising=False)
        monkeypatch.setattr(Wrong, "changed", staticmethod(changed), raising=False)
        with pytest.raises(SpecError, match=message):
            simulate(torch.nn.Linear(4, 2), clients, control=Wrong(), rounds=1, cohort=3, engine=engine).run()
