"""Experiments: files that say everything, and the simulations they become."""

from __future__ import annotations

import codecs
import json
import locale
import sys
import tomllib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcams import SpecError
from fedcams.experiment import Experiment, build
from test_tasks import write_plays
from together import together

SMALL = {"clients": 12, "rounds": 3, "sampler": "uniform(n=4)", "local": "sgd(lr=0.1)"}


def test_a_file_says_everything_and_reads_back(tmp_path: Path) -> None:
    experiment = Experiment.from_dict(
        {
            "label": 'FedCAMS "sign", α 🚀',
            "partition": "dirichlet(alpha=0.1)",
            "uplink": "sign",
            "server": "fedams(lr=0.03, eps=1e-6)",
            "train_fraction": 0.8,
            "engine": "stacked",
            "measure_gamma": True,
        }
    )
    path = tmp_path / "experiment.toml"
    path.write_text(experiment.to_toml())
    assert Experiment.read(path) == experiment
    assert Experiment.from_dict(experiment.to_dict()) == experiment
    assert experiment.train_fraction == Fraction(4, 5)
    assert set(tomllib.loads(experiment.to_toml())) == set(experiment.to_dict()), "defaults are written too"


@together(("measured", "probes"), [(True, ["q", "gamma"]), (False, ["q"])])
def test_files_of_0_1_say_whether_gamma_is_measured(measured: bool, probes: list[str]) -> None:
    assert [str(probe) for probe in Experiment.from_dict({"measure_gamma": measured}).probes] == probes


@together(
    ("values", "message"),
    [
        ({"uplnk": "sign"}, r"experiment has no key 'uplnk' \(did you mean 'uplink'\?\)"),
        ({"uplink": "sgn"}, r"experiment: uplink: no compressor is named 'sgn' \(did you mean 'sign'"),
        ({"uplink": ""}, "experiment: uplink: spec '': expected a name"),
        ({"uplink": "fedams"}, "no compressor is named 'fedams'"),
        ({"rounds": 0}, r"experiment: rounds=0: out of range; allowed: an integer in \[1, inf\)"),
        ({"rounds": "many"}, "not a number"),
        ({"train_fraction": 0}, "allowed: a number in"),
        ({"engine": "stackd"}, "no engine is named 'stackd'"),
        ({"task": 3}, "task=3: not a spec; allowed: a task spec, from 'cifar10', 'cifar100', 'digits'"),
        ({"weighting": "median"}, "allowed: uniform or examples"),
        ({"feedback": "yes"}, "feedback=yes: not a boolean"),
        ({"sampler": "uniform(n=5)", "min_replies": 6}, "min_replies=6, but a cohort has at most 5 clients"),
        ({"sampler": "bernoulli(p=0.1)", "clients": 9, "min_replies": 10}, "min_replies=9 or less"),
    ],
)
def test_bad_values_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Experiment.from_dict(values)


@pytest.mark.parametrize("label", ["two\nlines", "a\x00", "\x1b[31mred", "\ud800"], ids=ascii)
def test_a_label_that_no_file_can_hold_is_refused_when_it_is_read(label: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"label=.*a control character or half of a surrogate pair"):
        Experiment(label=label)
    if label != "\ud800":  # which no file can have
        (tmp_path / "a.toml").write_text(f"label = {json.dumps(label)}")
        with pytest.raises(SpecError, match=r"a.toml: .*label=.*control character"):
            Experiment.read(tmp_path / "a.toml")


def test_a_label_reads_back_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_bytes(Experiment(label="γ ≤ ½").to_toml().encode())
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, "C")
        with path.open() as file:
            assert sys.flags.utf8_mode or codecs.lookup(file.encoding).name == "ascii", "as files are read by default"
        assert Experiment.read(path).label == "γ ≤ ½"
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text("rounds = = 3")
    with pytest.raises(SpecError, match="not a TOML file"):
        Experiment.read(path)
    path.write_text("ronds = 3")
    with pytest.raises(SpecError, match=r"experiment\.toml: experiment has no key 'ronds'"):
        Experiment.read(path)


def test_a_simulation_is_a_function_of_the_experiment() -> None:
    experiment = Experiment.from_dict({**SMALL, "uplink": "topk(ratio=1/64)", "partition": "shards"})
    states = []
    for _ in range(2):
        built = build(experiment)
        state = built.state
        for _ in range(experiment.rounds):
            state, _ = built.simulation.advance_(state)
        states.append(state)
    assert torch.equal(states[0].x, states[1].x)
    other = build(Experiment.from_dict({**SMALL, "seed": 2}))
    assert not torch.equal(other.state.x, build(Experiment.from_dict(SMALL)).state.x)


def test_clients_hold_what_the_partition_gave_them() -> None:
    whole = build(Experiment.from_dict({**SMALL, "partition": "dirichlet(alpha=0.2)"}))
    part = build(Experiment.from_dict({**SMALL, "partition": "dirichlet(alpha=0.2)", "train_fraction": 0.5}))
    for built in (whole, part):
        sizes = [len(built.simulation.problem.clients[i][0]) for i in range(12)]
        assert built.histogram.shape == (12, 10)
        assert built.histogram.sum(1).tolist() == sizes
    assert int(whole.histogram.sum()) == 1437
    assert np.array_equal(part.histogram.sum(1), np.maximum(1, whole.histogram.sum(1) // 2))


def test_data_that_say_whose_they_are_can_be_split_by_nature() -> None:
    values = {"task": "quadratic(groups=4, size=5)", "model": "point", "partition": "natural", "sampler": "full"}
    assert (
        build(Experiment.from_dict({**values, "clients": 4})).histogram.tolist() == (5 * np.eye(4, dtype=int)).tolist()
    )


TEXT = {"task": "shakespeare(length=20)", "model": "transformer(dim=8, depth=1)", "clients": 4, "sampler": "full"}


def test_text_is_split_by_role_and_trains(tmp_path: Path) -> None:
    """Loss and accuracy are means over characters, so the training loss of the first round is about log 86."""
    write_plays(tmp_path)
    by_role = build(Experiment.from_dict({**TEXT, "partition": "natural", "local": "sgd(lr=0.5, batch=2)"}), tmp_path)
    assert by_role.histogram.shape == (4, 86)
    assert by_role.histogram.sum(1).tolist() == [20 * 9, 20 * 9, 20 * 4, 20 * 3], "the target characters"
    state, losses = by_role.state, []
    for _ in range(5):
        state, record = by_role.simulation.advance_(state)
        losses.append(record.train_loss)
    assert losses[0] == pytest.approx(np.log(86), abs=1)
    assert losses[-1] < losses[0] - 0.5
    merged = build(Experiment.from_dict({**TEXT, "partition": "natural", "clients": 2}), tmp_path)
    assert merged.histogram.sum(1).tolist() == [20 * 13, 20 * 12], "roles are dealt in turn"
    assert build(Experiment.from_dict({**TEXT, "partition": "shards"}), tmp_path).histogram.sum() == 20 * 25


def test_a_model_that_does_not_take_the_tasks_data_is_refused(tmp_path: Path) -> None:
    write_plays(tmp_path)
    with pytest.raises(
        SpecError, match=r"model=mlp takes numbers, but task=shakespeare\(.*\) has tokens; use model=lstm"
    ):
        build(Experiment.from_dict({**TEXT, "model": "mlp"}), tmp_path)
    with pytest.raises(SpecError, match="model=lstm takes tokens, but task=digits has numbers; use model=mlp"):
        build(Experiment.from_dict({"model": "lstm"}))


def test_weights_are_there_for_those_who_sample_by_them() -> None:
    built = build(Experiment.from_dict({**SMALL, "sampler": "weighted(n=3)", "partition": "dirichlet"}))
    assert built.simulation.server.sampling_weights == dict(enumerate(built.histogram.sum(1).tolist()))
    _, record = built.simulation.advance_(built.state)
    assert len(record.cohort) == 3
