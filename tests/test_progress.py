"""Progress on a terminal and in a file: which run, how far it is, and how long all runs will take."""

from __future__ import annotations

from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from fedcams.cli.progress import Forecast, Progress, Row, duration, losses, results
from fedcams.experiment import Experiment
from fedcams.runs import Run
from fedcams.simulation import RoundRecord


def record(round: int, **more: Any) -> RoundRecord:
    rest: dict[str, Any] = dict.fromkeys(RoundRecord.__dataclass_fields__, 0)
    return RoundRecord(**rest | {"round": round, "train_loss": None, "wire_up": 1500} | more)


def run(name: str, rounds: int) -> Run:
    return Run(Path(name), Experiment(label=f"{name} [b]", rounds=rounds), [], [], {}, [])


def shown(rounds: int, terminal: bool, **more: Any) -> str:
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, width=150, color_system=None)
    with Progress(console, **more).follow(run("a", rounds)) as watch:
        for round in range(1, rounds + 1):
            watch(record(round), {"seconds": 2.0})
    return out.getvalue()


def test_a_terminal_sees_a_bar() -> None:
    output = shown(rounds=25, terminal=True)
    assert "a [b], seed 1 ━" in output
    assert "25/25 accuracy 0.0000, 1.5 kB up, 0 bytes down" in output


def test_others_see_a_line_now_and_then() -> None:
    lines = shown(rounds=25, terminal=False).splitlines()
    assert [line.partition(",")[0] + line.partition(":")[2][:14] for line in lines] == [
        "a [b] round 10/25, ",
        "a [b] round 20/25, ",
        "a [b] round 25/25, ",
    ]
    assert lines[0].endswith("accuracy 0.0000, 1.5 kB up, 0 bytes down, 2.00 s per round, 0:00:30 left")


def test_refused_updates_are_counted_at_once() -> None:
    said = record(3, train_loss=0.5, cohort=(1, 2, 3), refused={"2": "too long"})
    assert losses(said) == ["1 of 3 refused", "loss 0.5000", "accuracy 0.0000"]


def test_quiet_shows_nothing() -> None:
    assert shown(rounds=25, terminal=True, quiet=True) == shown(rounds=25, terminal=False, quiet=True) == ""


def test_results_show_labels_and_folders_unchanged() -> None:
    out, experiment = StringIO(), Experiment(label="[mine] [/b]")
    done = [Run(Path(folder) / "a", experiment, [record(1)], [], {}, []) for folder in ("one [b]", "two [i]")]
    Console(file=out, width=150).print(*results(done))
    assert all(f"  {name} " in out.getvalue() for name in ("one [b]", "two [i]", "[mine] [/b]"))


def test_runs_at_once_have_a_line_each_with_their_place_among_all() -> None:
    out = StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    progress = Progress(console, {Path("a"): 10, Path("b"): 20, Path("c"): 10}, jobs=2)
    with ExitStack() as stack:
        first = stack.enter_context(progress.follow(run("a", 10)))
        second = stack.enter_context(progress.follow(run("b", 20)))
        first(record(4), {"seconds": 1.0})
        second(record(5), {"seconds": 3.0})
        picture = StringIO()
        Console(file=picture, width=120).print(progress._picture())
    first_line, second_line = picture.getvalue().splitlines()
    assert first_line.startswith("1/3 a [b], seed 1 ")
    assert " 4/10 accuracy 0.0000, 1.5 kB up, 0 bytes down, 0:" in first_line
    assert second_line.startswith("2/3 b [b], seed 1 ")
    longest = 15 * 3.0  # more than half of all: 6·1 + 15·3 + 10·2, those of c at the mean pace
    assert second_line.rstrip().endswith(f" {duration(longest)} left in all")


@pytest.mark.parametrize("label", ["13/24 FedCAMS top-k 1/64, seed 1", "1/2 " + "学" * 30, "x" * 200])
def test_a_line_never_wraps_and_always_tells_the_round(label: str) -> None:
    row = Row(label, 500, record(45, train_loss=0.5, wire_down=123456), "1:23:45 left in all")
    for width in [*range(20, 130), 300]:
        out = StringIO()
        Console(file=out, width=width, force_terminal=True, color_system=None).print(row)
        (line,) = out.getvalue().splitlines()
        assert cell_len(line) <= width
        assert " 45/500" in line


@pytest.mark.parametrize("name", ["FedCAMS top-k 1/64, seed 1", "FedCAMS top-k 1/64 with a slower server, seed 1"])
def test_eighty_columns_have_room_for_place_name_accuracy_and_time(name: str) -> None:
    row = Row(f"13/24 {name}", 60, record(45, train_loss=0.5), "0:31 left in all")
    out = StringIO()
    Console(file=out, width=80).print(row)
    line = out.getvalue().strip()
    assert line.startswith(f"13/24 {name} " if len(name) < 30 else f"13/24 {name[:25]}… ")
    assert line.endswith(" 45/60 accuracy 0.0000, 0:31 left in all")


def test_a_forecast_shares_the_work_and_waits_for_the_longest_run() -> None:
    a, b, c = map(Path, "abc")
    forecast = Forecast({a: 10, b: 10, c: 10}, jobs=2)
    assert forecast.in_all() == 0, "nothing is known yet"
    forecast.begin(a, 8)  # two rounds were there
    forecast.count(a, 7, {"seconds": 4.0})
    assert forecast.of(a) == 28
    assert forecast.in_all() == (28 + 40 + 40) / 2
    forecast.end(a)
    forecast.end(c)
    assert forecast.in_all() == 40, "one run cannot be shared"
    assert forecast.place(b) == "2/3"


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0, 31.4, 725, 10800, 90000)] == [
        "0:00",
        "0:31",
        "12:05",
        "3:00:00",
        "1 day, 1:00:00",
    ]
