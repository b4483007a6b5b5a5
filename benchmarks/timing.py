"""Timing side by side: all contenders in turn, several times over, the best of each counts."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

import fedcams

SETTLE = 0.02
"""Seconds before each turn: OpenMP threads of what ran before spin for some milliseconds and take a core."""
REPEATS = 3
"""Timings a turn, so that the processor is awake and the caches hold of the data what fits."""


def best_of(turns: int, contenders: Mapping[str, Callable[[], Callable[[], Any]]]) -> dict[str, float]:
    """Milliseconds of each contender. Each is a set-up, run before every timing, that returns what is timed."""
    best = dict.fromkeys(contenders, float("inf"))
    for turn in range(turns + 1):  # the first compiles and warms up
        for name, prepare in contenders.items():
            time.sleep(SETTLE)
            elapsed = min(_time(prepare()) for _ in range(REPEATS))
            best[name] = min(best[name], elapsed if turn else float("inf"))
    return best


def _time(timed: Callable[[], Any]) -> float:
    started = time.perf_counter()
    timed()
    return 1000 * (time.perf_counter() - started)


def import_seconds() -> float:
    """What `import fedcams` takes beyond torch's own import, in a new process; the best of three."""
    script = "import time, torch; start = time.perf_counter(); import fedcams; print(time.perf_counter() - start)"
    return min(float(subprocess.check_output([sys.executable, "-c", script])) for _ in range(3))


def environment() -> dict[str, Any]:
    """Where the numbers come from."""
    info = Path("/proc/cpuinfo")
    models = (
        [line.split(": ")[1] for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    )
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{package.__name__: package.__version__ for package in (torch, np, numba, fedcams)},
    }


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a record next to the benchmarks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
