"""What Triton makes of the kernels of engine `graphs` for an H200, without one: registers, spills, packed integers.

    python benchmarks/graphs_compiled.py resnet18 convmixer

Compiles every kernel of a local step and of an evaluation (10 clients, 20 images; 1000 images) for compute capability
9.0 and lists them by name; needs Triton, no GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn import functional as F
from triton.backends.compiler import GPUTarget

from fedcams import models
from fedcams.engines import Problem
from fedcams.engines.graphs import cohort
from fedcams.engines.graphs.cohort import Cohort
from fedcams.engines.graphs.kernels import entry
from fedcams.engines.graphs.operations import run
from fedcams.engines.graphs.prepared import Predictor, Prepared
from fedcams.local import local


class Driver:
    """Says that an H200 is there; enough to compile for one."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def problem(name: str) -> Problem:
    clients = {0: (torch.randn(20, 3, 32, 32), torch.randint(0, 10, (20,)))}
    loss = lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none")  # noqa: E731
    return Problem(models.build(name, (3, 32, 32), 10, seed=0), loss, clients, local("sgd(lr=0.01, batch=20)"))


def compile_step(task: Problem, clients: int = 10, images: int = 20) -> None:
    made = Prepared(task)
    step = Cohort(task, made.program, made.packing, clients, "bf16", streams=2)
    step.inputs = torch.zeros(clients, images, 32, 32, 3, dtype=torch.bfloat16)
    step.targets = torch.zeros(clients, images, dtype=torch.int64)
    step.weight = torch.zeros(clients, images)
    with entry.compiling():
        step._step()


def compile_prediction(task: Problem, images: int = 1000) -> None:
    made = Prepared(task)
    predictor = Predictor(task, made.program, made.packing, "bf16")
    with entry.compiling(), torch.no_grad():
        run(made.program, predictor.operations, torch.zeros(1, images, 32, 32, 3, dtype=torch.bfloat16))


def kernels() -> Iterator[tuple[str, Any]]:
    """Everything that was compiled, with the constants that tell one specialisation from another."""
    names = [name for name in list(sys.modules) if name.startswith(entry.__package__)]
    entries = [each for name in names for each in vars(sys.modules[name]).values() if isinstance(each, entry.Entry)]
    seen = {id(each): each for each in entries}
    for each in seen.values():
        for kernel in each.jitted.device_caches[0][0].values():
            yield f"{each.jitted.__module__.rpartition('.')[2]}.{each.jitted.__name__}", kernel


def packed(kernel: Any) -> int:
    """How many instructions work on two integers in one register, which ptxas does not always get right."""
    return len(re.findall(r"\.[su]16x2\b", kernel.asm["ptx"]))


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, which are spills."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None
    return int(found[1]), int(found[2])


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    cohort.uses_kernels = lambda device: True
    for name in sys.argv[1:] or ["resnet18", "convmixer"]:
        task = problem(name)
        compile_step(task)
        compile_prediction(task)
    rows = []
    for name, kernel in kernels():
        registers, stack = resources(kernel.asm["cubin"])
        constants = {k[0]: v for k, v in kernel.src.constants.items()}
        names = kernel.src.fn.arg_names
        shown = " ".join(f"{names[i]}={v}" for i, v in constants.items() if names[i] in SHOWN)
        products = kernel.asm["ptx"].count("wgmma.mma_async")
        usage = (kernel.metadata.num_warps, registers, stack, kernel.metadata.shared, products, packed(kernel))
        rows.append((name, shown, *usage))
    print(f"{'kernel':32s} warps regs spill shared wgmma packed  constants")
    for name, shown, warps, registers, stack, shared, products, pairs in sorted(rows):
        print(f"{name:32s} {warps:5d} {registers:4d} {stack:5d} {shared:6d} {products:5d} {pairs:6d}  {shown}")


SHOWN = {"H", "W", "CI", "CO", "K", "R", "STEP", "BM", "BN", "BK", "BW", "RES", "PRE", "STATS", "AFFINE", "ADD"}

if __name__ == "__main__":
    main()
