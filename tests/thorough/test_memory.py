"""The memory that a large population and a large model take, as the system counts it, in separate processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forks import Forks

PROBE = """
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

measure(*map(int, sys.argv[1].split(",")))
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak from")


FEW, MANY, CROWD = "100,10,8", "10000,10,8", "10000,100,25"
"""Population, cohort and rounds."""


@pytest.fixture(scope="module")
def measured(forks: Forks) -> dict[str, tuple[int, int]]:
    """How many clients took part in each, and the most bytes that its process held."""
    found = {}
    for case in (FEW, MANY, CROWD):
        seen, most = forks.run(PROBE, case).output.split()
        found[case] = int(seen), int(most)
    return found


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


def test_memory_is_a_few_times_the_model_however_many_reply(forks: Forks) -> None:
    """In a separate process; the server's limit holds the model and the three vectors of fedams."""
    at_once = "import ctypes; ctypes.CDLL(None).mallopt(-3, 65536)"  # freed arrays go back to the system at once
    told = forks.run(f"{at_once}; import flower_memory; flower_memory.main()", "both", "5000000")
    found = {line["side"]: line for line in map(json.loads, re.findall(r"^\{.*\}$", told.output, re.M))}
    for side, limit in {"client": 3, "server": 1 + 3 + 2}.items():
        assert found[side]["peak"] < limit * found[side]["model"], side
