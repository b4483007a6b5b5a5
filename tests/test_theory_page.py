"""docs/theory.md: its numbers and pictures are those of what was measured, and support what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcams.theory.rates import slope
from theory_page.experiments import DOCS, FILE, stored, trials
from theory_page.page import BLOCK, block
from theory_page.pictures import draw, of

STALE = "is stale: run `make theory ARGS=--draw`"


def test_the_page_shows_what_was_measured() -> None:
    found = BLOCK.search((DOCS / "theory.md").read_text("utf-8"))
    assert found
    assert found[0] == block(stored(FILE)), f"docs/theory.md {STALE}"


def test_every_trial_was_measured() -> None:
    kept = [(p["of"], p["T"], p["K"], p["m"], p["seed"], p["uplink"]) for p in stored(FILE)["points"]]
    assert kept == [(name, t.T, t.K, t.m, t.seed, t.uplink) for name, t in trials()]


@pytest.mark.parametrize("axis", ["T", "K", "m"])
def test_the_slopes_on_the_page_are_minus_one_half(axis: str) -> None:
    points = of(stored(FILE), f"rates {axis}")
    assert slope([p[axis] for p in points], [p["average"] for p in points]) == pytest.approx(-0.5, abs=0.06)
    assert all(p["average"] < p["bound"] for p in points)


def test_pictures_are_drawn_from_the_numbers(tmp_path: Path) -> None:
    draw(stored(FILE), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (DOCS / "theory").glob("*.png")}
