"""docs/theory.md: its numbers and pictures come from the measurements, which support what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_reproduction import add, averaged

from fedcams.theory.rates import slope
from reproduction.page import RESULTS
from reproduction.pictures import drawn_from
from reproduction.runs import NEAR, Results
from theory_page import adaptivity
from theory_page.adaptivity import CHOOSING, EPS, SHOWN, STEPS, Point, best, grid, measured
from theory_page.experiments import DOCS, FILE, stored, trials
from theory_page.off_floor import off_floor, off_floor_panels
from theory_page.page import BLOCK, block
from theory_page.pictures import draw, gradient, of
from theory_page.recorded import STUDIES, best_rates, rows, sections, twins

STALE = "is stale: run `make theory ARGS=--draw`"


def test_the_page_shows_what_was_measured() -> None:
    found = BLOCK.search((DOCS / "theory.md").read_text("utf-8"))
    assert found
    assert found[0] == block(stored(FILE), adaptivity.stored(), Results(RESULTS)), f"docs/theory.md {STALE}"


def test_every_trial_was_measured() -> None:
    kept = [(p["of"], p["T"], p["K"], p["m"], p["seed"], p["uplink"]) for p in stored(FILE)["points"]]
    assert kept == [(name, t.T, t.K, t.m, t.seed, t.uplink) for name, t in trials()]


@pytest.mark.parametrize("axis", ["T", "K", "m"])
def test_the_slopes_on_the_page_are_minus_one_half(axis: str) -> None:
    points = of(stored(FILE), f"rates {axis}")
    assert slope([p[axis] for p in points], [p["average"] for p in points]) == pytest.approx(-0.5, abs=0.06)
    assert all(p["average"] < p["bound"] for p in points)


def test_pictures_are_drawn_from_the_numbers(tmp_path: Path) -> None:
    draw(stored(FILE), adaptivity.stored(), Results(RESULTS), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (DOCS / "theory").glob("*.png")}
    for path in tmp_path.iterdir():
        assert drawn_from(DOCS / "theory" / path.name) == drawn_from(path), f"{path.name} {STALE}"


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


# -- recorded runs -----------------------------------------------------------------------------------------------------


def test_recorded_runs_are_compared_where_both_families_are_there(tmp_path: Path) -> None:
    plays, images = STUDIES
    add(tmp_path, "shakespeare-lstm", "FedAMS", rounds=1200, top=0.60, seconds=None)
    assert not rows(Results(tmp_path), plays), "FedAMS alone compares with nothing"
    assert not list(sections(Results(tmp_path)))
    averaged(add(tmp_path, plays.preset, "FedAvgM, rate 10", rounds=1200, top=0.55, seconds=None), 0.5)
    found = rows(Results(tmp_path), plays)
    # the last fifth of a line from 0 to `top` is 0.9 of it
    assert [(row.name, row.rate, round(row.accuracy, 1)) for row in found] == [
        ("FedAvgM", 10, 49.5),
        ("1e-06", 10, 54.0),
    ]
    text = "\n".join(sections(Results(tmp_path)))
    assert re.search(r"^\| FedAvgM \| 10 \|  \| 49\.5\d \| 50\.00 \|$", text, re.MULTILINE)
    assert "end. The difference from FedAvgM is +4.50 points (seed 1)." in text
    assert "CIFAR-10" not in text
    for label, top in (("FedAvgM, rate 10", 0.8), ("FedAvgM, rate 100", 0.9), ("eps=1e-9, rate 100", 0.902)):
        add(tmp_path, images.preset, label, rounds=60, top=top)
    assert [row.rate for row in best_rates(rows(Results(tmp_path), images))] == [100, 100]
    text = "\n".join(sections(Results(tmp_path))).split("#### CIFAR-10, 60 rounds")[1]
    assert "| FedAvgM | 100 |" in text
    assert "| FedAvgM | 10 |" not in text
    assert "points, which counts as equal (seed 11)." in text
    assert len(off_floor(off_floor_panels(adaptivity.stored(), Results(tmp_path))).axes) == 1, "one ε makes no line"
    add(tmp_path, images.preset, "eps=1e-8, rate 100", rounds=60, top=0.85)
    assert len(off_floor(off_floor_panels(adaptivity.stored(), Results(tmp_path))).axes) == 2


def test_twins_are_compared_on_common_seeds(tmp_path: Path) -> None:
    assert not list(twins(Results(tmp_path)))
    for label, seed, top in (("FedAMS", 1, 0.9), ("FedAMS", 2, 0.5), ("FedAvgM, twin of FedAMS", 1, 0.904)):
        add(tmp_path, "fig1-convmixer", label, seed=seed, top=top)
    text = "\n".join(twins(Results(tmp_path)))
    assert "| ConvMixer-256-8 | FedAMS | 81.09 | 81.45 | -0.36 | 1 |" in text
    assert f"In 1 of 1 pairs the difference is at most\n{NEAR} points" in text
    for label in ("FedAMSGrad", "FedAvgM, twin of FedAdam"):
        add(tmp_path, "fig1-convmixer", label, top=0.9 if label == "FedAMSGrad" else 0.8)
    assert "| ConvMixer-256-8 | FedAMSGrad | 81.09 | 72.08 | +9.01 | 1 |" in "\n".join(twins(Results(tmp_path)))


def test_the_measured_gradient_is_shown_once_fedams_recorded_it(tmp_path: Path) -> None:
    run = add(tmp_path, "fig1-resnet18", "FedAMS")
    assert gradient(Results(tmp_path)) is None
    lines = (run / "rounds.jsonl").read_text().replace('"round":', '"gradient_sq": 0.25, "round":')
    (run / "rounds.jsonl").write_text(lines)
    assert gradient(Results(tmp_path)) == 0.25
    assert "put the mean of ‖∇f‖² at about 0.25." in block(stored(FILE), adaptivity.stored(), Results(tmp_path))


def test_several_seeds_have_a_range(tmp_path: Path) -> None:
    _, images = STUDIES
    for seed, top in ((11, 0.8), (12, 0.9)):
        add(tmp_path, images.preset, "FedAvgM, rate 10", rounds=60, top=top, seed=seed)
        for label in ("eps=1e-8, rate 100", "eps=1e-9, rate 100"):
            add(tmp_path, images.preset, label, rounds=60, top=top, seed=seed)
    text = "\n".join(sections(Results(tmp_path)))
    assert re.search(r"^\| FedAvgM \| 10 \|  \| 7\d\.\d\d \(7\d\.\d\d … 8\d\.\d\d\) \|", text, re.MULTILINE)
    assert "(seeds 11, 12)" in text
    panel = off_floor(off_floor_panels(adaptivity.stored(), Results(tmp_path))).axes[1]
    assert len(panel.patches) == 1, "the band of FedAvgM"
    assert panel.get_ylim()[0] < 0.73, "below the lowest seed, not only below the means"
