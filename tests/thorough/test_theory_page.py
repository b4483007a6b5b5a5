"""docs/theory.md: its numbers and pictures come from the measurements, which support what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcams.theory.rates import slope
from theory_page import adaptivity
from theory_page.adaptivity import CHOOSING, EPS, SHOWN, STEPS, Point, best, grid, measured
from theory_page.experiments import DOCS, FILE, stored, trials
from theory_page.page import BLOCK, block
from theory_page.pictures import draw, of

STALE = "is stale: run `make theory ARGS=--draw`"


def test_the_page_shows_what_was_measured() -> None:
    found = BLOCK.search((DOCS / "theory.md").read_text("utf-8"))
    assert found
    assert found[0] == block(stored(FILE), adaptivity.stored()), f"docs/theory.md {STALE}"


def test_every_trial_was_measured() -> None:
    kept = [(p["of"], p["T"], p["K"], p["m"], p["seed"], p["uplink"]) for p in stored(FILE)["points"]]
    assert kept == [(name, t.T, t.K, t.m, t.seed, t.uplink) for name, t in trials()]


@pytest.mark.parametrize("axis", ["T", "K", "m"])
def test_the_slopes_on_the_page_are_minus_one_half(axis: str) -> None:
    points = of(stored(FILE), f"rates {axis}")
    assert slope([p[axis] for p in points], [p["average"] for p in points]) == pytest.approx(-0.5, abs=0.06)
    assert all(p["average"] < p["bound"] for p in points)


def test_pictures_are_drawn_from_the_numbers(tmp_path: Path) -> None:
    draw(stored(FILE), adaptivity.stored(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (DOCS / "theory").glob("*.png")}


def test_every_setting_of_rate_and_epsilon_was_measured_and_the_best_again() -> None:
    points = adaptivity.stored()
    tried = [p for p in points if p.seed in CHOOSING]
    assert [(p.spec, p.seed) for p in tried] == [(p.spec, p.seed) for p in grid()]
    chosen = [(Point(*setting, seed).spec, seed) for setting in best(tried) for seed in SHOWN]
    assert [(p.spec, p.seed) for p in points if p.seed in SHOWN] == chosen


def test_on_its_floor_a_setting_is_its_twin() -> None:
    """What the page takes FedAvgM for: equal records wherever nothing has left the floor."""
    points = {(p.family, p.eps, p.step, p.seed): p for p in adaptivity.stored() if p.seed in CHOOSING}
    still = [p for p in points.values() if p.family == "fedams" and p.off_floor == 0 and p.accuracy > 0.5]
    assert len(still) >= len(STEPS)
    for p in still:
        twin = points["fedavgm", 0.0, p.step, p.seed]
        assert p.accuracy == pytest.approx(twin.accuracy, abs=0.01), p
    assert max(EPS) in {p.eps for p in still}


def test_a_setting_runs_as_recorded() -> None:
    """The cheapest check that the file is what this code makes; CPUs differ in rounding, so not to the last digit."""
    recorded = next(p for p in adaptivity.stored() if p.family == "fedams" and p.off_floor == 0 and p.step == STEPS[2])
    assert measured(recorded).accuracy == pytest.approx(recorded.accuracy, abs=0.02)
