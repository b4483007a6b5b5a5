"""A newcomer's pieces, one file each, over Flower: the same model as in the simulator, even after restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower_apps import experiment, quick, run_method, simulation  # noqa: F401  (a fixture for every test here)
from own_pieces import METHODS, loaded
from test_flower_methods import assert_simulated


@pytest.mark.parametrize("name", [name for name in METHODS if name != "own_probe"])  # probes are the simulator's
def test_a_piece_of_ones_own_runs_over_flower(name: str, tmp_path: Path) -> None:
    with loaded(tmp_path):
        changes = METHODS[name]
        found = run_method(tmp_path / "run", restarts=(1,), **changes)
        assert_simulated(found, simulation(experiment(**changes)))
