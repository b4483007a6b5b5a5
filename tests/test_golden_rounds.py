"""Golden rounds: ten rounds of many small runs give the recorded numbers, exactly where the record was made."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

import make_golden_rounds as golden

Rounds = list[dict[str, Any]]
NUDGES = (1, 2, 3)
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
    """To the last bit where processor and libraries are those of the record.

    Elsewhere bytes and cohorts are equal and other numbers close, up to a round in which rounding decides: there the
    last bit of a weight chooses what top-k keeps or which sign is sent, and every processor may choose differently.
    """
    exactly = golden.where() == STORED["environment"]
    now, before = golden.rounds_of(EXPERIMENTS[name]), STORED["runs"][name]
    if found := difference(now, before, exactly):
        round, what = found
        assert not exactly, f"round {round}: {what}"
        assert rounding_decides(name, now, round), f"round {round}: {what}, and not by rounding"


def difference(now: Rounds, before: Rounds, exactly: bool) -> tuple[int, str] | None:
    """The first round in which a run is not as before, and what differs there."""
    for mine, his in zip(now, before, strict=True):
        for key, value in his.items():
            found = mine.get(key)  # what was not measured is left out today, and was null before
            if not same(found, value, exactly):
                return his["round"], f"{key} is {found}, was {value}"
    return None


def rounding_decides(name: str, now: Rounds, round: int) -> bool:
    """Whether a run is different by this round if some of its first weights differ in their last bit."""
    for nudge in NUDGES:
        parts = difference(golden.rounds_of(EXPERIMENTS[name], nudge), now, exactly=False)
        if parts is not None and parts[0] <= round:
            return True
    return False


def same(now: Any, before: Any, exactly: bool) -> bool:
    if exactly or not isinstance(before, float):
        return bool(now == before)
    return bool(now == pytest.approx(before, rel=1e-5, abs=1e-5))
