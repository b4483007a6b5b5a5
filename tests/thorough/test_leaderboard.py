"""The leaderboard: its page and pictures match its entries, and its entries match their runs."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedcams import SpecError
from fedcams.report import collect
from leaderboard.entry import ENTRIES, ROOT, Entry, add, read_entries, slug
from leaderboard.page import DOCS, FOLDER, PAGE, groups, is_current, page, write
from test_report import rising, write_run

STALE = "is stale: run `make leaderboard`"


# -- what is in the repository -----------------------------------------------------------------------------------------


def test_the_page_and_its_pictures_are_those_of_the_entries() -> None:
    entries = read_entries(ENTRIES)
    assert (DOCS / PAGE).read_text("utf-8") == page(entries), f"docs/leaderboard.md {STALE}"
    found = groups(entries)
    assert {path.stem for path in (DOCS / FOLDER).iterdir()} == found.keys()
    for name, group in found.items():
        assert is_current(DOCS / FOLDER / f"{name}.png", group), f"{name}.png {STALE}"


def test_entries_are_those_of_the_runs_that_they_name() -> None:
    entries = read_entries(ENTRIES)
    published = {entry.source for entry in entries if entry.source.startswith("results/")}
    assert published
    for source in published:
        made = {entry.label: entry for entry in (Entry.of(m, None, None) for m in collect([ROOT / source]).methods)}
        for entry in entries:
            if entry.source == source:
                assert entry == made[entry.label]


def test_files_are_named_after_their_entries() -> None:
    for path in ENTRIES.rglob("*.toml"):
        entry = Entry.read(path)
        assert path.stem == slug(entry.label)
        assert path.parent.name.startswith(entry.group)


def test_the_demo_is_shown_as_it_is_recorded() -> None:
    with (DOCS / "demo" / "summary.csv").open(encoding="utf-8") as file:
        sent = {row["label"]: round(float(row["bytes_total"])) for row in csv.DictReader(file)}
    entries = [entry for entry in read_entries(ENTRIES) if entry.source == "fedcams run demo"]
    assert {entry.label: entry.total for entry in entries} == {
        key: pytest.approx(size, abs=1) for key, size in sent.items()
    }


# -- any runs ----------------------------------------------------------------------------------------------------------


def averaged(folder: Path, seed: int, top: float) -> None:
    keys = {"label": "FedCAMS own", "uplink": "sign", "average": "ema(0.5)", "seed": seed}
    run = write_run(folder, rising(top), up=100, down=400, **keys)
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    (run / "rounds.jsonl").write_text("".join(f"{json.dumps({**line, 'averaged_accuracy': 0.9})}\n" for line in lines))


def test_an_entry_is_the_mean_over_seeds_and_reads_back(tmp_path: Path) -> None:
    averaged(tmp_path / "runs" / "1", 1, 0.8)
    averaged(tmp_path / "runs" / "2", 2, 1.0)
    (path,) = add([tmp_path / "runs"], tmp_path / "entries", source="https://example.org/runs")
    assert path.relative_to(tmp_path / "entries") == Path("digits-mlp-iid/fedcams-own.toml")
    entry = Entry.read(path)
    assert (entry.bytes_up, entry.bytes_down, entry.total, entry.seeds) == (1000, 4000, 5000, [1, 2])
    assert (entry.accuracy, entry.averaged) == (85.5, 90.0), "the last two of ten rounds; the averaged model at the end"
    assert entry.method == {"uplink": "sign", "average": "ema(decay=0.5)"}
    assert (entry.setting["sampler"], entry.setting["rounds"]) == ("uniform(n=2)", 10)
    assert not entry.dense


def test_an_entry_keeps_every_character(tmp_path: Path) -> None:
    entry = replace(read_entries(ENTRIES)[0], label="Ünïcode 😀", method={"server": 'own(name="é 😀")'})
    (tmp_path / "own.toml").write_text(entry.to_toml(), "utf-8")
    assert Entry.read(tmp_path / "own.toml") == entry


def test_a_mean_halfway_between_two_hundredths_is_the_one_on_other_pages(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "1", [0.5] * 8 + [0.8907, 0.9118], label="FedAvg")
    (path,) = add([tmp_path / "runs"], tmp_path / "entries")
    assert f"{Entry.read(path).accuracy:.2f}" == f"{90.125:.2f}"


def test_a_page_compares_with_dense_messages(tmp_path: Path) -> None:
    averaged(tmp_path / "runs" / "1", 1, 0.8)
    write_run(tmp_path / "runs" / "2", rising(0.9), up=4000, down=4000, label="FedAMS")
    add([tmp_path / "runs"], tmp_path / "entries")
    write(tmp_path / "entries", tmp_path / "docs")
    text = (tmp_path / "docs" / PAGE).read_text("utf-8")
    first, second = (line for line in text.splitlines() if line.startswith("| Fed"))
    assert first.startswith("| FedAMS | 85.50 |  | 1.0x | 80.0 kB | 40.0 kB | 40.0 kB | 1 | `fedams` | `identity` | ")
    assert "| 76.00 | 90.00 | 16.0x | 5.00 kB | 1.00 kB | 4.00 kB | 1 |" in second
    (picture,) = (tmp_path / "docs" / FOLDER).iterdir()
    before = picture.stat().st_mtime_ns
    write(tmp_path / "entries", tmp_path / "docs")
    assert picture.stat().st_mtime_ns == before, "a picture that is current is not drawn again"


def test_text_of_an_entry_is_text_and_never_markup() -> None:
    evil = "`<script>alert(1)</script>`|[x](javascript:1)\n# Own"
    entry = read_entries(ENTRIES)[0]
    values = dict.fromkeys(("label", "source", "device", "versions"), evil)
    shown = page([replace(entry, **values, setting=dict.fromkeys(entry.setting, evil), method={"uplink": evil})])
    text = re.sub(r"`[^`\n]*`", "", re.sub(r"\\.", "", shown))  # without escaped characters, and without code
    assert "<script>" not in text
    assert "[x](" not in text
    assert not any(line.startswith("# Own") for line in shown.splitlines())


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "short" / "1", [0.5, 0.6], rounds=3)
    with pytest.raises(SpecError, match=r"run: .*short/1 is not finished; run it to its end"):
        add([tmp_path / "short"], tmp_path / "entries")
    (tmp_path / "short" / "1" / "stopped.json").write_text('{"round": 2}')
    with pytest.raises(SpecError, match="is not finished"):
        add([tmp_path / "short"], tmp_path / "entries")
    for name in ("1", "2"):
        write_run(tmp_path / "twice" / name, [0.5, 0.6])
    with pytest.raises(SpecError, match="run: several runs have seed 1; name only one of them"):
        add([tmp_path / "twice"], tmp_path / "entries")
    write_run(tmp_path / "blind" / "1", [None, None])
    with pytest.raises(SpecError, match="nothing was evaluated"):
        add([tmp_path / "blind"], tmp_path / "entries")
    for label in ("a", "b"):
        write_run(tmp_path / "two" / label, [0.5], label=label, uplink="sign" if label == "a" else "identity")
    with pytest.raises(SpecError, match=r"--label mine: these runs are 2 methods \(a, b\); add them one by one"):
        add([tmp_path / "two"], tmp_path / "entries", label="mine")
    (tmp_path / "odd.toml").write_text('label = "x"\n')
    with pytest.raises(SpecError, match=r"odd.toml: missing or unknown: accuracy, bytes_down"):
        Entry.read(tmp_path / "odd.toml")


def test_other_settings_have_folders_tables_and_pictures_of_their_own(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"rounds": 5}, {"train_fraction": 0.5}]
    for number, change in enumerate(changes):
        write_run(tmp_path / "runs" / str(number), rising(0.8)[: change.get("rounds", 10)], label="FedAMS", **change)
        add([tmp_path / "runs" / str(number)], tmp_path / "entries")
    places = {path.parent.name: Entry.read(path).setting for path in (tmp_path / "entries").rglob("*.toml")}
    assert [(places[f"digits-mlp-iid{end}"]["rounds"]) for end in ("", "-2", "-3")] == [10, 5, 10]
    assert places["digits-mlp-iid-3"]["train_fraction"] == "1/2"
    write(tmp_path / "entries", tmp_path / "docs")
    text = (tmp_path / "docs" / PAGE).read_text("utf-8")
    assert text.count("| FedAMS |") == text.count("rounds, 4 clients") == 3
    assert "4 clients that each train on 1/2 of their data" in text
    assert len(list((tmp_path / "docs" / FOLDER).iterdir())) == 3


def test_no_entry_takes_the_file_of_another(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "1", rising(0.8))
    for _ in range(2):
        add([tmp_path / "runs"], tmp_path / "entries", label="top k")
    with pytest.raises(SpecError, match=r"label 'top/k': top-k.toml is the file of 'top k'; give another one"):
        add([tmp_path / "runs"], tmp_path / "entries", label="top/k")
    with pytest.raises(SpecError, match="give --label with letters a-z or digits"):
        add([tmp_path / "runs"], tmp_path / "entries", label="日本")


@pytest.mark.parametrize(
    ("line", "instead", "told"),
    [
        ("accuracy = ", 'accuracy = "high" #', "accuracy = 'high'; write it with"),
        ("averaged = ", "averaged = nan #", "averaged = nan"),
        ("bytes_up = ", "bytes_up = 0 #", "bytes_up = 0"),
        ("seeds = ", "seeds = 3 #", "seeds = 3"),
        ("device = ", "device = 3 #", "device = 3"),
        ("rounds = ", "roundz = ", "missing or unknown: setting.rounds, setting.roundz"),
        ("[setting]", "setting = 3\n[method.setting]", "setting = 3"),
    ],
)
def test_a_damaged_entry_is_refused(tmp_path: Path, line: str, instead: str, told: str) -> None:
    averaged(tmp_path / "runs" / "1", 1, 0.8)
    (path,) = add([tmp_path / "runs"], tmp_path / "entries")
    path.write_text(path.read_text().replace(line, instead, 1))
    with pytest.raises(SpecError, match=f"fedcams-own.toml: {told}"):
        Entry.read(path)
