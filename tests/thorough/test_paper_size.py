"""The paper's network at full size, from the command line."""

from __future__ import annotations

from pathlib import Path

from command_line import say
from fedcams.runs import read_run
from test_cli import folder as folder
from test_presets import write_cifar


def test_resnet18_of_the_paper_as_it_is(folder: Path) -> None:
    """The one test that trains the whole network."""
    sizes = {f"cifar-10-batches-py/data_batch_{i}": 2 for i in range(1, 6)} | {"cifar-10-batches-py/test_batch": 2}
    write_cifar(folder, sizes, b"labels", 10)
    small = ["-s", "clients=2", "-s", "sampler=full", "-s", "local=sgd(steps=1, batch=2)", "-s", "rounds=1"]
    say("run", "compression-resnet18", "--data", ".", *small, "--only", "FedCAMS top-k 1/64", "--no-report")
    record = read_run(folder / "runs/compression-resnet18/fedcams-top-k-1-64-s1").records[-1]
    assert record.paper_bits_up == 64 * (11_173_962 // 64)
    assert record.paper_bits_down == 32 * 11_173_962
