"""docs/theory.md: its numbers and pictures come from the measurements, which support what the page says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from test_reproduction import add, averaged

from fedcams.theory import sound
from fedcams.theory.check import check
from fedcams.theory.rates import BASE, slope
from reproduction.page import RESULTS
from reproduction.pictures import drawn_from
from reproduction.runs import NEAR, Results
from theory_page import adaptivity
from theory_page.adaptivity import CHOOSING, EPS, SHOWN, STEPS, Point, best
from theory_page.experiments import DOCS, trials
from theory_page.grid import LENGTHS, ROWS, SEEDS, STEP_RULES, cases, compressed, fit, measure
from theory_page.measured import Measurements, stored
from theory_page.off_floor import off_floor, off_floor_panels
from theory_page.over_rounds import over_rounds, views
from theory_page.page import BLOCK, block
from theory_page.pictures import draw, gradient
from theory_page.quadratics import DENSE, SAME, bound_of, excess_of_sampled, excesses, package_slopes, ratios
from theory_page.recorded import STUDIES, best_rates, rows, sections, twins

STALE = "is stale: run `make theory ARGS=--draw`"


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return stored(Results(RESULTS))


def test_the_page_shows_what_was_measured(measured: Measurements) -> None:
    found = BLOCK.search((DOCS / "theory.md").read_text("utf-8"))
    assert found
    assert found[0] == block(measured), f"docs/theory.md {STALE}"


def test_every_trial_and_every_case_was_measured(measured: Measurements) -> None:
    assert [(axis, each.trial) for axis, each in measured.package.rates] == list(trials())
    assert list(measured.oracle) == cases()
    assert {tuple(each.seed for each in seeds) for seeds in measured.oracle.values()} == {SEEDS}


def test_the_slopes_on_the_page_are_minus_one_half(measured: Measurements) -> None:
    """The oracle's, the package's, and both alike on the same problem."""
    ours = package_slopes(measured.package)
    for row in (*ROWS[:2], SAME):
        for axis in row.axes:
            fitted = fit(measured.oracle, row, axis)
            assert fitted.mean == pytest.approx(-0.5, abs=0.06), (row.name, axis)
            assert fitted.deviation < 0.03, (row.name, axis)
            if row is SAME:
                assert ours[axis].mean == pytest.approx(-0.5, abs=0.06), axis
                assert ours[axis].mean == pytest.approx(fitted.mean, abs=0.05), axis


def test_theory_predicts_the_other_slopes_too(measured: Measurements) -> None:
    by_steps, alone = (fit(measured.oracle, row, "K", late=True).mean for row in STEP_RULES)
    assert by_steps == pytest.approx(0.5, abs=0.06)
    assert alone == pytest.approx(0, abs=0.06)
    momentum = ROWS[2]
    for axis in momentum.axes:
        assert fit(measured.oracle, momentum, axis, late=True).mean == pytest.approx(-0.5, abs=0.06), axis


def test_measurements_lie_below_the_proved_bound(measured: Measurements) -> None:
    for row in (*ROWS[:3], SAME):
        for case in (case for axis in row.axes for case in row.cases(axis)):
            assert all(each.off_floor == 0 for each in measured.oracle[case]), "or it is not the bound of this run"
            assert max(each.average for each in measured.oracle[case]) < bound_of(case).value, case
    values = {(each.trial.T, each.trial.K, each.trial.m): each.average for _, each in measured.package.rates}
    for case in (case for axis in SAME.axes for case in SAME.cases(axis)):
        assert values[case.T, case.K, case.m] < bound_of(case).value, case


def test_the_bound_of_a_case_is_that_of_the_packages_run() -> None:
    """`theory check` finds constants and rates itself; here the run is taken as the FedAvgM that it was."""
    checked = check(BASE["full"].experiment)
    assert sound(checked.constants, replace(checked.run, adapts=False)).value == pytest.approx(
        bound_of(SAME.base).value, rel=1e-4
    )


def test_the_excess_of_compression_halves_when_runs_are_four_times_as_long(measured: Measurements) -> None:
    for uplink in ("top-k 1/16", "top-k 1/64"):
        excess = [fmean(seeds) for seeds in excesses(ratios(measured.oracle, compressed(uplink), DENSE))]
        assert slope(LENGTHS, excess) == pytest.approx(-0.5, abs=0.06), uplink
    assert not excesses(ratios(measured.oracle, compressed("top-k 1/4"), DENSE)), "it costs nothing in long runs"


def test_half_the_step_about_halves_the_excess_where_clients_differ(measured: Measurements) -> None:
    whole, half = (excess_of_sampled(measured.oracle, by_steps) for by_steps in (True, False))
    for before, after in zip(whole, half, strict=True):
        assert 0.3 < after / before < 0.55
    text = BLOCK.search((DOCS / "theory.md").read_text("utf-8"))
    assert text
    assert "| top-k 1/64, σ_g = 4, half the step |" in text[0]


def test_a_case_runs_as_recorded(measured: Measurements) -> None:
    case = replace(ROWS[0].base, T=512)
    found = measure(case)
    for ours, kept in zip(found, measured.oracle[case], strict=True):
        assert ours == pytest.approx(kept, rel=1e-6)


def test_every_file_of_numbers_says_where_it_was_made(measured: Measurements) -> None:
    runs = {
        "oracle.csv": sum(map(len, measured.oracle.values())),
        "measured.json": len(measured.package.rates) + len(measured.package.gamma),
        "adaptivity.csv": len(measured.digits),
    }
    assert {file: about["runs"] for file, about in measured.made.items()} == runs
    assert set(runs) == {path.name for path in (DOCS / "theory").iterdir() if path.suffix != ".png"} - {
        "environment.json"
    }


def test_a_study_that_does_not_exist_is_refused() -> None:
    found = subprocess.run([sys.executable, "-m", "theory_page", "--only", "oracles"], capture_output=True, text=True)
    assert found.returncode == 2
    assert "invalid choice: 'oracles'" in found.stderr


def test_pictures_are_drawn_from_the_numbers(measured: Measurements, tmp_path: Path) -> None:
    draw(measured, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (DOCS / "theory").glob("*.png")}
    for path in tmp_path.iterdir():
        assert drawn_from(DOCS / "theory" / path.name) == drawn_from(path), f"{path.name} {STALE}"


def test_every_setting_of_rate_and_epsilon_was_measured_and_the_best_again() -> None:
    points = adaptivity.stored()
    tried = [p for p in points if p.seed in CHOOSING]
    assert [(p.spec, p.seed) for p in tried] == [(p.spec, p.seed) for p in adaptivity.grid()]
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
    assert adaptivity.measured(recorded).accuracy == pytest.approx(recorded.accuracy, abs=0.02)


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
    assert "favours" not in text, "neither had more settings to choose from"
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


def test_the_measured_gradient_is_shown_once_fedams_recorded_it(tmp_path: Path, measured: Measurements) -> None:
    run = add(tmp_path, "fig1-resnet18", "FedAMS")
    assert gradient(Results(tmp_path)) is None
    lines = (run / "rounds.jsonl").read_text().replace('"round":', '"gradient_sq": 0.25, "round":')
    (run / "rounds.jsonl").write_text(lines)
    assert gradient(Results(tmp_path)) == 0.25
    assert "put the mean of ‖∇f‖² at about 0.25, which is" in block(replace(measured, results=Results(tmp_path)))


def test_a_setting_that_ran_elsewhere_is_named(tmp_path: Path) -> None:
    _, images = STUDIES
    labels = ("FedAvgM, rate 10", "eps=1e-8, rate 100", "eps=1e-9, rate 100")
    folders = [add(tmp_path, images.preset, label, rounds=60) for label in labels]
    for folder, device in zip(folders, ("gpu", "cpu", "gpu"), strict=True):
        (folder / "environment.json").write_text(json.dumps({"device": device, "torch": "2.9.1+x"}))
    text = "\n".join(sections(Results(tmp_path)))
    assert "\nThe best FedAMS is chosen from 2 settings and the best FedAvgM from 1, which favours FedAMS.\n" in text
    assert "\ngpu, torch 2.9.1; eps=1e-8, rate 100: cpu, torch 2.9.1.\n" in text
    for folder in folders:
        (folder / "environment.json").write_text(json.dumps({"device": "gpu", "torch": "2.9.1+x"}))
    assert "\ngpu, torch 2.9.1.\n" in "\n".join(sections(Results(tmp_path)))


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


def test_recorded_runs_are_drawn_over_rounds_next_to_their_twins(tmp_path: Path) -> None:
    assert not views(Results(tmp_path))
    for label, rate in (("FedYogi", 10.0), ("FedAvgM, twin of FedYogi", 1.0)):
        run = add(tmp_path, "fig1-resnet18", label)
        assert not [each for view in views(Results(tmp_path)) for each in view.curves if each.label == label]
        lines = (run / "rounds.jsonl").read_text().replace('"round":', f'"rate": {rate}, "gradient_sq": 0.25, "round":')
        (run / "rounds.jsonl").write_text(lines)
    (view,) = views(Results(tmp_path))
    assert [each.label for each in view.curves] == ["FedYogi", "FedAvgM, twin of FedYogi"]
    assert [each.numbers["rate"][-1] for each in view.curves] == pytest.approx([10, 10]), "a sum is 1/(1-β1) means"
    assert (view.seed, view.rounds) == (1, 500)
    (part,) = over_rounds([view]).subfigs
    assert [axes.get_title() for axes in part.axes] == ["rate of the server", "estimate of ‖∇f‖²"], "what was recorded"


def test_with_the_papers_settings_nothing_leaves_the_floor_and_twins_have_one_rate(measured: Measurements) -> None:
    """What the page says about the picture of recorded runs."""
    *paper, smaller = views(measured.results)
    for view in paper:
        curves = {each.label: each.numbers for each in view.curves}
        assert all(max(numbers.get("off_floor", [0])) == 0 for numbers in curves.values())
        for label, numbers in curves.items():
            if gamma := numbers.get("gamma"):
                assert fmean(gamma[-50:]) > 1.5 * fmean(gamma[:50]), label
            if twin := curves.get(f"FedAvgM, twin of {label}"):
                assert numbers["rate"] == pytest.approx(twin["rate"], rel=0.01), label
    *adaptive, plain = sorted(smaller.curves, key=lambda each: each.label == "FedAvgM")
    ends = [each.numbers["off_floor"][-1] for each in adaptive]
    assert 0 < ends[0] < ends[1] < ends[2]
    assert all(each.numbers["rate"][-1] < plain.numbers["rate"][-1] for each in adaptive)
