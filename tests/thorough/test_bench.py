"""Benchmarks: contenders do the same work, and the tables show what was measured."""

from __future__ import annotations

import json

import pytest
import torch

from command_line import fedcams
from fedcams.bench import rounds
from fedcams.bench.rounds import LoopByHand
from fedcams.experiment import Experiment, build


def test_both_learn_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand and stacked: other shuffles, the same federation, the same accuracy within a few examples."""
    monkeypatch.setattr(rounds, "engines", lambda: ("stacked",))  # what is compiled is tested with the engines
    found = rounds._accuracies("mlp", "iid")
    assert found["stacked"] > 0.8
    assert abs(found["stacked"] - found[rounds.BY_HAND]) < 0.02


def test_fedcams_by_hand_keeps_what_compression_lost() -> None:
    built = build(Experiment.from_dict({"task": "digits", "clients": 20, "local": "sgd(lr=0.05, batch=20)"}))
    loop = rounds._loop(built)
    assert isinstance(loop, LoopByHand)
    line = json.loads(loop.round([0, 3]))
    assert line["sent"] == 2 * (-(-len(loop.x) // 8) + 4)
    assert sorted(loop.residuals) == [0, 3]
    assert all(bool((row != 0).any()) for row in loop.residuals.values())


def test_tables_hold_every_engine_and_divide_by_the_loop() -> None:
    times = {"train by hand": 10.0, "round by hand": 12.0, "train stacked": 2.0, "round stacked": 4.0}
    case = rounds.Case("mlp", "iid", times, {"stacked": 0.9, rounds.BY_HAND: 0.91})
    rows = rounds.speed([case]).rows
    assert rows[0] == ("mlp, iid", "stacked", "2.00", "5.0x", "4.00", "3.0x", "0.900")
    assert rows[1][3] == "1.0x"
    markdown = rounds.shares([rounds.Share("sign", 1_000_000, 50.0, 0.061)]).to_markdown()
    assert "| sign | 1,000,000 | 50.0 | 6% |" in markdown


def test_the_share_is_that_of_the_phases() -> None:
    before = torch.get_num_threads()
    one = rounds.share("sign", rounds=1)
    assert one.parameters >= 1_000_000
    assert 0 < one.share < 1
    assert torch.get_num_threads() == before


def test_help_says_what_is_timed() -> None:
    shown = fedcams("bench", "--help")
    assert shown.exit_code == 0
    assert "written by hand in PyTorch" in " ".join(shown.output.split())
