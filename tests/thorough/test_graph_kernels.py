"""Runs `tests/graph_kernels.py` in a separate process, since Triton's interpreter is chosen before its import."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from forks import Forks

KERNELS = Path(__file__).parents[1] / "graph_kernels.py"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")


@needs_triton
def test_kernels_compute_what_pytorch_does(forks: Forks) -> None:
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    script = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    command = ["-q", "-p", "no:cacheprovider", KERNELS]
    done = forks.run(script, *command, env={**os.environ, **interpret}, cwd=KERNELS.parents[1])
    assert done.code == 0, done.output[-6000:] + done.errors[-2000:]
    assert " passed" in done.output


@needs_triton
def test_no_kernel_works_on_packed_integers(forks: Forks) -> None:
    """Convolutions of images of 6x6 came out wrong on a GPU where the compiler had put two positions in a register."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = forks.run("import graph_kernels_compiled; graph_kernels_compiled.main()", env=environment)
    assert done.code == 0, done.errors[-3000:]
    compiled, *wrong = done.output.split("\n")
    kernels = ("backward_input", "backward_weight", "forward")
    assert compiled == " ".join(["compiled for 4 shapes and a step:", *(f"convolution.{name} 5" for name in kernels)])
    assert not any(wrong), done.output
