"""What benchmarks record beside their numbers."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

import fedcams


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
