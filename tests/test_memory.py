"""What a large population costs, measured as the system counts it, in processes of their own, forked from one that has
loaded everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import os
import sys
from collections.abc import Mapping
from pathlib import Path
import torch
import fedcams

class Lazy(Mapping):
    def __init__(self, population):
        self.population = population
    def __getitem__(self, client):
        rng = torch.Generator().manual_seed(client)
        return torch.randn(100, 64, generator=rng), torch.randint(10, (100,), generator=rng)
    def __iter__(self):
        return iter(range(self.population))
    def __len__(self):
        return self.population

def measure(population, cohort, rounds):
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    options = {"uplink": "sign", "rounds": rounds, "cohort": cohort, "local": "sgd(steps=1)"}
    history = fedcams.simulate(model, Lazy(population), **options).run()
    seen = len(set().union(*(record.cohort for record in history.records)))
    # not ru_maxrss: Linux lets a child begin with that of its parent
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(seen, 1024 * int(peak.split()[1]), flush=True)

torch.set_num_threads(1)  # so that it may fork
for case in sys.argv[1:]:
    if not os.fork():
        measure(*map(int, case.split(",")))
        os._exit(0)
    assert os.wait()[1] == 0
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak from")


FEW, MANY, CROWD = "100,10,8", "10000,10,8", "10000,100,25"
"""Population, cohort and rounds."""


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[int, int]]:
    """How many clients took part in each, and the most bytes that its process held."""
    command = [sys.executable, "-c", PROBE, FEW, MANY, CROWD]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    lines = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    return {case: (seen, most) for case, (seen, most) in zip((FEW, MANY, CROWD), lines, strict=True)}


def test_clients_that_never_take_part_cost_nothing(measured: dict[str, tuple[int, int]]) -> None:
    """Were they held, 9,900 more clients would cost 250 MB for their examples and 380 MB for their residuals."""
    (few, small), (many, large) = measured[FEW], measured[MANY]
    assert few > 40
    assert many > 60
    assert large - small < 30e6


def test_ten_thousand_clients_fit_in_two_gigabytes(measured: dict[str, tuple[int, int]]) -> None:
    seen, most = measured[CROWD]
    assert seen > 2000
    assert most < 2e9
