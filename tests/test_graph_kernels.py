"""Runs `tests/graph_kernels.py` in a process of its own, since Triton's interpreter is chosen before its import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KERNELS = Path(__file__).with_name("graph_kernels.py")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")


@needs_triton
def test_kernels_compute_what_pytorch_does() -> None:
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    environment = {**os.environ, **interpret, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(KERNELS)]
    done = subprocess.run(command, env=environment, cwd=KERNELS.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@needs_triton
def test_no_kernel_works_on_packed_integers() -> None:
    """Convolutions of images of 6x6 came out wrong on a GPU where the compiler had put two positions in a register."""
    script = KERNELS.with_name("graph_kernels_compiled.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled, *wrong = done.stdout.split("\n")
    kernels = ("backward_input", "backward_weight", "forward")
    assert compiled == " ".join(["compiled for 4 shapes:", *(f"convolution.{name} 4" for name in kernels)])
    assert not any(wrong), done.stdout
