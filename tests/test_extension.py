"""A newcomer's pieces, one file each, simulated without other changes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedcams
from fedcams.compress import Code, Field
from fedcams.compress.topk import TopK
from fedcams.errors import SpecError
from fedcams.local.sgd import SGD
from fedcams.own import History
from fedcams.registry import registered
from fedcams.simulation import RoundRecord
from own_pieces import FILES, METHODS, PROBES, loaded
from together import together

LABELS = {name: name.removeprefix("own_") for name in FILES}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the files are."""
    with loaded(tmp_path):
        yield tmp_path
    assert "half" not in registered("compressor")


# -- simulations -------------------------------------------------------------------------------------------------------


@functools.cache
def data() -> list[tuple[Tensor, Tensor]]:
    """Six clients of two classes in 20 dimensions; each lacks some of the directions."""
    x = torch.randn(6, 64, 20, generator=torch.Generator().manual_seed(1))
    return [(part, (part[:, :3].sum(1) > 0).long()) for part in x]


def simulated(name: str, **changes: Any) -> History:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2))
    *clients, test = data()
    method = {"server": "fedavg", "uplink": "sign", "local": "sgd(lr=0.1, steps=5, batch=16)", **METHODS[name]}
    values = {"rounds": 6, "cohort": 3, "probes": PROBES.get(name, "q"), **method, **changes}
    return fedcams.simulate(model, clients, test, **values).run()


def loss(records: list[RoundRecord], place: int) -> float:
    found = records[place].test_loss
    assert found is not None
    return found


@pytest.mark.parametrize("name", FILES)
def test_it_learns_alike_in_every_engine(name: str) -> None:
    one, other = simulated(name, engine="loop"), simulated(name, engine="stacked")
    assert loss(one.records, -1) < loss(one.records, 0)
    torch.testing.assert_close(one.state.x, other.state.x, rtol=1e-3, atol=1e-4)


def test_the_local_rule_steps_by_signs() -> None:
    """Three steps of 0.01 in either direction, and nothing in between."""
    history = simulated("own_local", uplink="identity", rounds=1, cohort=1)
    before = simulated("own_local", uplink="identity", rounds=1, cohort=1, server="fedavg(lr=1e-30)")
    steps = (history.state.x - before.state.x) / 0.01
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
    assert steps.abs().max() == pytest.approx(3, abs=1e-3)


def test_the_controls_mean_stays_that_of_its_clients() -> None:
    history = simulated("own_control")
    rows = history.simulation.client.rows
    assert rows is not None
    everybody = rows.gather("control", range(5))
    assert everybody.abs().max() > 0.01
    torch.testing.assert_close(history.state.control, everybody.mean(0), atol=1e-6, rtol=1e-4)


def test_the_transforms_noise_is_its_own() -> None:
    plain = simulated("own_transform", transforms="clip(norm=1)", uplink="identity", rounds=1, cohort="full")
    noisy = simulated("own_transform", uplink="identity", rounds=1, cohort="full")
    apart = noisy.state.x - plain.state.x
    assert float(apart.std()) == pytest.approx(1e-3 / 5**0.5, rel=0.2)
    assert simulated("own_transform").records == simulated("own_transform").records


def test_the_probes_numbers_are_recorded() -> None:
    history = simulated("own_probe")
    for record in history.records:
        assert record.probes.keys() == {"q", "q_max", "smallest", "largest"}
        assert 0 < (record.probes["smallest"] or 0) < (record.probes["largest"] or 0)
    assert "largest" in history.to_frame()


def test_bytes_are_halved() -> None:
    dense, up = simulated("own_compressor", uplink="identity"), simulated("own_compressor")
    both = simulated("own_downlink")
    values = 3 * 2 * sum(parameter.numel() for parameter in dense.model.parameters())
    assert dense.records[0].wire_up - up.records[0].wire_up == pytest.approx(values, abs=3 * 8)
    assert dense.records[0].wire_down - both.records[0].wire_down == pytest.approx(values, abs=3 * 16)
    assert up.records[0].wire_down == dense.records[0].wire_down


class Forgetful(SGD):
    """Steps whether a client is active or not."""

    def step_(self, x: Tensor, gradient: Tensor, slots: Any, rate: Any, active: Tensor | None = None) -> None:
        super().step_(x, gradient, slots, rate)


class Mixing(SGD):
    """Scales gradients by the norm of those of all clients."""

    def step_(self, x: Tensor, gradient: Tensor, slots: Any, rate: Any, active: Tensor | None = None) -> None:
        super().step_(x, gradient / gradient.norm(), slots, rate, active)


@pytest.mark.parametrize("rule", [Forgetful(momentum=0.9), Mixing()], ids=["forgetful", "mixing"])
def test_a_rule_that_would_be_wrong_for_several_clients_trains_in_a_loop(rule: SGD) -> None:
    assert simulated("own_probe", local=rule, rounds=1).simulation.engine.name == "loop"
    assert simulated("own_probe", local=SGD(momentum=0.9), rounds=1).simulation.engine.name == "stacked"
    with pytest.raises(SpecError, match="mixes clients, or changes one that is not active; use engine=loop"):
        simulated("own_probe", local=rule, engine="stacked")


def first(code: Code, name: str, change: Any) -> Code:
    return {**code, name: change(code[name])}


WRONG: dict[str, tuple[str, Any]] = {
    "unsorted": (
        "a position that does not ascend; sort it",
        lambda code: first(code, "position", lambda p: p.flip(-1)),
    ),
    "twice": ("a position that does not ascend", lambda code: first(code, "position", lambda p: p // 100)),
    "too precise": ("float64 .*fields declares .*float32", lambda code: first(code, "value", Tensor.double)),
    "one more": ("rest.*, but fields declares .*; make them agree", lambda code: {**code, "rest": code["value"]}),
    "too short": (r"float32 \[2, 2\].*float32 \[2, 3\]", lambda code: first(code, "value", lambda v: v[:, 1:])),
    "missing": ("compress returns {'value': .*fields declares {'position'", lambda code: {"value": code["value"]}),
}


@together("what", list(WRONG))
def test_a_compressor_that_returns_something_else_than_it_declares_is_refused(what: str) -> None:
    """Its bytes would be counted for what it declares, while the simulation uses what it returns."""
    message, change = WRONG[what]

    class Wrong(TopK):
        def compress(self, *args: Any) -> Code:
            return dict(change(super().compress(*args)))

    with pytest.raises(SpecError, match=message):
        Wrong(k=3).encode(torch.randn(2, 50), fedcams.Layout.flat(50))


def test_integers_that_need_more_bits_than_declared_are_refused() -> None:
    class Wrong(TopK):
        def fields(self, layout: fedcams.Layout) -> dict[str, Field]:
            return {"level": Field("uint", layout.d, bits=4)}

        def compress(self, x: Tensor, *args: Any) -> Code:
            return {"level": x.to(torch.uint8)}

    codec, layout = Wrong(k=3), fedcams.Layout.flat(2)
    codec.encode(torch.tensor([0.0, 15.0]), layout)
    with pytest.raises(SpecError, match=r"a level outside of \[0, 16\); give it more bits"):
        codec.encode(torch.tensor([0.0, 16.0]), layout)
