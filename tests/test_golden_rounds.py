"""Golden rounds: ten rounds of many small runs give exactly the recorded numbers."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

import make_golden_rounds as golden
from fedcams.experiment import Experiment

STORED = json.loads(gzip.decompress(golden.FILE.read_bytes()))
EXPERIMENTS = dict(golden.experiments())
DIGITS = [name for name in EXPERIMENTS if name.startswith("digits") and name.split(", ")[-1] not in golden.OPTIONS]
BY_ENGINE = {
    kind: [name for name in EXPERIMENTS if name.startswith(f"quadratic, {kind}")] for kind in ("loop", "stacked")
}
OPTIONS = [name for name in EXPERIMENTS if name.startswith("digits") and name not in DIGITS]
RUN = [*BY_ENGINE["loop"][::2], *BY_ENGINE["stacked"][1::2], *OPTIONS[:6:2], *OPTIONS[7::2], *DIGITS[::8]]
"""Each quadratic by one of the two engines, which other tests compare; of the digits, which take longest, every option
by one of the two and an eighth of the rest."""


def test_every_run_is_stored() -> None:
    assert set(STORED["runs"]) <= set(EXPERIMENTS)


@pytest.mark.parametrize("name", [name for name in RUN if name in STORED["runs"]])
def test_rounds_are_as_recorded(name: str) -> None:
    check(name)


@pytest.mark.slow
def test_all_rounds_are_as_recorded() -> None:
    for name in set(STORED["runs"]) - set(RUN):
        check(name)


def check(name: str) -> None:
    """Bytes and cohorts always; other numbers to the last bit where processor and libraries are those of the record."""
    experiment: Experiment = EXPERIMENTS[name]
    exactly = golden.where() == STORED["environment"]
    for now, before in zip(golden.rounds_of(experiment), STORED["runs"][name], strict=True):
        for key, value in before.items():
            found = now.get(key)  # what was not measured is left out today, and was null before
            assert same(found, value, exactly), f"round {before['round']}: {key} is {found}, was {value}"


def same(now: Any, before: Any, exactly: bool) -> bool:
    if exactly or not isinstance(before, float):
        return bool(now == before)
    return bool(now == pytest.approx(before, rel=1e-5, abs=1e-5))
