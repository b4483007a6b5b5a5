"""Everything that docs/theory.md shows, read from docs/theory/ and results/, and where its numbers come from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from fedcams.runs.environment import environment
from reproduction.runs import Results
from theory_page import adaptivity, experiments, grid
from theory_page.adaptivity import Point
from theory_page.experiments import Package
from theory_page.grid import Found

FOLDER = experiments.FILE.parent
PROCESSES = 2
KEPT = ("cpu", "cores", "python", "numpy", "torch", "fedcams")
STUDIES: Mapping[str, tuple[Path, Callable[[Path, int], int]]] = {
    "oracle": (grid.FILE, grid.run),
    "package": (experiments.FILE, experiments.run),
    "digits": (adaptivity.FILE, adaptivity.run),
}
"""Where each study keeps its numbers, and what runs it."""


@dataclass(frozen=True)
class Measurements:
    """What the page and its pictures show."""

    oracle: Found
    package: Package
    digits: Sequence[Point]
    results: Results
    made: Mapping[str, Mapping[str, Any]]
    """For each file: the number of runs, seconds on the clock and of all processes, device and versions."""


def run(name: str) -> None:
    """Run a study again, write its numbers, and note where they were made and how long it took."""
    file, study = STUDIES[name]
    start, used = perf_counter(), _used()
    runs = study(file, PROCESSES)
    times = {"seconds": round(perf_counter() - start), "cpu_seconds": round(_used() - used)}
    about, here = {"runs": runs, **times, "processes": PROCESSES}, environment("cpu")
    kept = made() | {file.name: about | {key: here[key] for key in KEPT}}
    (FOLDER / "environment.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


def _used() -> float:
    """Return the CPU seconds of finished child processes, which do not depend on other programs as time does."""
    times = os.times()
    return times.children_user + times.children_system


def made() -> dict[str, dict[str, Any]]:
    """Return what is noted about each file."""
    path = FOLDER / "environment.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def stored(results: Results) -> Measurements:
    """Return what was measured, with these recorded runs."""
    return Measurements(grid.stored(), experiments.stored(), adaptivity.stored(), results, made())
