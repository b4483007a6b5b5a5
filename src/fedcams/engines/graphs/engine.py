"""The engine for CUDA devices: all clients in one block of memory, every step one replayed graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from fedcams.engines.base import CohortUpdate, Engine
from fedcams.engines.problem import Problem
from fedcams.errors import SpecError
from fedcams.local import Local
from fedcams.local.base import mixes_rows
from fedcams.registry import integer, register, text

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedcams.engines.graphs.prepared import Prepared

OLDEST_TRITON = (3, 6)
"""The Triton of torch 2.11; the kernels were never run with an older one."""
OLDEST_DEVICE = (8, 0)
"""The first compute capability that multiplies bfloat16 matrices."""


@register("graphs")
@dataclass(frozen=True)
class Graphs(Engine):
    """Runs a step of the whole cohort as one CUDA graph: one kernel per layer for all clients, with batch-norm fused.

    Master weights are float32 whatever the precision. A cohort of more than `clients` clients trains in groups of equal
    size. Supports models made of convolutions (dense or depthwise), batch-norm after them, linear layers, ReLU, GELU,
    max-pooling and averages, with a loss for each example. Needs compute capability 8.0 and Triton 3.6, as torch 2.11
    has. Sums are taken in a fixed order, so runs repeat bit for bit.
    """

    precision: str = text("bf16", choices=("bf16", "tf32", "float32"), doc="type of activations and matrix products")
    clients: int = integer(32, low=1, doc="how many clients train at once")
    streams: int = integer(2, low=1, doc="how many parallel lanes these clients are split into")

    needs_cuda = True
    examples = ("graphs", "graphs(precision=float32, clients=8)")
    refused = (("graphs(precision=fp8)", "allowed: bf16 or tf32 or float32"), ("graphs(clients=0)", r"\[1, inf\)"))

    priority = 3

    def supports(self, problem: Problem) -> str:
        """Refuse other devices, what has no kernel, a loss that is already a mean, and rules that need shapes."""
        try:
            check_device(problem.device, problem.dtype)
            check_rule(problem.local)
            check_layers(problem.model)
            check_loss(problem)
            check_values(problem)
        except SpecError as error:
            return str(error)
        return ""

    def train(
        self, problem: Problem, start: Tensor, buffers: Tensor | None, cohort: Sequence[int], round: int, seed: int,
        *, rate: float | None = None, shift: Tensor | None = None,
    ) -> CohortUpdate:  # fmt: skip
        check_device(problem.device, problem.dtype)
        check_rule(problem.local)
        return _prepared(problem).train(
            problem, self.precision, self.clients, self.streams, start, buffers, cohort, round, seed,
            rate=rate, shift=shift,
        )  # fmt: skip

    def predictor(self, problem: Problem, x: Tensor, buffers: Tensor | None) -> Callable[[Tensor], Tensor]:
        check_device(problem.device, problem.dtype)
        return _prepared(problem).predictor(problem, self.precision).of(x, buffers, problem.prepare)


def check_device(device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Refuse a device or dtype that the kernels cannot run on."""
    if device.type != "cuda":
        raise SpecError(f"engine=graphs: the model is on {device}; move it to a CUDA device, or use engine=stacked")
    if lacking := lacks_triton():
        raise SpecError(f"engine=graphs: {lacking}; install torch 2.11 or later for CUDA, or use engine=stacked")
    if (found := torch.cuda.get_device_capability(device)) < OLDEST_DEVICE:
        old = f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}"
        raise SpecError(f"engine=graphs: {old}; use a device with 8.0 or more, or engine=stacked")
    if dtype not in (None, torch.float32):
        raise SpecError(f"engine=graphs: the model is {dtype}; make it float32, or use engine=loop")


def has_kernels(device: torch.device) -> bool:
    """Return whether the kernels run on a device."""
    try:
        check_device(device)
    except SpecError:
        return False
    return True


def lacks_triton() -> str:
    """Return what is wrong with Triton here; an empty string if nothing is."""
    if find_spec("triton") is None or torch.version.hip is not None:
        return "this torch has no Triton for CUDA"
    import triton  # only on a CUDA device

    major, minor = (int(part) for part in triton.__version__.split(".")[:2])
    return f"Triton {triton.__version__} is too old for its kernels" if (major, minor) < OLDEST_TRITON else ""


def check_rule(local: Local) -> None:
    """Refuse a rule that mixes clients, or that depends on the order of coordinates, which differs here."""
    if mixes_rows(local):
        why = f"local={local.name} mixes clients, or changes one that is not active"
        raise SpecError(f"engine=graphs: {why}; use engine=loop, or see fedcams.local.base.only_active")
    if not local.elementwise:
        raise SpecError(f"engine=graphs: local={local} needs the layout's own order; use engine=stacked")


def check_layers(model: nn.Module) -> None:
    """Refuse a model with a layer that has no kernel."""
    from fedcams.engines.graphs.translation import translate  # the engine's own modules load only where it may run

    translate(model)


def _prepared(problem: Problem) -> Prepared:
    from fedcams.engines.graphs.prepared import prepared

    return prepared(problem)


def check_loss(problem: Problem) -> None:
    """Refuse examples that are not pairs of tensors, and a loss function that does not return one loss per example."""
    if not problem.has_tensor_pairs:
        raise SpecError("engine=graphs: the examples are not pairs of tensors; use engine=loop")
    x, y = problem.examples_of(next(iter(problem.clients)))
    with problem.evaluating() as model:
        each = problem.loss(model(problem.prepare(x[:1])), y[:1])
    if each.dim() != 1:
        raise SpecError(f"engine=graphs needs the loss of each example, got shape {list(each.shape)}; use engine=loop")
    if not problem.has_loss_per_example:
        raise SpecError("engine=graphs: the loss of an example depends on the others in its batch; use engine=loop")


def check_values(problem: Problem) -> None:
    """Refuse a model whose values have shapes that the operations would take for others."""
    from fedcams.engines.graphs.translation import check_shapes

    with problem.evaluating() as model:
        check_shapes(model, problem.prepare(problem.examples_of(next(iter(problem.clients)))[0][:1]))
