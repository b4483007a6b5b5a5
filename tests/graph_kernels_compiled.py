"""Compiles convolutions of many shapes for an H200, without one, and prints where packed integers are left in them.

The first two kernels fail at first, as they do where Python refuses to parse on several threads; a start must find or
make them none the less.
Run by `tests/test_graph_kernels.py` in a separate process: Triton must not be the interpreter here.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from graphs_compiled import Driver, kernels, packed

from fedcams.engines.captured.convolutions import compile_kernels, use_kernels_
from fedcams.engines.graphs import launch
from fedcams.engines.graphs.kernels import convolution, entry
from fedcams.engines.graphs.program import Conv

SHAPES = [(6, 64, 64, 3, 1), (7, 48, 32, 3, 1), (14, 64, 128, 3, 2), (28, 16, 16, 3, 1)]
"""Side, input and output channels, kernel, stride; sides that are no powers of two."""


def convolve(side: int, inputs: int, outputs: int, kernel: int, stride: int) -> None:
    """Notes the kernels of one convolution and its gradients."""
    conv = Conv("w", None, (kernel, kernel), stride, kernel // 2, depthwise=False)
    x = torch.zeros(2, 5, side, side, inputs, dtype=torch.bfloat16)
    w = torch.zeros(2, outputs, kernel, kernel, inputs, dtype=torch.bfloat16)
    y, _ = launch.convolve(conv, x, w, None, "bf16")
    launch.gradient_input(conv, y, x, w, "bf16")
    launch.gradient_weight(conv, y, x, launch.Slot(torch.zeros(w.shape)), "bf16")


def recorded(side: int, inputs: int, outputs: int) -> GraphModule:
    """One convolution and its gradients, as the engine `captured` records them."""

    def step(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = F.conv2d(x, weight, padding=1)
        return torch.autograd.grad(y.square().sum(), (x, weight))

    shapes = [(5, inputs, side, side), (outputs, inputs, 3, 3)]
    given = [torch.zeros(shape, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last) for shape in shapes]
    graph: GraphModule = make_fx(step)(*(tensor.requires_grad_() for tensor in given))
    assert use_kernels_(graph) == 2
    return graph


def failing_at_first(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    """The function, which refuses its first calls."""
    left = iter(range(times))

    def called(*arguments: Any, **named: Any) -> Any:
        if next(left, None) is not None:
            raise SystemError("AST constructor recursion depth mismatch")
        return function(*arguments, **named)

    return called


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    forward = convolution.forward.jitted
    forward.device_caches[0]  # makes ready for the device, `compile` too
    forward.compile = failing_at_first(forward.compile, 2)
    with entry.compiling():
        calls = entry._noted or []
        for shape in SHAPES:
            convolve(*shape)
    compile_kernels(recorded(9, 24, 16))
    entry._compile(calls)  # as a start does: it fails where a failed compilation is left in the cache
    found = list(kernels())
    counts = Counter(name for name, _ in found if name.startswith("convolution."))
    print(
        f"compiled for {len(SHAPES)} shapes and a step:", *(f"{name} {count}" for name, count in sorted(counts.items()))
    )
    print("\n".join(f"{name} has packed integers" for name, kernel in found if packed(kernel)))


if __name__ == "__main__":
    main()
