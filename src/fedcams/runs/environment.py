"""The environment of a run: versions, machine, device and commit."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedcams.engines import Engine
from fedcams.version import __version__

PACKAGES = ("numpy", "numba")


def environment(device: str | torch.device, engine: Engine | None = None, why_engine: str = "") -> dict[str, Any]:
    """Return everything besides the experiment that may affect its numbers and its speed; `why_engine` is a note."""
    return {
        "fedcams": __version__,
        "torch": str(torch.__version__),  # with its build, such as +cu130, which the metadata of PyPI's wheels lacks
        **{name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": _device(torch.device(device)),
        **({} if engine is None else {"engine": str(engine), "why_engine": why_engine}),
        "commit": _commit(Path(__file__).resolve().parents[1] / "__init__.py"),
    }


def peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    import resource  # missing on Windows, where importing this module must still work

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, others KiB


def peak_device_memory(device: str | torch.device) -> int | None:
    """Return the peak memory that torch has allocated on this GPU, in bytes; None on the CPU."""
    device = torch.device(device)
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _cpu() -> str:
    """Return the processor's name with its family and model, since virtual machines call many of them the same."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    first = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    if "model name" not in first:
        return platform.processor() or platform.machine()
    numbers = [f"{key} {first[name]}" for key, name in (("family", "cpu family"), ("model", "model")) if name in first]
    return ", ".join([first["model name"], *numbers])


@functools.cache
def _commit(source: Path) -> str | None:
    """Return the commit of the package's checkout, with `-dirty` if files differ; None if it is not in a checkout."""
    # A package installed into a virtual environment may be inside a repository without being part of it.
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None
    return _git(source.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git; None if git is missing or fails."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
