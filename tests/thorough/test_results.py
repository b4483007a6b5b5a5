"""What older versions wrote still loads."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from fedcams.experiment import Experiment
from fedcams.experiment.preset import load_preset
from fedcams.partition.dirichlet import Dirichlet
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


def test_what_the_guard_did_in_them_is_what_its_page_says() -> None:
    guarded = [run for run in map(read_run, RUNS) if "guard =" in (run.path / "experiment.toml").read_text()]
    assert not any(record.refused for run in guarded for record in run.records)
    plays = [run for run in guarded if str(run.experiment.partition) == "natural"]
    assert {str(run.experiment.guard) for run in plays} == {"adaptive(factor=10)"}
    assert {str(run.experiment.guard) for run in guarded if run not in plays} == {"adaptive"}
    iid = [run for run in guarded if str(run.experiment.partition) == "iid"]
    uneven = [run for run in guarded if run not in (*iid, *plays)]
    assert {str(run.experiment.partition) for run in uneven} == {"dirichlet"}
    assert float(Dirichlet().alpha) == 0.3
    updates = [sum(len(record.cohort) for run in runs for record in run.records) for runs in (iid, uneven)]
    largest = sorted((max(record.probes["guard_use"] or 0 for record in run.records) for run in uneven), reverse=True)
    shares = " and ".join(", ".join(f"{use:.0%}".replace("%", " %") for use in largest).rsplit(", ", 1))
    uses = [record.probes["guard_use"] or 0 for run in plays for record in run.records]
    heard = sum(len(record.cohort) for run in plays for record in run.records)
    page = " ".join((RESULTS.parent / "docs" / "methods.md").read_text("utf-8").split())
    assert f"none of {updates[0]:,} updates was refused in the {len(iid)} runs with IID data" in page
    assert f"none of {updates[1]:,} in five runs of ResNet-18 with Dirichlet 0.3" in page
    assert f"reached {shares} of its bound, so no update exceeded {5 * largest[0]:.1f} times the usual norm" in page
    assert f"none of {heard:,} updates was refused in four runs of the LSTM" in page
    assert len(plays) == 4
    assert f"the longest had {10 * max(uses):.1f} times the usual norm" in page
    assert f"refused a client in {sum(use > 0.5 for use in uses)} of the {len(uses):,} rounds" in page
    counts = json.loads((RESULTS / "shakespeare-lstm" / "fedams-s1" / "partition.json").read_text())["histogram"]
    sizes = [sum(row) for row in counts]
    assert f"longest role has {max(sizes) / min(sizes):.0f} times as much text as the shortest" in page
