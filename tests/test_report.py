"""Reports on hand-written runs, in which every number is known."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import json
import re
import sys
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcams.experiment import Experiment, sweep
from fedcams.experiment.preset import folder_name
from fedcams.extras import ExtraMissing
from fedcams.recipes import RECIPES, merged
from fedcams.report import PROFILES, Method, Profile, collect, figures, plotly, report, summarize
from fedcams.report.charts import Chart, describe
from fedcams.report.collection import COLOURS, look
from fedcams.report.numbers import human_bytes, human_seconds, score
from fedcams.report.page import ReportError, page
from fedcams.report.parts import parts
from fedcams.report.profiles import latency_share, time_to
from fedcams.report.sections import notes
from fedcams.report.series import (
    ACCURACY,
    AVERAGED,
    BYTES,
    BYTES_UP,
    PAPER_BITS,
    ROUNDS,
    TRAIN_LOSS,
    Axis,
    Q,
    histograms,
    position,
    track,
)
from fedcams.report.summary import Spread, final_score
from fedcams.report.tables import markdown, write_rounds_csv, write_summary_csv
from fedcams.runs import RunError
from fedcams.simulation import RoundRecord
from together import together


def write_run(
    folder: Path,
    accuracy: list[float | None],
    *,
    up: int = 1000,
    down: int = 4000,
    seconds: float | None = 0.5,
    histogram: list[list[int]] | None = None,
    q: float | None = None,
    gamma: float | None = None,
    parts: tuple[int, int, int] | None = None,
    probed: dict[str, float] | None = None,
    **keys: Any,
) -> Path:
    """A run of as many rounds as there are accuracies; two clients per round, and the bytes given are those of both."""
    experiment = Experiment.from_dict({"clients": 4, "sampler": "uniform(n=2)", "rounds": len(accuracy), **keys})
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(experiment.to_toml(), "utf-8")
    records = [
        RoundRecord(
            t,
            [0, 1],
            1 / t,
            None if a is None else 2 - a,
            a,
            up,
            down,
            0,
            0,
            80,
            320,
            1.0,
            *(parts or ()),
            probes={"q": q, "gamma": gamma, **(probed or {})},
        )
        for t, a in enumerate(accuracy, 1)
    ]
    (folder / "rounds.jsonl").write_text("".join(f"{record.to_json()}\n" for record in records))
    if seconds is not None:
        lines = [
            {"round": r.round, "seconds": seconds + 1.0, "phases": {"train": seconds, "evaluate": 1.0}} for r in records
        ]
        (folder / "timings.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0", "device": "cpu", "commit": None}))
    (folder / "partition.json").write_text(json.dumps({"histogram": histogram or [[5, 0], [0, 5], [2, 3], [3, 2]]}))
    return folder


def rising(top: float, rounds: int = 10) -> list[float | None]:
    return [top * t / rounds for t in range(1, rounds + 1)]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two methods; the first with two seeds, which end at 0.8 and 1.0."""
    root = tmp_path / "runs"
    dense = {"label": "dense", "server": "fedavg"}
    write_run(root / "a" / "1", rising(0.8), up=4000, seed=1, **dense)
    write_run(root / "a" / "2", rising(1.0), up=4000, seed=2, histogram=[[1, 1]] * 4, **dense)
    write_run(root / "b", rising(0.5), up=100, label="sparse", uplink="topk(ratio=1/64)", q=0.9, gamma=0.3)
    return root


def methods(root: Path) -> list[Method]:
    return collect([root]).methods


# -- servers that never adapt ------------------------------------------------------------------------------------------


def test_a_server_that_never_adapts_is_named_by_its_twin(tmp_path: Path) -> None:
    write_run(tmp_path / "on", rising(0.8), label="on", probed={"off_floor": 1e-5, "rate": 31.6, "gradient_sq": 0.5})
    write_run(
        tmp_path / "off", rising(0.7), label="off", probed={"off_floor": 0.3, "rate": 20.0, "mean_update_norm": 2.0}
    )
    write_run(tmp_path / "old", rising(0.6), label="old")
    write_run(tmp_path / "avg", rising(0.5), label="avg", server="fedavg", probed={"rate": 1.0})
    said = "on: v̂ stayed on its floor in 99.999% of coordinates: this run is fedavgm(lr=3.16, momentum=0.9)"
    collection = collect([tmp_path])
    assert [method.on_floor for method in collection.methods if method.on_floor] == [said]
    summary = summarize(collection)
    assert page(collection, summary).count("stayed on its floor") == 1
    assert f"- {said}\n" in markdown(collection, summary)
    charts = {chart.key: chart for chart in describe(collection, summary).adaptivity}
    assert {key: sorted(each.name for each in chart.series) for key, chart in charts.items()} == {
        "off_floor": ["off", "on"], "rate": ["avg", "off", "on"], "mean_update_norm": ["off"], "gradient_sq": ["on"],
    }  # fmt: skip


# -- collecting --------------------------------------------------------------------------------------------------------


def test_seeds_of_one_experiment_are_one_method(runs: Path) -> None:
    dense, sparse = methods(runs)
    assert (dense.label, sparse.label) == ("dense", "sparse")
    assert [run.experiment.seed for run in dense.runs] == [1, 2]
    assert len(sparse.runs) == 1


def test_what_is_only_observed_does_not_split_a_method(tmp_path: Path) -> None:
    write_run(tmp_path / "1", rising(0.5), seed=1, probes="q", evaluate_every=1)
    write_run(tmp_path / "2", rising(0.5), seed=2, probes="q + norms", evaluate_every=5)
    assert [(method.label, len(method.runs)) for method in collect([tmp_path]).methods] == [("run", 2)]


def test_a_run_named_twice_counts_once(runs: Path) -> None:
    assert [len(method.runs) for method in collect([runs / "a" / "2", runs, runs / "a"]).methods] == [2, 1]


def test_methods_with_one_label_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    write_run(tmp_path / "1", rising(0.5), label="x", uplink="sign", seed=1)
    write_run(tmp_path / "2", rising(0.5), label="x", uplink="sign", feedback=False, seed=2)
    assert [method.label for method in methods(tmp_path)] == ["x (feedback=True)", "x (feedback=False)"]


def test_no_more_is_told_of_equal_labels_than_tells_them_apart(tmp_path: Path) -> None:
    """Four differ in three keys, of which the first two suffice; two of them differ in only one of these."""
    kinds = [("fedavg", "sign", 2), ("fedavg", "identity", 3), ("fedams", "sign", 4), ("fedams", "identity", 4)]
    for server, uplink, rounds in kinds:
        write_run(tmp_path / f"{server}-{uplink}", rising(0.5), label="x", server=server, uplink=uplink, rounds=rounds)
    expected = {f"x (server={server}, uplink={uplink})" for server, uplink, _ in kinds}
    assert {method.label for method in methods(tmp_path)} == expected


def labels_in(folder: Path, *labels: str) -> list[str]:
    for label in labels:
        experiment = Experiment.from_dict({"label": label, "clients": 4, "sampler": "uniform(n=2)"})
        write_run(folder / folder_name(experiment), rising(0.5), label=label)
    return [method.label for method in methods(folder)]


def test_methods_in_a_folder_come_in_the_order_of_their_preset(tmp_path: Path) -> None:
    assert labels_in(tmp_path / "mine", "FedAMS", "FedYogi", "FedAvg") == ["FedAvg", "FedYogi", "FedAMS"]
    mixed = labels_in(tmp_path / "fig1-resnet18", "another", "FedAMS", "FedAvg", "FedAMSGrad")
    assert mixed == ["FedAvg", "FedAMSGrad", "FedAMS", "another"]
    assert labels_in(tmp_path / "unknown", "FedAvg", "another", "FedAMS") == ["another", "FedAMS", "FedAvg"]
    paths = [tmp_path / "mine" / f"{name}-s1" for name in ("fedams", "fedavg")]
    assert [method.label for method in collect(paths).methods] == ["FedAMS", "FedAvg"]  # as given


def test_what_was_run_is_spelled_out(tmp_path: Path) -> None:
    write_run(tmp_path / "a", rising(0.5), partition="dirichlet(alpha=0.1)", server="fedadam(lr=0.3)")
    page = report([tmp_path / "a"], tmp_path / "out").read_text("utf-8")
    assert "dirichlet(alpha=0.1, minimum=2)</dd>" in page
    assert 'title="fedadam(lr=0.3, beta1=0.9, beta2=0.99, eps=0.1, bias_correction=false)"' in page
    assert ">digits, dirichlet(alpha=0.1, minimum=2), seed 1</h3>" in page


def test_equal_partitions_are_shown_once(runs: Path) -> None:
    found = histograms(collect([runs]))
    assert [histogram.title for histogram in found] == ["digits, iid, seed 1", "digits, iid, seed 2"]
    assert found[0].counts.shape == (4, 2)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_positions_are_cumulative_sums(runs: Path) -> None:
    run = methods(runs)[1].runs[0]
    steps = np.arange(1, 11)
    for axis, each in ((ROUNDS, 1), (BYTES, 4100), (BYTES_UP, 100), (PAPER_BITS, 400)):
        assert position(run, axis).tolist() == (each * steps).tolist()


def test_seeds_become_a_mean_and_a_band(runs: Path) -> None:
    drawn = track(methods(runs)[0]).curve(ACCURACY)
    assert drawn.seeds == 2
    np.testing.assert_allclose(drawn.low, rising(0.8))
    np.testing.assert_allclose(drawn.high, rising(1.0))
    np.testing.assert_allclose(drawn.mean, rising(0.9))


def test_rounds_without_an_evaluation_are_not_drawn(tmp_path: Path) -> None:
    (method,) = methods(write_run(tmp_path / "run", [None, 0.5, None, 0.7], q=0.25))
    drawn = track(method).curve(ACCURACY)
    assert drawn.x["rounds"].tolist() == [2, 4]
    assert drawn.x["bytes_up"].tolist() == [2000, 4000]
    assert len(track(method).curve(TRAIN_LOSS).mean) == 4
    assert track(method).curve(Q).mean.tolist() == [0.25] * 4


def test_a_seed_that_stopped_early_leaves_the_mean_to_the_others(tmp_path: Path) -> None:
    write_run(tmp_path / "1", [0.2, 0.4], rounds=3, seed=1)
    write_run(tmp_path / "2", [0.4, 0.6, 0.8], rounds=3, seed=2)
    (method,) = methods(tmp_path)
    np.testing.assert_allclose(track(method).curve(ACCURACY).mean, [0.3, 0.5, 0.8])
    assert method.unfinished == ["run, seed 1: 2 of 3 rounds"]


def test_seeds_tested_at_different_intervals_meet_in_common_rounds(tmp_path: Path) -> None:
    """Otherwise the mean would jump between the seeds; a seed without the number does not count."""
    write_run(tmp_path / "1", [0.1, 0.2, 0.3, 0.4], seed=1)
    write_run(tmp_path / "2", [None, 0.4, None, 0.6], seed=2)
    (method,) = methods(tmp_path)
    drawn = track(method).curve(ACCURACY)
    assert drawn.x["rounds"].tolist() == [2, 4]
    np.testing.assert_allclose((drawn.low, drawn.mean, drawn.high), [(0.2, 0.4), (0.3, 0.5), (0.4, 0.6)])
    assert len(track(method).curve(TRAIN_LOSS).mean) == 4


def test_summary_numbers(runs: Path) -> None:
    summary = summarize(collect([runs]))
    dense, sparse = summary.rows
    assert dense.final is not None
    assert dense.last is not None
    # The last 20% of ten rounds are two: 0.72 and 0.8 for the first seed, 0.9 and 1.0 for the second.
    assert (dense.final.low, dense.final.high) == pytest.approx((0.76, 0.95))
    assert dense.final.mean == pytest.approx(0.855)
    assert dense.last.mean == pytest.approx(0.9)
    assert summary.target == pytest.approx(0.95 * 0.855, abs=1e-4)
    assert (dense.bytes_up, dense.bytes_down, sparse.bytes_up) == (40000, 40000, 1000)
    assert dense.seconds_per_round == pytest.approx(0.5)  # evaluation, one second, is not part of a round
    assert summary.percent
    assert not summary.given


@pytest.mark.parametrize("rounds", [1, 4, 7, 10, 13])
def test_the_final_accuracy_is_the_score_of_a_sweep(tmp_path: Path, rounds: int) -> None:
    write_run(tmp_path / "run", rising(0.9, rounds))
    (method,) = methods(tmp_path)
    assert final_score(method.runs[0]) == pytest.approx(sweep.score(method.runs[0].records), abs=1e-12)


def test_bytes_to_a_target_are_those_of_every_seed(runs: Path) -> None:
    dense, sparse = summarize(collect([runs]), target=0.75).rows
    # 0.08 t reaches 0.75 in round 10, 0.1 t in round 8.
    assert (dense.rounds_to_target, dense.bytes_to_target, dense.bytes_up_to_target) == (9, 72000, 36000)
    assert (sparse.reached, sparse.bytes_to_target) == (0, None)
    dense, _ = summarize(collect([runs]), target=0.9).rows
    assert (dense.reached, dense.bytes_to_target) == (1, None)


def two_way(root: Path) -> Path:
    """Ten rounds uncompressed, as an older version recorded them, and ten with deltas, catching up and dense models."""
    write_run(root / "a", rising(0.9), up=4000, label="dense")
    keys = {"label": "two-way", "uplink": "sign", "downlink": "shared(topk(ratio=1/64))", "histogram": [[1, 1]] * 4}
    write_run(root / "b", rising(0.8), up=100, down=1000, parts=(300, 500, 150), q=0.9, gamma=0.3, **keys)
    return root


def test_bytes_down_are_told_apart(tmp_path: Path) -> None:
    collection = collect([two_way(tmp_path)])
    dense, sparse = summarize(collection).rows
    assert (dense.down_catchup, dense.bytes_total) == (None, 80000)
    assert (sparse.down_catchup, sparse.down_dense, sparse.bytes_total) == (0.5, 0.15, 11000)
    (found,) = parts(collection)
    assert (found.label, found.bytes, found.total) == ("two-way", (1000, 3000, 5000, 1500, 500), 11000)
    text = markdown(collection, summarize(collection))
    assert "| Seeds | Uplink | Downlink |" in text
    assert "10.0 kB (50% catch-up, 15% dense) | 11.0 kB |" in text


def test_what_clients_hold_stands_below_the_servers_accuracy(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rising(0.8), downlink="shared(topk(ratio=1/64))", uplink="sign")
    lines = (run / "rounds.jsonl").read_text()
    (run / "rounds.jsonl").write_text(lines.replace('"held_accuracy": null', '"held_accuracy": 0.75'))
    summary = summarize(collect([run]))
    assert summary.rows[0].held_accuracy == pytest.approx(0.75)
    assert "| 76.00% (held 75.00%) |" in markdown(collect([run]), summary)


@pytest.fixture(scope="module")
def two_way_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with charts of every kind; its runs are next to it."""
    root = tmp_path_factory.mktemp("two-way")
    return report([two_way(root / "runs")], root / "out", target=0.75).parent


def test_where_the_bytes_go_is_drawn_once_the_downlink_is_compressed(runs: Path, two_way_report: Path) -> None:
    assert "chart-communication" not in page(collect([runs]), summarize(collect([runs])))
    out = two_way_report
    assert "chart-communication" in (out / "index.html").read_text("utf-8")
    assert "chart-tradeoff" in (out / "index.html").read_text("utf-8")
    last = read_csv(out / "rounds.csv")[-1]
    assert (last["wire_down_deltas"], last["wire_down_catchup"], last["wire_down_dense"]) == ("300", "500", "150")


def test_the_best_score_may_be_negative(tmp_path: Path) -> None:
    summary = summarize(collect([write_run(tmp_path / "run", [-9.0, -4.0, -2.0])]))
    assert summary.target == pytest.approx(-2.1)
    assert not summary.percent


def test_time_on_a_network(runs: Path) -> None:
    dense, sparse = methods(runs)
    profile = Profile("test", down=8, up=0.8, latency=100)
    # A client's share is half of the bytes: 2000 down at 1 MB/s, 50 up at 100 kB/s; and half a second of computing.
    each = 0.1 + 0.002 + 0.0005 + 0.5
    assert time_to(sparse, profile, 0.45) == pytest.approx(9 * each)
    assert time_to(dense, profile, 0.9) is None


def averaging(root: Path) -> Path:
    """A method whose averaged models reach 0.9 where its last ones reach 0.5, and one without an average."""
    run = write_run(root / "a", rising(0.5), up=40_000, down=40_000, label="averaged", average="ema(0.9)")
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for line, accuracy in zip(lines, rising(0.9), strict=True):
        line["averaged_accuracy"] = accuracy
    (run / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_run(root / "b", rising(0.6), up=100, down=100, label="plain", server="fedavg")
    return root


def test_averaged_models_stand_beside_the_last_ones(tmp_path: Path) -> None:
    collection = collect([averaging(tmp_path / "runs")])
    summary = summarize(collection)
    averaged, plain = summary.rows
    assert (averaged.averaged, plain.averaged) == (pytest.approx(Spread(0.855, 0.855, 0.855)), None)
    assert summary.target == pytest.approx(0.95 * 0.855, abs=1e-4), "the best of both kinds"
    averaged, plain = summarize(collection, 0.45).rows
    assert (averaged.rounds_to_target, averaged.averaged_rounds_to_target) == (9, 5)
    assert (averaged.bytes_to_target, averaged.averaged_bytes_to_target) == (720_000, 400_000)
    assert (plain.rounds_to_target, plain.averaged_rounds_to_target, plain.averaged_reached) == (8, None, 0)
    first, second = (line for line in markdown(collection, summarize(collection, 0.45)).splitlines()[4:6])
    assert "| 47.50% | 85.50% | 50.00% |" in first
    assert "| 720 kB (round 9) | 400 kB (round 5) |" in first
    assert "| 57.00% | – | 60.00% |" in second
    write_summary_csv(tmp_path / "summary.csv", summarize(collection, 0.45))
    row, _ = read_csv(tmp_path / "summary.csv")
    assert (float(row["averaged_accuracy"]), row["averaged_seeds_reached"]) == (pytest.approx(0.855), "1")
    assert float(row["averaged_bytes_to_target"]) == 400_000


def test_times_of_averaged_models_and_what_latency_takes_of_them(tmp_path: Path) -> None:
    collection = collect([averaging(tmp_path)])
    averaged, plain = collection.methods
    profile = Profile("test", down=8, up=0.8, latency=100)
    transfer = 20_000 / 1e6 + 20_000 / 1e5  # half of the bytes are a client's
    assert time_to(averaged, profile, 0.45, AVERAGED) == pytest.approx(5 * (0.1 + transfer + 0.5))
    assert time_to(plain, profile, 0.45, AVERAGED) is None
    assert latency_share(averaged, profile) == pytest.approx(0.1 / (0.1 + transfer)), "computation is no part of it"
    charts = describe(collection, summarize(collection, 0.45))
    assert [chart.key for chart in charts.network] == ["time-to-accuracy", "time-to-accuracy-averaged"]
    assert [chart.key for chart in charts.accuracy] == ["test_accuracy", "averaged_accuracy"]
    assert len(charts.accuracy[1].series) == 1
    text = markdown(collection, summarize(collection, 0.45))
    assert "on a network (last / averaged models)" in text
    assert re.search(r"\| averaged \|.* 7\.\d+ s / 4\.\d+ s \(latency 32%\)", text), "3G"
    assert "Latency is more than half of the time" in text
    assert "3G (plain); Satellite (all methods). Bytes dominate elsewhere." in text


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (100, "Latency is more than half of the time on all these networks, so fewer bytes hardly shorten a round."),
        (10**9, "Bytes dominate on all these networks: latency is less than half of the time on each."),
    ],
)
def test_a_report_says_if_latency_or_bytes_dominate_everywhere(tmp_path: Path, size: int, says: str) -> None:
    write_run(tmp_path / "run", [0.5], up=size, down=size)
    collection = collect([tmp_path])
    assert markdown(collection, summarize(collection)).endswith(f"{says}\n")


def test_a_round_without_clients_costs_no_latency(tmp_path: Path) -> None:
    (method,) = methods(write_run(tmp_path / "run", [0.5], up=0, down=0, seconds=None))
    assert time_to(method, PROFILES[0], 0.5) == 0


def test_many_notes_of_one_kind_are_folded(tmp_path: Path) -> None:
    for label in "abcde":
        write_run(tmp_path / label, rising(0.5), label=label, seconds=None)
    said = notes(collect([tmp_path]))
    assert "<summary>2 more like this</summary>" in said
    assert all(f"No timings: {label};" in said for label in "abcde")
    assert said.index("No timings: c;") < said.index("<summary>") < said.index("No timings: d;")


def test_runs_of_different_tasks_are_noted(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", rising(0.5), label="a")
    second = write_run(tmp_path / "b", rising(0.5), label="b", task="quadratic")
    assert "Different tasks: digits, quadratic; compare accuracies only within one task" in notes(collect([tmp_path]))
    assert "Different tasks" not in notes(collect([first])) + notes(collect([second]))


def test_a_share_has_an_axis_from_zero(tmp_path: Path) -> None:
    collection = collect([write_run(tmp_path / "run", rising(0.5), probed={"off_floor": 0.0})])
    (chart,) = describe(collection, summarize(collection)).adaptivity
    assert plotly.figure(chart, plotly.Lists())["layout"]["yaxis"]["rangemode"] == "nonnegative"


def test_a_column_is_made_once_and_what_was_not_measured_is_nan(tmp_path: Path) -> None:
    (run,) = collect([write_run(tmp_path / "run", [0.5, None, 0.75], q=0.25)]).runs
    np.testing.assert_array_equal(run.column("test_accuracy"), [0.5, np.nan, 0.75])
    assert run.column("q").tolist() == [0.25] * 3
    assert np.isnan(run.column("unheard-of")).all()
    assert run.column("q") is run.column("q")
    with pytest.raises(ValueError, match="read-only"):
        run.column("q")[0] = 1.0


def test_timings_may_be_missing(tmp_path: Path) -> None:
    collection = collect([write_run(tmp_path / "run", rising(0.5), seconds=None)])
    assert np.isnan(collection.runs[0].seconds).all()
    summary = summarize(collection)
    assert summary.rows[0].seconds_per_round is None
    assert "No timings: run" in page(collection, summary)


@together(
    ("number", "text"),
    [(None, "–"), (0, "0 B"), (999, "999 B"), (999.7, "1.00 kB"), (1254, "1.25 kB"), (38.46e6, "38.5 MB"),
     (999.96e6, "1.00 GB"), (2e18, "2000 PB")],
)  # fmt: skip
def test_bytes_for_people(number: float | None, text: str) -> None:
    assert human_bytes(number) == text


@together(
    ("number", "text"),
    [(None, "–"), (0.0042, "4.20 ms"), (1.25, "1.25 s"), (60, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min"),
     (3599.7, "1 h"), (86399, "1 d"), (273600, "3 d 4 h")],
)  # fmt: skip
def test_seconds_for_people(number: float | None, text: str) -> None:
    assert human_seconds(number) == text


def test_scores_for_people() -> None:
    assert (score(0.93421, True), score(-12.3456, False), score(None, True)) == ("93.42%", "-12.35", "–")


def test_looks_stay_distinct_when_colours_are_used_up() -> None:
    looks = [look(i) for i in range(3 * len(COLOURS))]
    assert len(set(looks)) == len(looks)
    assert len({look.colour for look in looks[:8]}) == 8, "the methods of the demo differ in colour, not only in dash"


# -- files -------------------------------------------------------------------------------------------------------------


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


SEEN = {
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
"""What becomes of linear red, green and blue (Machado, Oliveira, Fernandes 2009, severity 1)."""


def lab(light: Any) -> Any:
    """CIE L*a*b* under D65, where distances are about as the eye has them."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(
        light, 0, 1
    )
    x, y, z = np.cbrt(xyz / np.array([0.9505, 1.0, 1.0888]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def linear(colour: str) -> Any:
    """Linear red, green and blue of a colour such as `#0072b2`."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(linear(colour) @ np.array([0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("sight", SEEN)
def test_the_colour_blind_can_tell_methods_apart(sight: str) -> None:
    seen = [lab(np.array(SEEN[sight]) @ linear(colour)) for colour in COLOURS]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 15


def test_every_colour_stands_out_from_both_backgrounds() -> None:
    """WCAG's contrast ratios against the cards of the light and the dark page."""
    light, dark, *colours = (luminance(colour) for colour in ("#ffffff", "#171b21", *COLOURS))
    assert min((light + 0.05) / (colour + 0.05) for colour in colours) > 2.2
    assert min((colour + 0.05) / (dark + 0.05) for colour in colours) > 3


def test_a_report_is_complete(two_way_report: Path) -> None:
    assert {path.name for path in two_way_report.iterdir()} == {"index.html", "summary.csv", "rounds.csv", "summary.md"}
    assert all(row["target"] == "0.75" for row in read_csv(two_way_report / "summary.csv"))
    text = (two_way_report / "index.html").read_text("utf-8")
    assert inflated(text, "plotly").startswith("/**\n* plotly.js")
    assert "2.13.0" in text


def inflated(page: str, key: str) -> str:
    """What an element of the page holds compressed."""
    packed = page.split(f'<script type="text/plain" id="{key}">')[1].split("</script>")[0]
    return gzip.decompress(base64.b64decode(packed, validate=True)).decode()


def test_the_page_is_small(tmp_path: Path) -> None:
    """Nine runs of 500 rounds, all different in their last digits, in less than a megabyte and a half."""
    scatter = np.random.Generator(np.random.Philox(1)).random((9, 500))
    for index, row in enumerate(scatter.tolist()):
        keys = {"label": f"method {index}", "seed": index + 1, "q": row[0], "seconds": row[1]}
        write_run(tmp_path / str(index), [float(f"{a:.4f}") for a in row], **keys)
    collection = collect([tmp_path])
    assert len(page(collection, summarize(collection))) < 1_500_000


def test_what_the_page_draws_with_is_what_the_notes_say() -> None:
    folder = files("fedcams.report") / "vendored"
    script = gzip.decompress((folder / "plotly-cartesian.min.js.gz").read_bytes())
    notes = (folder / "README.md").read_text("utf-8")
    assert f"`{hashlib.sha256(script).hexdigest()}`" in notes
    version = re.search(rb"plotly\.js \(cartesian - minified\) v([\d.]+)", script)
    assert version
    assert f"plotly.js {version[1].decode()}," in notes


def test_summary_csv_is_exact(runs: Path, tmp_path: Path) -> None:
    write_summary_csv(tmp_path / "summary.csv", summarize(collect([runs]), 0.75))
    dense, sparse = read_csv(tmp_path / "summary.csv")
    assert (dense["label"], dense["server"], dense["seeds"]) == ("dense", "fedavg", "1 2")
    assert float(dense["final_accuracy"]) == pytest.approx(0.855)
    assert float(dense["final_accuracy_low"]) == pytest.approx(0.76)
    assert (float(dense["bytes_to_target"]), dense["target"]) == (72000, "0.75")
    assert (sparse["uplink"], sparse["bytes_to_target"], sparse["seeds_reached"]) == ("topk(ratio=1/64)", "", "0")


def test_rounds_csv_has_every_round(runs: Path, tmp_path: Path) -> None:
    write_rounds_csv(tmp_path / "rounds.csv", collect([runs]))
    rows = read_csv(tmp_path / "rounds.csv")
    assert len(rows) == 30
    last = rows[-1]
    assert (last["label"], last["round"], last["cohort"], last["q"], last["seconds"]) == (
        "sparse", "10", "2", "0.9", "0.5",
    )  # fmt: skip
    assert (last["cumulative_bytes"], last["cumulative_bytes_up"], last["cumulative_paper_bits"]) == (
        "41000", "1000", "4000",
    )  # fmt: skip


def test_a_target_that_nobody_reaches_is_drawn_without_bars(runs: Path) -> None:
    collection = collect([runs])
    (chart,) = describe(collection, summarize(collection, target=0.99)).network
    drawn = figures.figure(chart, chart.x[0])
    drawn.draw_without_rendering()
    shown = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert shown == ["dense (not reached)", "sparse (not reached)"]


def test_markdown_is_two_tables(runs: Path) -> None:
    collection = collect([runs])
    text = markdown(collection, summarize(collection, 0.75))
    lines = text.partition("\n## ")[0].splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4
    assert len({line.count("|") for line in table}) == 1
    assert table[2].startswith("| dense | 85.50% (76.00 … 95.00) |")
    assert table[2].endswith("| 2 | fedavg | identity |")
    assert "72.0 kB (mean round 9)" in table[2]
    assert "not reached" in table[3]
    assert "Target: 75.00% (as given)." in "\n".join(lines)
    assert "## Time to 75.00% on a network (last models)" in text
    # Ten rounds of 0.5 s; 2000 bytes of a client down and up take almost no time compared with latency.
    assert "| dense | 4.59 s (latency 99%) |" in text
    assert "on all these networks, so fewer bytes hardly shorten a round" in text


def test_what_all_methods_share_stands_above_the_table(tmp_path: Path) -> None:
    write_run(tmp_path / "1", rising(0.5), label="a", server="fedams", uplink="sign")
    write_run(tmp_path / "2", rising(0.5), label="b", server="fedams", uplink="topk(ratio=1/4)")
    collection = collect([tmp_path])
    assert "| Seeds | Uplink |\n" in markdown(collection, summarize(collection))
    text = page(collection, summarize(collection))
    assert "<dt>Server</dt>" in text
    assert "<dt>Downlink</dt>" in text
    assert "<dt>Uplink</dt>" not in text


def test_a_recipe_is_named_whatever_its_average(tmp_path: Path) -> None:
    for name in RECIPES:
        settings = merged({"recipe": name, "average": "ema(0.9)"})
        write_run(tmp_path / name, rising(0.5), label=f"by {name}", **settings)
    write_run(tmp_path / "up", rising(0.5), label="no recipe", uplink=RECIPES["lighter"].fields["uplink"])
    collection = collect([tmp_path])
    rows = summarize(collection).rows
    assert {row.label: row.recipe for row in rows} == {**{f"by {name}": name for name in RECIPES}, "no recipe": None}
    assert "| by lighter (recipe lighter) |" in markdown(collection, summarize(collection))


def test_rounds_are_whole_numbers(tmp_path: Path) -> None:
    for seed, steps in enumerate((3, 4), 1):
        write_run(tmp_path / f"{seed}", [0.1] * steps + [0.9] * (9 - steps), seed=seed, label="two")
    write_run(tmp_path / "one", [0.1] * 2 + [0.9] * 7, label="one", server="fedavg")
    text = markdown(collect([tmp_path]), summarize(collect([tmp_path]), 0.5))
    assert "(mean round 4)" in text, "of 4 and 5"
    assert "(round 3)" in text


def test_a_method_without_feedback_is_reported_as_such(tmp_path: Path) -> None:
    write_run(tmp_path / "1", rising(0.5), label="a", uplink="sign", feedback=False)
    assert "| 1 | fedams | sign, no feedback |\n" in markdown(collect([tmp_path]), summarize(collect([tmp_path])))
    write_run(tmp_path / "2", rising(0.5), label="b", uplink="sign", feedback=False, server="fedavg")
    text = page(collect([tmp_path]), summarize(collect([tmp_path])))
    assert ">sign, no feedback</dd>" in text


def test_labels_are_text_and_never_code(tmp_path: Path) -> None:
    label = '</script><img src=x onerror=alert(1)> | $x$ & "q"'
    collection = collect([write_run(tmp_path / "run", rising(0.5), label=label)])
    summary = summarize(collection)
    text = page(collection, summary).replace("<wbr>", "")
    assert "<img" not in text
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt; | $x$ &amp; &quot;q&quot;" in text
    row = markdown(collection, summary).splitlines()[4]
    assert '&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt; \\| $x$ &amp; "q"' in row


@pytest.mark.parametrize("label", ["_hidden", "$half", "a$b$c", "naïve ε"])
def test_any_label_can_be_printed(label: str, tmp_path: Path) -> None:
    collection = collect([write_run(tmp_path / "run", rising(0.5), label=label)])
    chart = describe(collection, summarize(collection)).accuracy[0]
    figure = figures.figure(chart, ROUNDS)
    figure.savefig(tmp_path / "figure.svg")
    assert [text.get_text().strip().replace("\\", "") for text in figure.legends[0].get_texts()] == [label]


def drawn(chart: Chart, axis: Axis) -> list[tuple[list[float], list[float]]]:
    """x and y of every line or marker of a printed figure."""
    axes = figures.figure(chart, axis).axes[0]
    shown = [line for line in axes.lines if len(line.get_xdata()) and line.get_marker() != "_"]
    return [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in shown]


def test_the_page_and_the_figures_draw_the_same_numbers(two_way_report: Path) -> None:
    collection = collect([two_way_report.parent / "runs"])
    charts = describe(collection, summarize(collection))
    assert charts.accuracy
    assert charts.losses
    assert charts.partitions
    for chart in (*charts.accuracy, *charts.losses, *charts.compression, charts.communication[0]):
        lists = plotly.Lists()
        page_figure = plotly.figure(chart, lists)
        named = [trace for trace in page_figure["data"] if "name" in trace]
        assert [trace["name"] for trace in named] == [series.name for series in chart.series]
        for axis in chart.x:
            indices = page_figure["x"].get(axis.key, [])
            places = [json.loads(lists.texts[i]) for i in indices] or [trace["x"] for trace in named]
            for (x, y), place, trace in zip(drawn(chart, axis), places, named, strict=True):
                assert x == pytest.approx(place, rel=1e-4)
                shown = json.loads(lists.texts[trace["y"]]) if indices else trace["y"]
                assert y == pytest.approx(shown, rel=1e-4)
    stacks, (bars,) = charts.communication[1], charts.network
    for chart, size in ((stacks, "get_width"), (bars, "get_height")):
        printed = [getattr(bar, size)() for bar in figures.figure(chart, chart.x[0]).axes[0].patches]
        traces = plotly.figure(chart, plotly.Lists())["data"]
        values = [value for trace in traces for value in trace["x" if chart is stacks else "y"]]
        assert printed == pytest.approx([np.nan if v is None else v for v in values], rel=1e-4, nan_ok=True)


def test_equal_runs_make_equal_reports(two_way_report: Path, tmp_path: Path) -> None:
    again = report([two_way_report.parent / "runs"], tmp_path, target=0.75).parent
    for path in again.iterdir():
        assert path.read_bytes() == (two_way_report / path.name).read_bytes(), path.name


def test_runs_that_were_never_evaluated_still_render(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [None] * 3, rounds=9, seconds=None)
    (run / "partition.json").unlink()
    (run / "environment.json").unlink()
    index = report([run], tmp_path / "out", figures=True)
    assert "Unfinished: run, seed 1: 3 of 9 rounds" in index.read_text("utf-8")
    assert {path.stem.split("-")[0] for path in (tmp_path / "out" / "figures").iterdir()} == {"train_loss"}
    assert "no accuracy to compare" in (tmp_path / "out" / "summary.md").read_text("utf-8")


def test_a_target_for_runs_that_were_never_evaluated_is_no_target(tmp_path: Path) -> None:
    collection = collect([write_run(tmp_path / "run", [None] * 3)])
    assert "no accuracy to compare" in page(collection, summarize(collection, target=0.9))


def test_environments_of_later_sittings_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rising(0.5))
    (run / "environment.json").write_text(json.dumps({"torch": "2.13.0", "resumed": [{"round": 5, "torch": "2.14.0"}]}))
    collection = collect([run])
    assert "torch 2.13.0, 2.14.0" in page(collection, summarize(collection))


# -- errors ------------------------------------------------------------------------------------------------------------


def refused(paths: list[Path]) -> str:
    with pytest.raises(RunError) as caught:
        collect(paths)
    return str(caught.value)


def test_paths_without_runs_are_refused(tmp_path: Path) -> None:
    assert "no path was given" in refused([])
    assert f"{tmp_path / 'nowhere'} is not a folder" in refused([tmp_path / "nowhere"])
    assert f"no run under {tmp_path}" in refused([tmp_path])


def test_a_run_without_rounds_is_refused_by_name_and_noted_among_others(runs: Path) -> None:
    empty = write_run(runs / "c", [0.1], label="new")
    (empty / "rounds.jsonl").unlink()
    assert f"{empty}: no round is recorded" in refused([empty])
    collection = collect([runs])
    assert collection.empty == [empty]
    assert f"Left out, no round recorded yet: {empty}" in page(collection, summarize(collection))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rounds.jsonl", "{\n", "rounds.jsonl: damaged"),
        ("rounds.jsonl", '{"round": 1}\n', "damaged"),
        ("rounds.jsonl", "3\n", "damaged"),
        ("rounds.jsonl", '{"round": 1\n"cohort": []}\n', "rounds.jsonl: damaged"),  # whole only if joined
        ("experiment.toml", "=", "damaged"),
        ("experiment.toml", "", "experiment.toml has no label, task, model"),  # never a run with all defaults
        ("experiment.toml", 'server = "nothing"', "if it is your own, load it with fedcams --import MODULE"),
        ("timings.jsonl", "3\n", "a timing is not an object"),
        ("timings.jsonl", '{"round": 1, "seconds": Infinity}\n', "seconds are not finite"),
        ("timings.jsonl", '{"round": 1, "seconds": 1.0, "phases": {"evaluate": null}}\n', "damaged"),
        ("partition.json", '{"histogram": [[1, 2], [3]]}', "damaged"),
        ("partition.json", '{"histogram": [1, 2]}', "not a table"),
        ("environment.json", "[", "environment.json: damaged"),
        ("environment.json", '{"resumed": 3}', "damaged"),
        ("environment.json", '{"resumed": [3]}', "damaged"),
        ("environment.json", '{"a":' * 100_000, "environment.json: damaged"),
        ("rounds.jsonl", '{"round": 1, "cohort": [], "\\u001b[2J": 1}\n', "is no name of a probe"),
        ("timings.jsonl", "[" * 100_000 + "\n", "timings.jsonl: damaged"),
        ("experiment.toml", "label = " + "[" * 10_000, "not a TOML file"),
        ("experiment.toml", "rounds = " + "9" * 10_000, "not a TOML file"),
    ],
)
def test_damage_is_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rising(0.5))
    (run / name).write_text(content)
    said = refused([run])
    assert message in said
    assert str(run) in said


@pytest.mark.parametrize("value", ["5", "NaN"])
def test_bytes_down_have_all_their_parts_or_none(tmp_path: Path, value: str) -> None:
    run = write_run(tmp_path / "run", rising(0.5))
    lines = (run / "rounds.jsonl").read_text()
    assert '"wire_down_dense": null' in lines
    (run / "rounds.jsonl").write_text(lines.replace('"wire_down_dense": null', f'"wire_down_dense": {value}', 1))
    assert "wire_down_deltas, wire_down_catchup, wire_down_dense are (" in refused([run])


def test_half_a_character_in_a_file_can_be_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rising(0.5))
    (run / "environment.json").write_text('{"device": "\\ud800"}')
    assert "device \\ud800" in report([run], tmp_path / "report").read_text()


def test_a_file_of_the_users_is_not_called_a_damaged_run(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text("cohort = 5\n")
    said = refused([tmp_path])
    assert "experiment.toml describes no run" in said
    assert "delete" not in said


def test_records_must_be_numbers_in_order(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rising(0.5))
    lines = (run / "rounds.jsonl").read_text()
    (run / "rounds.jsonl").write_text(lines + lines)
    assert "not in ascending order" in refused([run])
    first, _, *rest = lines.splitlines(keepends=True)
    (run / "rounds.jsonl").write_text("".join([first, *rest]))  # bytes of the lost round would be missing in sums
    assert "without gaps" in refused([run])
    (run / "rounds.jsonl").write_text(lines.replace('"wire_up": 1000', '"wire_up": "x"'))
    assert "something other than numbers and a cohort" in refused([run])
    (run / "rounds.jsonl").write_text(lines.replace('"wire_up": 1000', f'"wire_up": {10**400}'))
    assert "damaged (int too large to convert to float)" in refused([run])
    for value in ("null", "NaN", "Infinity"):
        (run / "rounds.jsonl").write_text(lines.replace('"wire_up": 1000', f'"wire_up": {value}'))
        assert "wire_up is missing or not finite" in refused([run])


def test_a_folder_that_cannot_be_written_is_named(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match=r"cannot write to .*/file: File exists; free space, or name a folder"):
        report([runs], tmp_path / "file")


def test_a_target_above_one_is_a_percentage_of_an_accuracy(runs: Path) -> None:
    share, percentage = (summarize(collect([runs]), target) for target in (0.75, 75))
    assert percentage == share
    assert percentage.rows[0].rounds_to_target == 9


def test_a_target_above_one_is_a_score_where_scores_are(tmp_path: Path) -> None:
    summary = summarize(collect([write_run(tmp_path / "run", rising(10.0))]), 4.5)
    assert summary.target == 4.5
    assert summary.rows[0].rounds_to_target == 5


def test_a_target_must_be_a_number(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="target=nan is not a finite number"):
        report([runs], tmp_path / "out", target=float("nan"))
    for target in (-0.1, 950):
        with pytest.raises(ReportError, match=f"target={target}, but every accuracy is from 0 to 1; give one such as"):
            report([runs], tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_there_are_no_figures_but_a_page(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ExtraMissing, match=r"a figure needs matplotlib .*; pip install 'fedcams\[report\]'"):
        report([runs], tmp_path / "out", figures=True)
    assert not (tmp_path / "out").exists()
    assert report([runs], tmp_path / "out").exists()


# -- labels and reasons of others --------------------------------------------------------------------------------------

EVIL = ["=1+1", "+1", "-1", "@SUM(A1)", "a | b | c", "<script>alert(1)</script>", "[x](http://y)"]


@pytest.mark.parametrize("label", EVIL)
def test_labels_stay_labels_in_tables(tmp_path: Path, label: str) -> None:
    """No spreadsheet runs them as a formula, and no Markdown reader as a cell, a link or a tag."""
    write_run(tmp_path / "run", rising(0.5, 3), label=label)
    collection = collect([tmp_path / "run"])
    write_rounds_csv(tmp_path / "rounds.csv", collection)
    with (tmp_path / "rounds.csv").open(encoding="utf-8", newline="") as file:
        cells = {row[0] for row in list(csv.reader(file))[1:]}
    assert cells == {f"'{label}" if label[0] in "=+-@" else label}
    lines = markdown(collection, summarize(collection)).splitlines()
    rows = [line for line in lines if line.startswith("|")][:3]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert not any("<script" in line or re.search(r"(?<!\\)\]\(", line) for line in lines)


def test_refusals_are_shown_with_a_reason(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rising(0.5, 3), label="guarded")
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line["refused"] = {"1": "UpdateError: an update of norm 1e3 <b>\x1b[2J"}
    (folder / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    collection = collect([folder])
    cohorts = sum(len(line["cohort"]) for line in lines)
    said = (
        f"guarded, seed 1: 2 of {cohorts} updates were refused, from 1 client; the last from client 1 in round 3: Upd"
    )
    assert collection.methods[0].refusals[0].startswith(said)
    assert "Refused: guarded" in notes(collection)
    assert "1e3 <b>" not in notes(collection)
    assert "- Refused: guarded" in (shown := markdown(collection, summarize(collection)))
    assert "\x1b" not in shown, "it would command a terminal"
