"""What benchmarks record besides their numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcams.runs.environment import environment as describe


def import_seconds() -> float:
    """What `import fedcams` takes beyond torch's own import, in a new process; the best of three."""
    script = "import time, torch; start = time.perf_counter(); import fedcams; print(time.perf_counter() - start)"
    return min(float(subprocess.check_output([sys.executable, "-c", script])) for _ in range(3))


def environment() -> dict[str, Any]:
    """Where the numbers come from."""
    found = describe("cpu")
    return {key: found[key] for key in ("cpu", "cores", "threads", "python", "torch", "numpy", "numba", "fedcams")}


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Writes a record next to the benchmarks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
