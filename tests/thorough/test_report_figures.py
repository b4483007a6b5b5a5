"""All figures of a report with charts of every kind, as in `test_report`."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcams.report import report
from test_report import two_way


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of the figures of two reports on the same runs."""
    root = tmp_path_factory.mktemp("two-way")
    runs = two_way(root / "runs")
    return [report([runs], root / name, target=0.75, figures=True).parent / "figures" for name in ("out", "again")]


def test_every_chart_is_drawn_twice(made: list[Path]) -> None:
    axes = ("rounds", "bytes", "bytes_up", "paper_bits")
    charts = {f"{metric}-{axis}" for metric in ("test_accuracy", "test_loss", "train_loss") for axis in axes}
    charts |= {"q-rounds", "gamma-rounds", "tradeoff", "communication"}
    charts |= {"partition-1", "partition-2", "time-to-accuracy"}
    assert {path.name for path in made[0].iterdir()} == {
        f"{chart}.{kind}" for chart in charts for kind in ("png", "svg")
    }
    assert (made[0] / "q-rounds.png").read_bytes().startswith(b"\x89PNG")


def test_equal_runs_make_equal_figures(made: list[Path]) -> None:
    for path in made[0].iterdir():
        assert path.read_bytes() == (made[1] / path.name).read_bytes(), path.name
