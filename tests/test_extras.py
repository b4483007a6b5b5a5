"""If an optional library is missing, the error names it and its extra."""

from __future__ import annotations

import sys

import pytest
import torch

import fedcams
from fedcams.extras import ExtraMissing, load
from forks import Forks


def test_an_installed_library_is_loaded() -> None:
    assert load("json", what="this", extra="none").loads("1") == 1


def test_a_missing_one_is_named_with_its_extra() -> None:
    with pytest.raises(ExtraMissing, match=r"this needs no_such_library \(.*\); pip install 'fedcams\[that\]'"):
        load("no_such_library", what="this", extra="that")


def test_without_flower_the_package_says_so(forks: Forks) -> None:
    """In a separate process, since modules are loaded once."""
    probe = "import sys; sys.modules['flwr'] = None\nimport fedcams.flower"
    result = forks.run(probe)
    assert result.code == 1
    assert "fedcams.flower needs flwr" in result.errors
    assert "pip install 'fedcams[flower]'" in result.errors


def test_without_pandas_a_history_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.ones(4, 2), torch.zeros(4, dtype=torch.long)
    history = fedcams.simulate(torch.nn.Linear(2, 2), [data], data, rounds=1, cohort=1)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ExtraMissing, match=r"History.to_frame needs pandas .*'fedcams\[frame\]'"):
        history.to_frame()
