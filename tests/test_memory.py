"""What a large population costs, measured as the system counts it, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import sys
from collections.abc import Mapping
from pathlib import Path
import torch
import fedcams

population, cohort, rounds = map(int, sys.argv[1:])

class Lazy(Mapping):
    def __getitem__(self, client):
        rng = torch.Generator().manual_seed(client)
        return torch.randn(100, 64, generator=rng), torch.randint(10, (100,), generator=rng)
    def __iter__(self):
        return iter(range(population))
    def __len__(self):
        return population

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
history = fedcams.simulate(model, Lazy(), uplink="sign", rounds=rounds, cohort=cohort, local="sgd(epochs=1)").run()
seen = len(set().union(*(record.cohort for record in history.records)))
# not ru_maxrss: Linux lets a child begin with that of its parent
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(seen, 1024 * int(peak.split()[1]))
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak from")


def peak(population: int, cohort: int, rounds: int) -> tuple[int, int]:
    """How many clients took part, and the most bytes that the process held."""
    command = [sys.executable, "-c", PROBE, *map(str, (population, cohort, rounds))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    seen, most = map(int, done.stdout.split())
    return seen, most


def test_clients_that_never_take_part_cost_nothing() -> None:
    """Were they held, 9,900 more clients would cost 250 MB for their examples and 380 MB for their residuals."""
    (few, small), (many, large) = peak(100, 10, 8), peak(10_000, 10, 8)
    assert few > 40
    assert many > 60
    assert large - small < 30e6


def test_ten_thousand_clients_fit_in_two_gigabytes() -> None:
    seen, most = peak(10_000, 100, 25)
    assert seen > 2000
    assert most < 2e9
