"""The engine for any model on a CUDA device: a client's step, compiled and captured as a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fedcams.engines.base import CohortUpdate, Engine
from fedcams.engines.choice import trains
from fedcams.engines.compiled import compiling_pays
from fedcams.engines.modules import hooked_parameter
from fedcams.engines.problem import Problem
from fedcams.engines.trees import Tree, call, map_tensors
from fedcams.errors import SpecError
from fedcams.keys import derive
from fedcams.registry import flag, integer, register, text

if TYPE_CHECKING:
    from torch import Tensor


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether a device has units for matrices in bfloat16; older GPUs emulate them slowly."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@register("captured")
@dataclass(frozen=True)
class Captured(Engine):
    """Trains any model on a GPU: a client's step is compiled and captured once, then replayed for every step.

    Forward pass, backward pass and local rule become one compiled list of operations and one CUDA graph. Several
    clients train side by side, each on a stream with memory for its trainable parameters and activations; frozen
    parameters are stored once. `bf16` computes under autocast with float32 master weights, and compiled steps use the
    convolutions of `graphs` where these have a kernel; `float32` computes as torch does, where convolutions may
    use TF32. Batches that cannot be padded (batch-norm, a loss that is already a mean) have a graph for every size, and
    only full ones are compiled. Random layers draw from a key of client and step, so runs repeat, but differ from
    `loop`. `auto` chooses it on a GPU for models without `graphs` kernels, compiles if each client takes 10,000 steps
    or more, and takes `float32` if the model or its loss fails in `bf16`. On a CPU, steps are neither compiled nor
    captured.
    """

    precision: str = text("bf16", choices=("bf16", "float32"), doc="type of activations and matrix products")
    streams: int = integer(10, low=1, doc="how many clients train side by side; fewer take less memory")
    compile: bool = flag(True, doc="compile full batches with torch.compile; takes half a minute, once")

    examples = ("captured(precision=float32)", "captured(streams=2, compile=false)")
    refused = (("captured(precision=fp8)", "allowed: bf16 or float32"), ("captured(streams=0)", r"\[1, inf\)"))

    priority = 2
    needs_trial = True

    def supports(self, problem: Problem) -> str:
        """Refuse parameters of several types or with hooks, and recurrent layers with built-in dropout."""
        types = {str(p.dtype) for p in problem.model.parameters() if p.requires_grad}
        if len(types) > 1:
            return f"engine=captured: trainable parameters are {' and '.join(sorted(types))}; use engine=loop"
        if name := hooked_parameter(problem.model):
            return f"engine=captured: parameter {name!r} has a hook on its gradient; use engine=loop"
        for name, module in problem.model.named_modules():
            if isinstance(module, torch.nn.RNNBase) and module.dropout > 0:
                kind = type(module).__name__
                return f"engine=captured: layer {name!r} is an {kind} with dropout, which takes no key; use engine=loop"
        return ""

    def declines(self, problem: Problem) -> str:
        """Return why `auto` skips this engine on other devices: it would be a slower `loop`."""
        if problem.device.type == "cuda":
            return ""
        return f"engine=captured: the model is on {problem.device}, and only steps on a GPU can be captured"

    def on_trial(self) -> Captured:
        return Captured(precision="float32", streams=1, compile=False)

    def tuned(self, problem: Problem, rounds: int, size_varies: bool) -> Captured:
        """Compile if the run has enough steps to make up for the time that it takes.

        Round to bf16 unless the device emulates it, or the model or its loss fails under autocast, as `BCELoss` does.
        """
        rounds_well = multiplies_bf16(problem.device) and trains(Captured(streams=1, compile=False), problem)
        precision = "bf16" if rounds_well else "float32"
        return Captured(precision, compile=compiling_pays(problem, rounds))

    @contextlib.contextmanager
    def drawing(self, problem: Problem, client: int, round: int, seed: int) -> Iterator[None]:
        from fedcams.engines.captured.keyed_draws import key_words, keyed_draws

        words = key_words(derive(seed, "dropout", round, client))
        with keyed_draws(torch.tensor(words, device=problem.device)):
            yield

    def train(
        self, problem: Problem, start: Tensor, buffers: Tensor | None, cohort: Sequence[int], round: int, seed: int,
        *, rate: float | None = None, shift: Tensor | None = None,
    ) -> CohortUpdate:  # fmt: skip
        from fedcams.engines.captured.prepared import Round, prepared  # loads only where it is used

        if reason := self.supports(problem):
            raise SpecError(reason)
        work = Round.of(problem, start, buffers, cohort, round, seed, rate, shift)
        problem.model.train()
        compiles = self.compile and problem.device.type == "cuda"
        count = min(self.streams, len(cohort))
        return work.train(prepared(problem).seats_for(problem, self.precision, compiles, count, shift is not None))

    def predictor(self, problem: Problem, x: Tensor, buffers: Tensor | None) -> Callable[[Tree], Any]:
        """Return the model as a function of raw inputs, in the engine's precision; outputs are float32."""
        from fedcams.engines.captured.prepared import prepared
        from fedcams.engines.captured.staging import as_channels_last
        from fedcams.engines.captured.step import Computing

        model, turned = problem.load(x, buffers).eval(), prepared(problem).habits_of(problem).channels_last

        def predict(inputs: Tree) -> Any:
            ready = problem.prepare(inputs)
            ready = map_tensors(as_channels_last, ready) if turned else ready
            with Computing(self.precision).on(problem.device):
                outputs = call(model, ready)
            return map_tensors(lambda part: part.float() if part.dtype == torch.bfloat16 else part, outputs)

        return predict
