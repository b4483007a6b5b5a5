"""What a report on 40 runs of 500 rounds costs: CPU seconds to write it, and until the browser shows its first chart.

Run by `make bench`, on the first such runs in results/. `fedcams report` is timed in new processes, including all that
they load. The page is timed in Chromium, if it is installed, as the CPU time of its main thread. Playwright drives the
browser through a debugger, so Plotly loads more slowly than it does for readers. The best of several turns counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from recording import environment, save
from rich.console import Console

RESULTS, RUNS, ROUNDS = Path(__file__).parents[1] / "results", 40, 500
RECORD = Path(__file__).parent / "records" / "report-cost.json"
CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = ["--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=5, help="timings of each; the best counts")
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name}")
    chosen = options.parse_args()
    runs = [path.parent for path in sorted(RESULTS.rglob("rounds.jsonl")) if lines(path) == ROUNDS][:RUNS]
    with tempfile.TemporaryDirectory() as folder:
        written = min(writing(runs, Path(folder)) for _ in range(chosen.turns))
        charts = [first_chart(Path(folder) / "index.html") for _ in range(chosen.turns)]
    shown = min((seconds for seconds in charts if seconds is not None), default=None)
    found = {"runs": len(runs), "rounds": ROUNDS, "cpu_seconds_to_write": written, "cpu_seconds_to_first_chart": shown}
    Console().print(found)
    if chosen.save:
        save(RECORD, {**found, "turns": chosen.turns, "environment": environment()})


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def writing(runs: list[Path], out: Path) -> float:
    """Return the CPU seconds of `fedcams report` on these runs."""
    compiled = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # as an installed package is
    command = [sys.executable, "-m", "fedcams", "report", *map(str, runs), "--out", str(out)]
    before = os.times()
    subprocess.run(command, check=True, capture_output=True, env=compiled)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def first_chart(page: Path) -> float | None:
    """Return the CPU seconds of the page's main thread until its first chart is there; None without a browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if not CHROMIUM.exists():
        return None
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        session = tab.context.new_cdp_session(tab)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        tab.goto(page.as_uri())
        tab.locator(".chart .main-svg").first.wait_for()
        found: list[dict[str, Any]] = session.send("Performance.getMetrics")["metrics"]
        browser.close()
    return next(float(each["value"]) for each in found if each["name"] == "TaskDuration")


if __name__ == "__main__":
    main()
