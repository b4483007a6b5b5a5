"""One local step of one client on memory that stays where it is: as it is written, or recorded and compiled."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook

from fedcams.engines.captured.keyed_draws import FusedDropout, key_words, keyed_draws
from fedcams.engines.graphs.engine import has_kernels
from fedcams.engines.modules import call_with
from fedcams.engines.problem import Problem
from fedcams.engines.trees import Tree, map_tensors, size
from fedcams.errors import SpecError
from fedcams.local import Slots

if TYPE_CHECKING:
    from torch import Tensor, nn

Compiled = Callable[..., Any]
"""A step as a function of the tensors of memory, frozen parameters and batch, which it changes in place."""


class Computing(NamedTuple):
    """How a model computes: in which precision, with which attention, and how images lie in memory."""

    precision: str
    plain_attention: bool = False
    """Whether attention is computed step by step."""
    channels_last: bool = False
    """Whether images have their channels last in memory."""

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Compute like this inside; cast weights are not cached, because a graph would keep old ones."""
        half = torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False)
        plain = sdpa_kernel(SDPBackend.MATH) if self.plain_attention else contextlib.nullcontext()
        with half, plain:
            yield


class Memory(NamedTuple):
    """What a client's step reads and writes, besides the batch and the frozen parameters."""

    row: Tensor
    """`[1, d]`, the trainable parameters."""
    slots: Slots
    buffers: dict[str, Tensor]
    """All of the model's buffers by name."""
    rate: Tensor
    """`[1]`, the learning rate of the round."""
    shift: Tensor | None
    """`[1, d]`, added to every gradient."""
    loss: Tensor
    """`[]`, the sum over the examples seen."""
    words: Tensor
    """`[3]`, int64: the key that random layers draw from, see `keyed_draws`; the last one counts steps."""

    @classmethod
    def of(cls, problem: Problem, shifted: bool) -> Memory:
        """Return new memory for one client of the problem; slots, buffers and everything else get values later."""
        row = torch.zeros(1, problem.layout.d, device=problem.device, dtype=problem.dtype)
        shift = torch.zeros_like(row) if shifted else None
        buffers = {name: buffer.detach().clone() for name, buffer in problem.model.named_buffers()}
        words = torch.tensor(key_words(0), device=problem.device)
        loss = row.new_zeros((), dtype=problem.sum_dtype)
        return cls(row, problem.rule.init(row), buffers, row.new_zeros(1), shift, loss, words)

    def changing(self) -> Iterator[Tensor]:
        """Yield the tensors that a step changes."""
        yield from (self.row, self.loss, self.words, *self.slots.values(), *self.buffers.values())


class Batch(NamedTuple):
    """The examples of one step."""

    x: Tree
    """Inputs, augmented and prepared."""
    y: Tree
    real: Tensor | None
    """`[B]`, one for examples and zero for padding; None if there is no padding."""


def take_step_(problem: Problem, how: Computing, memory: Memory, frozen: dict[str, Tensor], batch: Batch) -> None:
    """Take one step of the local rule in place, in the precision of the engine; random layers draw from the key."""
    leaf = memory.row[0].detach().requires_grad_()
    with torch.enable_grad(), keyed_draws(memory.words) as close:
        losses = _losses(problem, how, problem.layout.split(leaf), frozen, memory.buffers, batch)
        mean, count = _mean(losses.to(memory.loss.dtype), batch)
        close()
        with _one_pass(problem.model):
            (gradient,) = torch.autograd.grad(mean, leaf)
    with torch.no_grad():
        gradient = gradient[None] if memory.shift is None else gradient + memory.shift
        problem.rule.step_(memory.row, gradient, memory.slots, memory.rate)
        memory.loss.add_(mean.detach() * count)
        memory.words[2].add_(1)


def _losses(
    problem: Problem, how: Computing, parameters: dict[str, Tensor], frozen: dict[str, Tensor],
    buffers: dict[str, Tensor], batch: Batch,
) -> Tensor:  # fmt: skip
    """Return the losses of a batch, or their mean; buffers change in place."""
    with how.on(problem.device), _loose_weights(problem.model):
        weights = {**parameters, **frozen}
        if how.channels_last:
            weights |= _filters_with_channels_last(problem.model, weights)
        return problem.losses(call_with(problem.model, weights, buffers, batch.x), batch.y)


@contextlib.contextmanager
def _one_pass(model: nn.Module) -> Iterator[None]:
    """Refuse layers that are called again in a backward pass: the client's parameters are not in the model then."""
    layers = {*model.modules()}

    def refuse(module: nn.Module, given: Any) -> None:
        if module in layers:
            what = f"the model calls {type(module).__name__} again in its backward pass, as checkpointing does"
            raise SpecError(f"engine=captured: {what}; use engine=loop")

    hook = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def _filters_with_channels_last(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the filters of a model's convolutions, laid out as their images are.

    Otherwise each convolution reorders its filters in the forward pass and again in the backward pass.
    """
    layers = [name for name, module in model.named_modules() if type(module) is torch.nn.Conv2d]  # others may use views
    names = [f"{name}.weight".removeprefix(".") for name in layers]
    return {name: weights[name].contiguous(memory_format=torch.channels_last) for name in names if name in weights}


def draws_in_attention(problem: Problem, batch: Batch) -> bool:
    """Return whether attention in the model applies dropout in a fused kernel, which takes no key."""
    parameters = problem.layout.split(problem.read()[0].to(problem.dtype))
    buffers = {name: buffer.clone() for name, buffer in problem.model.named_buffers()}
    words = torch.tensor(key_words(0), device=problem.device)
    try:
        with torch.no_grad(), keyed_draws(words):
            _losses(problem, Computing("float32"), parameters, frozen_parameters(problem), buffers, batch)
    except FusedDropout:
        return True
    return False


@contextlib.contextmanager
def _loose_weights(model: nn.Module) -> Iterator[None]:
    """Keep recurrent layers on a GPU from moving weights out of the client's row into their own memory."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    with contextlib.ExitStack() as stack:
        if layers:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        for layer in layers:
            layer.flatten_parameters = lambda: None  # type: ignore[method-assign]
            stack.callback(delattr, layer, "flatten_parameters")
        yield


def _mean(losses: Tensor, batch: Batch) -> tuple[Tensor, Tensor | int]:
    """Return the mean loss of the real examples, and their number."""
    if batch.real is None:
        return losses.mean(), size(batch.y)
    count = batch.real.sum()
    return (losses * batch.real).sum() / count, count


def frozen_parameters(problem: Problem) -> dict[str, Tensor]:
    """Return the parameters that are not trained, by name: the model's own tensors, which all clients share."""
    return {name: p.detach() for name, p in problem.model.named_parameters() if not p.requires_grad}


# -- compiled ----------------------------------------------------------------------------------------------------------


def compile_step(problem: Problem, how: Computing, memory: Memory, frozen: dict[str, Tensor], batch: Batch) -> Compiled:
    """Return the step compiled for the shapes of this memory and batch; call it by `run_compiled`.

    Recording runs real steps, so it changes the memory. Forward pass, backward pass and local rule become one flat
    list of operations, which is compiled as a whole; the model itself is not called again. Raises whatever the compiler
    raises, and RuntimeError for a model that branches on its data.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's hints about its own code: an error filter would end the compilation
        import torch._inductor as inductor  # takes seconds, so only processes that compile import it

        from fedcams.engines.captured.convolutions import compile_kernels, use_kernels_

        tensors = _tensors((tuple(memory), frozen, tuple(batch)))
        recorded = record_step(problem, how, memory, frozen, batch)
        if how.precision == "bf16" and has_kernels(problem.device) and use_kernels_(recorded):
            compile_kernels(recorded)
        compiled: Compiled = inductor.compile(recorded, [*tensors])
    return compiled


def record_step(
    problem: Problem, how: Computing, memory: Memory, frozen: dict[str, Tensor], batch: Batch
) -> torch.fx.GraphModule:
    """Return the step as a list of operations on the tensors of memory, frozen parameters and batch."""
    from torch._decomp import get_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx  # takes long, so only processes that compile import it

    everything = (tuple(memory), frozen, tuple(batch))

    def step(*tensors: Tensor) -> Tensor:
        given = iter(tensors)
        state, fixed, examples = map_tensors(lambda _: next(given), everything)
        take_step_(problem, how, Memory(*state), fixed, Batch(*examples))
        return Memory(*state).loss.clone()

    # The schema of this operation does not say that it changes running statistics, so a compiler would lose that.
    table: Any = get_decompositions([torch.ops.aten.cudnn_batch_norm, torch.ops.aten.cudnn_batch_norm_backward])
    recorded: torch.fx.GraphModule = make_fx(step, decomposition_table=table)(*_tensors(everything))
    return recorded


def run_compiled(compiled: Compiled, memory: Memory, frozen: dict[str, Tensor], batch: Batch) -> None:
    """Take a compiled step in place."""
    with torch.no_grad():
        compiled(*_tensors((tuple(memory), frozen, tuple(batch))))


def _tensors(tree: Tree) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(found.append, tree)
    return found
