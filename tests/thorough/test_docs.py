"""The documentation: its examples run, its bytes are real, and its tables come from the code."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedcams import ErrorFeedback, Layout, RowStore, decode, encode
from forks import Forks
from together import together

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date() -> None:
    written = (DOCS / "reference.md").read_text()
    assert written == load(DOCS / "make_reference.py").reference(), "docs/reference.md is stale: run `make docs`"


def test_the_readmes_results_are_those_of_the_reproduction() -> None:
    section = (ROOT / "README.md").read_text("utf-8").split("ResNet-18 on CIFAR-10")[1].split("\n## ")[0]
    numbers = re.findall(r"\b\d+\.\d+(?:x|%)", section)
    assert len(numbers) == 16
    made = (DOCS / "reproduction.md").read_text("utf-8")
    cells = set(re.findall(r"(?<=\| )[\d.]+x?(?= \|| \()", made))  # alone, or before the range of its seeds
    assert [number for number in numbers if number.removesuffix("%") not in cells] == []


def bytes_in_hex(heading: str) -> bytes:
    """The bytes that the wire format's page shows under this heading."""
    block = (DOCS / "wire-format.md").read_text().split(f"## {heading}")[1].split("```text")[1].split("```")[0]
    return bytes.fromhex("".join(re.findall(r"^(?:[0-9a-f]{2} )+", block, re.MULTILINE)))


def test_the_payloads_in_hex_are_those_that_encode_writes() -> None:
    x = torch.zeros(20)
    x[3], x[16] = -1.5, 2.0
    assert encode("topk(k=2)", x) == bytes_in_hex("One payload in hex")
    assert torch.equal(decode(bytes_in_hex("One payload in hex")), x)
    layout, x[4], x[5] = Layout(tuple("abc"), ((1, 2, 3), (4,), (10,))), -1.5, 1.5
    signs = bytes_in_hex("A payload of signs and magnitudes in hex")
    assert encode("ternary(k=4)", x, layout) == signs
    assert torch.equal(decode(signs, layout), x)


def test_error_feedback_is_what_its_page_says() -> None:
    table = (DOCS / "explanation" / "error-feedback.md").read_text("utf-8")
    turns = [re.findall(r"\(([^)]*)\)", line) for line in table.splitlines() if re.match(r"\| \d", line)]
    assert len(turns) == 2
    store = RowStore.in_memory({"residual": Layout.flat(3)})
    uplink = ErrorFeedback("topk(k=1)", store)
    for turn, columns in enumerate(turns, 1):
        update, whole, sent, kept = (torch.tensor([[float(x) for x in column.split(",")]]) for column in columns)
        torch.testing.assert_close(update + store.gather("residual", [0]), whole)
        uplink.commit(uplink.prepare_([0], update, round=turn))
        torch.testing.assert_close(store.gather("residual", [0]), kept)
        torch.testing.assert_close(sent + kept, whole)


def test_the_guide_shows_the_example_file() -> None:
    guide = (DOCS / "adding-a-compressor.md").read_text()
    assert f"```python\n{(ROOT / 'examples' / 'blockmax.py').read_text()}```" in guide


def test_the_example_compressor_keeps_every_contract(forks: Forks) -> None:
    """The command of the guide, in a separate process so that the example stays out of this one's registry."""
    script = "import pytest, sys; sys.path.insert(0, 'examples'); sys.exit(pytest.main(sys.argv[1:]))"
    command = ["-q", "-p", "blockmax", "tests/test_contracts.py", "-k", "blockmax"]
    done = forks.run(script, *command, cwd=ROOT)
    assert done.code == 0, done.output + done.errors
    passed = re.search(r"(\d+) passed", done.output)
    assert passed
    assert int(passed[1]) > 20, "every contract, each in all its dimensions"


def test_the_page_on_speed_shows_the_recorded_numbers() -> None:
    for name in ("core.md", "rounds.md"):
        assert (ROOT / "benchmarks" / "records" / name).read_text() in (DOCS / "speed.md").read_text()


def test_the_page_on_deploying_shows_the_recorded_numbers() -> None:
    for name in ("flower.md", "flower-wire.md", "small-models.md"):
        assert (ROOT / "benchmarks" / "records" / name).read_text() in (DOCS / "deploying.md").read_text()


def test_the_page_on_privacy_shows_the_recorded_numbers() -> None:
    """And no run of them spent more than it was allowed to."""
    assert (DOCS / "privacy" / "accuracy.md").read_text("utf-8") in (DOCS / "privacy.md").read_text("utf-8")
    noise = ROOT / "benchmarks" / "records" / "client-noise.md"
    assert noise.read_text("utf-8") in (DOCS / "privacy.md").read_text("utf-8")
    rows = list(csv.DictReader((DOCS / "privacy" / "accuracy.csv").read_text("utf-8").splitlines()))
    assert {row["epsilon"] for row in rows} == {"1", "2", "4", "8", "none"}
    assert all(float(row["spent"]) <= float(row["epsilon"]) for row in rows if row["epsilon"] != "none")


def test_what_the_wire_promises_is_what_was_recorded() -> None:
    """Four nodes, five rounds, a model of 1.5 million parameters: 26 times fewer bytes up with sign, 40 with top-k, and
    40 times fewer both ways with the recipe."""
    record = json.loads((ROOT / "benchmarks" / "records" / "flower-wire.json").read_text())
    assert (record["nodes"], record["rounds"]) == (4, 5)
    assert record["d"] >= 1_500_000
    up, down = (
        {
            method: sum(pair[way] for counts in measured["bytes"] for pair in counts)
            for method, measured in record["methods"].items()
        }
        for way in (0, 1)
    )
    dense, recipe = "uplink=identity", "recipe=lighter"
    assert up[dense] >= 26 * up["uplink=sign"]
    assert up[dense] >= 40 * up["uplink=topk(ratio=1/64, values=bf16)"]
    assert up[dense] + down[dense] >= 40 * (up[recipe] + down[recipe])


def test_the_readmes_headline_is_that_of_the_demo() -> None:
    readme = (ROOT / "README.md").read_text()
    with (DOCS / "demo" / "summary.csv").open() as file:
        for row in csv.DictReader(file):
            sent = [_short(float(row[key])) for key in ("bytes_up", "bytes_down", "averaged_bytes_to_target")]
            scores = [f"{100 * float(row[key]):.1f}%" for key in ("averaged_accuracy", "final_accuracy")]
            assert f"| {' | '.join([row['label'], *scores, *sent])} |" in readme
            assert f"| bytes to {100 * float(row['target']):.1f}% |" in readme


def test_the_demos_recipe_reaches_the_target_with_far_fewer_bytes() -> None:
    """Both with averaged models; and sooner wherever the link and not its latency decides."""
    with (DOCS / "demo" / "summary.csv").open() as file:
        needed = {row["label"]: float(row["averaged_bytes_to_target"]) for row in csv.DictReader(file)}
    fewer = needed["FedAMS"] / needed["FedCAMS lighter"]
    assert fewer >= 25
    assert f"with {fewer:.0f} times fewer bytes, up and down," in " ".join((ROOT / "README.md").read_text().split())


def _short(size: float) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


@pytest.mark.parametrize(("name", "base"), [("digits", "FedCAMS sign"), ("digits-full", "FedAMS")])
def test_the_page_on_two_way_compression_shows_the_recorded_numbers(name: str, base: str) -> None:
    page = (DOCS / "two-way.md").read_text("utf-8")
    rows = recorded(name)
    shown = []
    for label, row in rows.items():
        fewer = float(rows[base]["bytes_total"]) / float(row["bytes_total"])
        sizes = (_megabytes(float(row[key])) for key in ("bytes_up", "bytes_down", "bytes_total"))
        accuracy = f"{100 * float(row['final_accuracy']):.2f}%"
        shown.append(" | ".join([label, f"`{row['downlink']}`", accuracy, *sizes, f"{fewer:.1f}x"]))
        assert row["seeds"] == "1 2 3"
    tables = [block.splitlines()[2:] for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)]
    assert any(sorted(table) == sorted(f"| {line} |" for line in shown) for table in tables), "\n".join(shown)


def recorded(name: str) -> dict[str, dict[str, str]]:
    with (DOCS / "two-way" / f"{name}.csv").open(encoding="utf-8") as file:
        return {row["label"]: row for row in csv.DictReader(file)}


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f}" if size >= 1e9 else f"{size / 1e6:.1f}"


def test_what_two_way_compression_promises_is_what_was_recorded() -> None:
    """Five times fewer bytes than compressed updates alone, at most 0.7 points lost; 30 times with all clients."""
    some, everybody = recorded("digits"), recorded("digits-full")
    sign, two_way = some["FedCAMS sign"], some["FedCAMS sign, replica 2 bits"]
    assert float(sign["bytes_total"]) >= 5 * float(two_way["bytes_total"])
    assert float(sign["final_accuracy"]) - float(two_way["final_accuracy"]) <= 0.007
    topk = everybody["FedCAMS top-k 1/64 both ways"]
    assert float(everybody["FedAMS"]["bytes_total"]) >= 30 * float(topk["bytes_total"])


def test_the_page_on_bytes_and_time_shows_the_recorded_times() -> None:
    page = (DOCS / "explanation" / "bytes-and-time.md").read_text("utf-8")
    times = (DOCS / "demo" / "summary.md").read_text("utf-8").split("## Time to 91.86%")[1]
    recorded = {line.split(" | ")[0]: line for line in times.splitlines()}
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| Fed")]
    assert len(rows) == 3
    with (DOCS / "demo" / "summary.csv").open() as file:
        needed = {row["label"]: float(row["averaged_bytes_to_target"]) for row in csv.DictReader(file)}
    assert f"needs {needed['FedAMS'] / needed['FedCAMS lighter']:.0f} times fewer bytes" in page
    for name, slow, slow_share, far, far_share in rows:
        for time, share in ((slow, slow_share), (far, far_share)):
            assert f"/ {time} (latency {share})" in recorded[f"| {name}"]


def test_the_demo_next_to_the_oracle_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    demo = importlib.import_module("quadratic_demo")
    monkeypatch.setattr(demo, "ROUNDS", 60)
    demo.main()
    assert "oracle" in capsys.readouterr().out


def test_every_claim_about_others_has_its_source() -> None:
    table, sources = (DOCS / "comparison.md").read_text().split("Sources, in the packages")
    cited = [int(number) for number in re.findall(r"\[(\d+)\]", table)]
    listed = [int(number) for number in re.findall(r"^(\d+)\. \S", sources, re.MULTILINE)]
    assert list(dict.fromkeys(cited)) == listed == list(range(1, len(listed) + 1))
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len({line.count(" |") for line in rows}) == 1, "all rows have as many cells"


@together("page", sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "llms.txt"]), ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target and not target.startswith("api/"):  # pages that the site's build writes
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
