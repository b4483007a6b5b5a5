"""Recipes: each makes a method that runs; other settings override it; runs store its fields, not its name."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcams
from fedcams import Method, SpecError
from fedcams.experiment import Experiment, build
from fedcams.experiment.preset import load_preset, overridden
from fedcams.experiment.sweep import load_sweep
from fedcams.method import method_of
from fedcams.own import History
from fedcams.recipes import RECIPES, Measured, merged, recipe
from fedcams.registry import params

everyone = pytest.mark.parametrize("name", RECIPES)


def fields(method: Method) -> dict[str, str]:
    return {key: str(getattr(method, key)) for key in ("uplink", "downlink", "buffers", "average")}


def of(name: str) -> dict[str, str]:
    return fields(Method(**RECIPES[name].fields))


LIGHT = of("light")


@everyone
def test_a_recipe_is_described_and_stands_for_its_fields(name: str) -> None:
    chosen = RECIPES[name]
    assert chosen.name == name
    assert chosen.doc.endswith(".")
    assert Method.from_dict({"recipe": name}) == Method(**chosen.fields)
    assert "average" in chosen.fields, "what is compressed both ways is averaged"
    assert all(isinstance(found, Measured) for found in chosen.measured)


@everyone
def test_a_model_with_buffers_trains_with_it(name: str) -> None:
    torch.manual_seed(1)
    x, y = torch.randn(60, 6), torch.arange(60) % 3
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    clients = [(x[i : i + 10], y[i : i + 10]) for i in range(0, 60, 10)]
    history = fedcams.simulate(model, clients, (x, y), recipe=name, rounds=3, cohort=2, local="sgd(lr=0.1, steps=2)")
    last = history.run().records[-1]
    assert last.averaged_accuracy is not None
    assert last.wire_up < last.wire_down or RECIPES[name].two_way


def test_recipes_send_less_and_less() -> None:
    totals = []
    for name in RECIPES:
        values = {"recipe": name, "model": "mlp(hidden=64)", "rounds": 12, "clients": 20, "local": "sgd(steps=1)"}
        experiment = Experiment.from_dict({**values, "evaluate_every": 12})
        records = History(build(experiment).simulation).run().records
        totals.append(sum(record.wire_up + record.wire_down for record in records))
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > 5 * totals[1]


def test_settings_beside_it_win() -> None:
    method = Method.from_dict({"recipe": "light", "uplink": "sign", "server": "fedams(lr=0.5)"})
    assert fields(method) == {**LIGHT, "uplink": "sign"}
    assert str(method.server) == "fedams(lr=0.5)"


def test_it_wins_over_the_method_that_it_changes() -> None:
    base = Method(uplink="sign", downlink="shared(blockq)", server="fedavg", weighting="examples")
    changed = method_of(base, {"recipe": "light", "average": "none"})
    assert fields(changed) == {**LIGHT, "average": "none"}
    assert (str(changed.server), changed.weighting) == ("fedavg", "examples")


def test_flower_takes_it_by_name(tmp_path: Path) -> None:
    flower = pytest.importorskip("fedcams.flower")
    strategy = flower.FedCAMS(recipe="light", uplink="sign", checkpoint=tmp_path)
    assert fields(strategy.method) == {**LIGHT, "uplink": "sign"}
    with pytest.raises(SpecError, match=r"no recipe has this name \(did you mean 'lightest'\?\)"):
        flower.FedCAMS(recipe="lightes", checkpoint=tmp_path)


def test_layers_keep_their_order() -> None:
    layers: list[dict[str, Any]] = [{"uplink": "sign", "rounds": 5}, {"recipe": "light"}, {"downlink": "none"}]
    light = RECIPES["light"].fields
    assert merged(*layers) == {**light, "rounds": 5, "downlink": "none"}
    assert merged(*reversed(layers)) == {**light, "rounds": 5, "uplink": "sign"}


def test_files_name_it_and_runs_keep_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('uplink = "sign"\n[[run]]\nlabel = "A"\nrecipe = "light"\n[[run]]\nlabel = "B"\n')
    first, second = load_preset(path).experiments
    assert fields(first) == LIGHT, "a run wins over what is common"
    assert str(second.uplink) == "sign"
    assert "recipe" not in tomllib.loads(first.to_toml())
    assert "recipe" not in params(Method)
    for experiment in overridden(load_preset(path), {"recipe": "light", "buffers": "identity"}).experiments:
        assert fields(experiment) == {**LIGHT, "buffers": "identity"}


def test_sweeps_try_recipes(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text('[[run]]\nuplink = "sign"\ngrid = { recipe = ["light", "lighter"] }\n')
    assert [fields(trial.experiments[0]) for trial in load_sweep(path)] == [of(name) for name in ("light", "lighter")]


@pytest.mark.parametrize("settings", [{"recipe": "lihgt"}, {"recipe": "lihgt", "uplink": "sign"}])
def test_an_unknown_recipe_is_refused_with_the_nearest(settings: dict[str, str]) -> None:
    for refusing in (Method.from_dict, Experiment.from_dict, lambda given: method_of(None, given)):
        with pytest.raises(SpecError, match=r"recipe='lihgt': no recipe has this name \(did you mean 'light'\?\); kno"):
            refusing(settings)
    with pytest.raises(SpecError, match=r"-s: no key 'recip' \(did you mean 'recipe'\?\)"):
        overridden(load_preset("demo"), {"recip": "light"})


@pytest.mark.parametrize("name", [name for name, chosen in RECIPES.items() if chosen.measured])
def test_what_was_measured_is_on_the_leaderboard(name: str) -> None:
    entries = Path(__file__).parents[1] / "leaderboard/entries/cifar10-resnet18-iid"
    (found,) = RECIPES[name].measured
    known = [tomllib.loads(path.read_text()) for path in entries.glob("*.toml")]
    dense = next(entry for entry in known if entry["label"] == "FedAMS")
    server = found.server or dense["method"]["server"]
    (own,) = (e for e in known if e["label"].split(",")[0] == f"FedCAMS {name}" and e["method"]["server"] == server)
    total = {label: entry["bytes_up"] + entry["bytes_down"] for label, entry in (("own", own), ("dense", dense))}
    assert found.fewer_bytes == pytest.approx(total["dense"] / total["own"], rel=5e-3)
    assert (found.accuracy, found.dense_accuracy, found.seeds) == (
        own["averaged"],
        dense["averaged"],
        len(own["seeds"]),
    )
    assert of(name) == fields(Method(**{key: own["method"][key] for key in RECIPES[name].fields}))


@pytest.mark.parametrize("name", [["light"], {"light": 1}, 3])
def test_a_recipe_that_is_not_a_name_is_refused(name: Any) -> None:
    with pytest.raises(SpecError, match=r"recipe=.*: no recipe has this name.*; known: one-way, light"):
        Experiment.from_dict({"recipe": name})


def test_what_was_measured_says_how_well_it_is_known() -> None:
    once = Measured("digits", fewer_bytes=29.4, accuracy=95.2, dense_accuracy=96.31, seeds=1)
    assert str(once) == "29.4x fewer bytes, 95.20% averaged, compared with 96.31% for dense FedAMS (digits; one seed)"
    assert "mean of 3 seeds" in str(dataclasses.replace(once, seeds=3))
    assert str(dataclasses.replace(once, server="fedams(lr=0.4)")).endswith("one seed; server = fedams(lr=0.4))")
    unmeasured = dataclasses.replace(recipe("light"), measured=())
    assert unmeasured.cost == "not measured yet"
    assert dataclasses.replace(unmeasured, measured=(once, once)).cost == f"{once}; {once}"
