"""Every experiment of every preset runs in miniature, and one of them at its own size."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest

from fedcams.experiment import Experiment, build
from fedcams.experiment.preset import load_preset, overridden
from fedcams.own import History
from fedcams.runs import read_run
from fedcams.simulation import RoundRecord
from test_cli import folder as folder
from test_cli import say
from test_presets import TEXT, everyone, write_cifar
from test_tasks import write_plays

SMALL = {
    "resnet18": "resnet18(width=1)",
    "convmixer": "convmixer(dim=4, depth=1)",
    "mlp": "mlp(hidden=8)",
    "linear": "linear",
    "lstm": "lstm(hidden=4)",
    "transformer": "transformer(dim=4, depth=1)",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR of 100 images to train and 20 to test on, in the official layout, and a play with 20 roles."""
    folder = tmp_path_factory.mktemp("data")
    batches = [f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)]
    write_cifar(folder, {**dict.fromkeys(batches, 20), "cifar-10-batches-py/test_batch": 20}, b"labels", 10)
    write_cifar(folder, {"cifar-100-python/train": 100, "cifar-100-python/test": 20}, b"fine_labels", 100)
    write_plays(folder, roles=20)
    return folder


@functools.cache
def run_once(experiment: Experiment, data: Path) -> list[RoundRecord]:
    """In miniature many experiments are the same but for their labels: those that differ in local epochs, say."""
    return History(build(experiment, data).simulation).run().records


@everyone
def test_its_experiments_run_in_miniature(name: str, data: Path) -> None:
    """Everything but the number of clients, local work, rounds and the size of the model is as it is shipped.

    Convolutions take most of the time, so only the first and the last experiment have them.
    """
    model = load_preset(name).experiments[0].model.name
    tiny = {"clients": "20", "rounds": "2", "local": "sgd(steps=1, batch=2)", "model": SMALL[model], "seed": "1"}
    tiny["engine"] = "loop" if model == "lstm" else "stacked"  # that `auto` takes it is tested with the engines
    if name in TEXT:
        tiny["task"] = "shakespeare(roles=20, length=20)"

    experiments = overridden(load_preset(name), tiny).experiments
    if model in ("resnet18", "convmixer"):
        between = overridden(load_preset(name), {**tiny, "model": "linear"}).experiments[1:-1]
        experiments = [experiments[0], *between, experiments[-1]]
    for experiment in experiments:
        records = run_once(dataclasses.replace(experiment, label=""), data)
        assert [record.round for record in records] == [1, 2]
        if experiment.sampler.size_varies and not records[0].cohort:
            continue
        size = experiment.sampler.expected(experiment.clients)
        assert experiment.sampler.size_varies or len(records[0].cohort) == size
        assert records[0].probes.keys() >= {"q", "q_max"}
        assert ("gamma" in records[0].probes) == any(probe.name == "gamma" for probe in experiment.probes)


def test_resnet18_of_the_paper_as_it_is(folder: Path) -> None:
    """The one test that trains the whole network."""
    sizes = {f"cifar-10-batches-py/data_batch_{i}": 2 for i in range(1, 6)} | {"cifar-10-batches-py/test_batch": 2}
    write_cifar(folder, sizes, b"labels", 10)
    small = ["-s", "clients=2", "-s", "sampler=full", "-s", "local=sgd(steps=1, batch=2)", "-s", "rounds=1"]
    say("run", "compression-resnet18", "--data", ".", *small, "--only", "FedCAMS top-k 1/64", "--no-report")
    record = read_run(folder / "runs/compression-resnet18/fedcams-top-k-1-64-s1").records[-1]
    assert record.paper_bits_up == 64 * (11_173_962 // 64)
    assert record.paper_bits_down == 32 * 11_173_962
