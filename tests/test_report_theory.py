"""Measured constants in reports, on real runs of a tiny task."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcams.experiment import Experiment
from fedcams.report import collect, figures, plotly, report, summarize
from fedcams.report.charts import Chart, describe
from fedcams.report.page import page
from fedcams.report.series import CONSTANTS
from fedcams.runs import RunError, run
from fedcams.theory.measure import Measured

FILE = "theory.jsonl"
ROUNDS = [1, 3, 6, 7]
"""The measured ones of seven rounds, with `theory_every=3`."""
TINY = {
    "label": "tiny", "task": "quadratic(dim=6, groups=14, size=20, sigma_l=2, sigma_g=0.5)", "model": "point",
    "partition": "natural", "clients": 14, "sampler": "uniform(n=4)", "rounds": 7, "engine": "loop",
    "local": "sgd(lr=0.02, steps=2, batch=4)", "server": "fedams(lr=0.3, eps=0.1)",
}  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds, measured with ten of fourteen clients, and a method that was not measured."""
    root = tmp_path_factory.mktemp("measured")
    for seed in (1, 2):
        run(Experiment.from_dict({**TINY, "theory_every": 3, "seed": seed}), root / f"tiny-s{seed}")
    run(Experiment.from_dict({**TINY, "label": "other", "server": "fedavg"}), root / "other")
    return root


@pytest.fixture
def runs(measured: Path, tmp_path: Path) -> Path:
    """A copy, to change."""
    return Path(shutil.copytree(measured, tmp_path / "runs"))


def lines(folder: Path, name: str = FILE) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def charts_of(root: Path) -> dict[str, Chart]:
    collection = collect([root])
    return {chart.key: chart for chart in describe(collection, summarize(collection)).constants}


def of_all(line: dict[str, Any]) -> float:
    """‖∇f‖² of fourteen clients from ten of them."""
    assert (line["clients"], line["population"]) == (10, 14)
    return float(line["gradient_sq"] - (1 - 10 / 14) * line["s_g"] ** 2 / 9)


# -- what is drawn -----------------------------------------------------------------------------------------------------

EXPECTED: dict[str, Callable[[dict[str, Any]], float]] = {
    "measured_gradient_sq": of_all,
    "measured_L": lambda line: max(line["L_secant"], line["L_power"]),
    "measured_G": lambda line: line["G"],
    "measured_s_l": lambda line: line["s_l"],
    "measured_s_g": lambda line: line["s_g"],
}


def test_every_constant_is_drawn_as_a_mean_and_a_band_over_seeds(measured: Path) -> None:
    charts = charts_of(measured)
    assert list(charts) == list(EXPECTED)
    for key, number in EXPECTED.items():
        series = charts[key].series[0]
        table = [[number(line) for line in lines(measured / f"tiny-s{seed}")] for seed in (1, 2)]
        assert (series.name, series.x["rounds"].tolist()) == ("tiny", ROUNDS)
        np.testing.assert_allclose(series.y, np.mean(table, axis=0))
        assert series.low is not None
        assert series.high is not None
        np.testing.assert_allclose([series.low, series.high], [np.min(table, axis=0), np.max(table, axis=0)])
        assert [axis.key for axis in charts[key].x] == ["rounds"]


def test_the_estimate_stands_beside_the_measured_gradient_in_the_same_rounds(measured: Path) -> None:
    charts = charts_of(measured)
    gradient, estimate = charts.pop("measured_gradient_sq").series
    assert estimate.name == "tiny, estimate from updates"
    assert estimate.x["rounds"].tolist() == ROUNDS
    table = [
        [lines(measured / f"tiny-s{seed}", "rounds.jsonl")[t - 1]["gradient_sq"] for t in ROUNDS] for seed in (1, 2)
    ]
    np.testing.assert_allclose(estimate.y, np.mean(table, axis=0))
    assert estimate.low is not None
    assert estimate.high is not None
    np.testing.assert_allclose([estimate.low, estimate.high], [np.min(table, axis=0), np.max(table, axis=0)])
    assert (estimate.look.colour, gradient.look.dash, estimate.look.dash) == (gradient.look.colour, "solid", "dot")
    assert [[series.name for series in chart.series] for chart in charts.values()] == [["tiny"]] * 4


def test_without_the_probe_there_is_no_estimate(tmp_path: Path) -> None:
    run(Experiment.from_dict({**TINY, "theory_every": 3, "probes": "q"}), tmp_path / "run")
    assert [series.name for series in charts_of(tmp_path)["measured_gradient_sq"].series] == ["tiny"]


def test_what_was_not_measured_is_not_drawn(runs: Path) -> None:
    shutil.rmtree(runs / "tiny-s2")
    changed = lines(runs / "tiny-s1")
    for line in changed:
        line |= {"L_power": None, "G": None}
    changed[1]["L_secant"] = None
    (runs / "tiny-s1" / FILE).write_text("".join(f"{json.dumps(line)}\n" for line in changed))
    charts = charts_of(runs)
    assert "measured_G" not in charts
    assert charts["measured_L"].series[0].x["rounds"].tolist() == [1, 6, 7]
    np.testing.assert_allclose(charts["measured_L"].series[0].y, [changed[i]["L_secant"] for i in (0, 2, 3)])
    assert Measured(1, 2, 3).smoothness is None


def test_only_gradients_may_be_below_zero(measured: Path) -> None:
    shown = {key: plotly.figure(chart, plotly.Lists())["layout"]["yaxis"] for key, chart in charts_of(measured).items()}
    assert [key for key, axis in shown.items() if "rangemode" not in axis] == ["measured_gradient_sq"]


def test_figures_draw_the_same_numbers(measured: Path) -> None:
    chart = charts_of(measured)["measured_gradient_sq"]
    printed = figures.figure(chart, chart.x[0]).axes[0].lines
    assert [line.get_ydata().tolist() for line in printed] == [series.y.tolist() for series in chart.series]
    assert [line.get_linestyle() for line in printed] == ["-", ":"]


# -- which runs --------------------------------------------------------------------------------------------------------


def test_the_section_is_there_only_with_measurements(runs: Path, tmp_path: Path) -> None:
    written = report([runs], tmp_path / "with").read_text("utf-8")
    assert "<h2>Measured constants</h2>" in written
    assert "at most 10 clients" in written
    assert all(f'id="chart-{metric.key}"' in written for metric in CONSTANTS)
    for seed in (1, 2):
        (runs / f"tiny-s{seed}" / FILE).unlink()
    collection = collect([runs])
    assert "Measured constants" not in page(collection, summarize(collection))
    assert charts_of(runs) == {}


def test_measuring_does_not_split_a_method(runs: Path) -> None:
    """Seeds measured at different intervals meet in common rounds; one that was not measured does not count."""
    for seed, every in ((3, 2), (4, 0)):
        run(Experiment.from_dict({**TINY, "theory_every": every, "seed": seed}), runs / f"tiny-s{seed}")
    methods = {method.label: len(method.runs) for method in collect([runs]).methods}
    assert methods == {"tiny": 4, "other": 1}
    series = charts_of(runs)["measured_G"].series[0]
    assert series.x["rounds"].tolist() == [1, 6, 7]
    found = [{line["round"]: line["G"] for line in lines(runs / f"tiny-s{seed}")} for seed in (1, 2, 3)]
    np.testing.assert_allclose(series.y, [np.mean([seed[t] for seed in found]) for t in (1, 6, 7)])


def test_rounds_csv_has_the_constants_in_measured_rounds(runs: Path, tmp_path: Path) -> None:
    def read(name: str) -> list[dict[str, str]]:
        out = report([runs], tmp_path / name).parent
        with (out / "rounds.csv").open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    rows = read("with")
    for key, number in EXPECTED.items():
        known = {row["round"]: row[key] for row in rows if row["label"] == "tiny" and row["seed"] == "2" and row[key]}
        assert known == {str(line["round"]): repr(number(line)) for line in lines(runs / "tiny-s2")}
        assert {row[key] for row in rows if row["label"] == "other"} == {""}
    for seed in (1, 2):
        (runs / f"tiny-s{seed}" / FILE).unlink()
    assert list(read("without")[0]) == [name for name in rows[0] if name not in EXPECTED]


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: "{\n", r"theory\.jsonl: damaged \("),
        (lambda text: "3\n", r"theory\.jsonl: damaged \("),
        (lambda text: '{"round": 1}\n', r"theory\.jsonl: damaged \("),
        (lambda text: text.replace('"G": ', '"G": "x", "was": '), r"theory\.jsonl: damaged \(G is 'x'\)"),
        (lambda text: text.replace('"round": 3', '"round": "3"'), r"theory\.jsonl: damaged \(round is '3'\)"),
        (lambda text: text.replace('"G": ', f'"G": {10**400}, "was": '), r"theory\.jsonl: damaged \(int too large"),
        (lambda text: text + text, r"damaged \(theory\.jsonl: rounds are not in ascending order\)"),
    ],
)
def test_damaged_and_foreign_lines_are_refused_by_name(runs: Path, tmp_path: Path, spoil: Any, message: str) -> None:
    path = runs / "tiny-s2" / FILE
    path.write_text(spoil(path.read_text()))
    with pytest.raises(RunError, match=message) as caught:
        report([runs], tmp_path / "out")
    assert str(path.parent) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_run_that_goes_on_meanwhile_is_reported_as_far_as_it_is_recorded(runs: Path) -> None:
    """The last record is missing, since it came after they were read, and the last measurement is half written."""
    for seed in (1, 2):
        path = runs / f"tiny-s{seed}"
        records = (path / "rounds.jsonl").read_text().splitlines(keepends=True)
        (path / "rounds.jsonl").write_text("".join(records[:-1]))
        with (path / FILE).open("a") as file:
            file.write('{"round": 8, "cli')
    assert charts_of(runs)["measured_G"].series[0].x["rounds"].tolist() == ROUNDS[:-1]
