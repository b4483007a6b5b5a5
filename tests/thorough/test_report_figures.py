"""All figures of a report with charts of every kind, as in `test_report`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fedcams.report import collect, figures, report, summarize
from fedcams.report.charts import Charts, describe
from test_report import two_way


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report's figures; its runs are two folders above."""
    root = tmp_path_factory.mktemp("two-way")
    return report([two_way(root / "runs")], root / "out", target=0.75, figures=True).parent / "figures"


def test_every_chart_is_drawn_in_both_formats(drawn: Path) -> None:
    axes = ("rounds", "bytes", "bytes_up", "paper_bits")
    charts = {f"{metric}-{axis}" for metric in ("test_accuracy", "test_loss", "train_loss") for axis in axes}
    charts |= {"q-rounds", "gamma-rounds", "tradeoff", "communication"}
    charts |= {"partition-1", "partition-2", "time-to-accuracy"}
    assert {path.name for path in drawn.iterdir()} == {f"{chart}.{kind}" for chart in charts for kind in ("png", "svg")}
    assert (drawn / "q-rounds.png").read_bytes().startswith(b"\x89PNG")


def test_equal_runs_make_equal_figures(drawn: Path, tmp_path: Path) -> None:
    """One of each section."""
    collection = collect([drawn.parents[1] / "runs"])
    charts = describe(collection, summarize(collection, target=0.75))
    lasts = [[dataclasses.replace(chart, x=chart.x[-1:]) for chart in section[-1:]] for section in charts]
    made = figures.write_figures(tmp_path, Charts(*lasts))
    assert len(made) == 2 * 6
    for path in made:
        assert path.read_bytes() == (drawn / path.name).read_bytes(), path.name
