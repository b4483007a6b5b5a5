"""What holds for all tests."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import settings

# Several processes at once must not each take all cores: their threads would spin against each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    import torch

    torch.set_num_threads(1)

# Tests start dozens of processes, and each would compile the whole package for itself.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The first call of a kernel compiles it, so a deadline would measure that; in CI the same examples every time.
settings.register_profile("fedcams", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fedcams")


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of a report's page: drawing the pictures beside it takes ten times as long as writing it."""
    monkeypatch.setattr("fedcams.report.page.write_figures", lambda folder, charts: [])
