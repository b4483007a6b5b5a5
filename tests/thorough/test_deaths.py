"""Deaths of a run, as in `test_runs_kills`, at three times as many moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_runs_kills import ALL_PARTS, check_deaths


def test_death_at_many_steps_and_again_while_resuming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_deaths(tmp_path, monkeypatch, ALL_PARTS, every=7)
