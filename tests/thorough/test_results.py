"""What older versions wrote still loads."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from fedcams.experiment import Experiment
from fedcams.experiment.preset import load_preset
from fedcams.runs import read_run
from together import together

RESULTS = Path(__file__).resolve().parents[2] / "results"
RUNS = sorted(path.parent for path in RESULTS.glob("**/experiment.toml"))


@together("folder", RUNS)
def test_every_result_still_loads(folder: Path) -> None:
    """Every key of every line keeps its value, and the experiment what it says."""
    found = read_run(folder)
    assert found.finished
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line, record in zip(lines, found.records, strict=True):
        assert {**record.to_dict(), **line} == record.to_dict()
    written, known = tomllib.loads((folder / "experiment.toml").read_text()), found.experiment.to_dict()
    measured = "q + gamma" if written.pop("measure_gamma", False) else "q"
    assert {key: resolved(key, value) for key, value in written.items()} == {key: known[key] for key in written}
    assert known["probes"] == written.get("probes", measured)
    assert load_preset(folder / "experiment.toml").experiments == [found.experiment], "it can be run again"


def resolved(key: str, value: object) -> object:
    """The value as today's version spells it."""
    return Experiment.from_dict({key: value}).to_dict()[key]


def test_there_are_results() -> None:
    assert len(RUNS) >= 20
