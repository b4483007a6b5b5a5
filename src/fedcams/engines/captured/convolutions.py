"""Compute the convolutions of a recorded step with the kernels of `graphs`.

A client's batch is small, and cuDNN's kernels for it leave little of the GPU to the clients on other streams. On an
H200, a round of ResNet-18 took at least 387 ms with cuDNN and takes 288 ms with these kernels (benchmarks/records).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor  # noqa: TC002 - the annotations of an operation declare it

from fedcams.engines.graphs.program import Conv

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node

_aten = torch.ops.aten
MOST_NUMBERS = 2**31 - 2**15
"""Tensors must have fewer elements than this: kernels count them with 32 bits, and their last tiles go past the end."""
MOST_STRIDE = 255
"""The kernel for the input's gradient has stride² programs along an axis of its grid, which CUDA limits to 65,535."""


def use_kernels_(recorded: GraphModule, dtype: torch.dtype = torch.bfloat16) -> int:
    """Replace the dense convolutions of this type in a recorded step, and return how many there were.

    Forward and backward pass count as two. Grouped, dilated and transposed convolutions stay as they are, and so do
    those of images whose channels are not last in memory.
    """
    graph, count = recorded.graph, 0
    for node in list(graph.nodes):
        found = _Found.at(node)
        if found is not None and found.fits(dtype):
            (_replace_backward_ if found.is_backward else _replace_forward_)(graph, found)
            count += 1
    graph.lint()
    recorded.recompile()
    return count


def compile_kernels(recorded: GraphModule) -> None:
    """Compile the kernels of a recorded step, on all cores, without taking the step.

    While kernels compile, none of them writes its result. What follows them in the step could fail on that: an index
    out of range ends all work on the device.
    """
    from fedcams.engines.graphs.kernels.entry import compiling  # imports Triton, which a CPU may not have

    memory = functools.cache(torch.empty_strided)  # nothing reads it, so tensors of one shape can share it
    with compiling():
        for node in recorded.graph.nodes:
            if getattr(node.target, "namespace", None) == "fedcams":
                *nodes, stride, padding = node.args
                fakes = [each.meta["val"] for each in nodes]
                like = [memory(f.shape, f.stride(), dtype=f.dtype, device=f.device) for f in fakes]
                node.target(*like, stride, padding)


class _Found(NamedTuple):
    """A convolution in a recorded step, or its backward pass; the names are those of the operation's arguments."""

    node: Node
    is_backward: bool
    y: Any
    """The result, or its gradient."""
    x: Any
    weight: Any
    bias: Any
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    groups: int

    @classmethod
    def at(cls, node: Node) -> _Found | None:
        """Return the convolution at a node; None if there is none."""
        given: Any = node.args
        if node.target is _aten.convolution.default:
            x, weight, bias, stride, padding, dilation, transposed, _, groups = given
            return cls(node, False, node, x, weight, bias, stride, padding, dilation, transposed, groups)
        if node.target is _aten.convolution_backward.default:
            dy, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = given
            return cls(node, True, dy, x, weight, None, stride, padding, dilation, transposed, groups)
        return None

    def fits(self, dtype: torch.dtype) -> bool:
        """Return whether the kernels support this convolution."""
        square = len(self.stride) == 2 and len({*self.stride}) == len({*self.padding}) == 1
        dense = {*self.dilation} == {1} and self.groups == 1 and not self.transposed
        if not square or not dense or self.stride[0] > MOST_STRIDE:
            return False
        tensors = [each.meta["val"] for each in (self.x, self.weight, self.y)]
        sizes = all(each.dtype == dtype and each.numel() < MOST_NUMBERS for each in tensors)
        return sizes and all(map(_has_channels_last, tensors))


def _replace_forward_(graph: Graph, found: _Found) -> None:
    operation = torch.ops.fedcams.convolve.default
    with graph.inserting_before(found.node):
        y = graph.call_function(operation, (found.x, found.weight, found.stride[0], found.padding[0]))
        if found.bias is not None:
            column = graph.call_function(_aten.view.default, (found.bias, [-1, 1, 1]))
            y = graph.call_function(_aten.add.Tensor, (y, column))
    _replace_(graph, found.node, y)


def _replace_backward_(graph: Graph, found: _Found) -> None:
    """Replace a backward pass by one operation for each gradient that the step uses."""
    for part in list(found.node.users):
        if part.users:
            with graph.inserting_before(found.node):
                _replace_(graph, part, _gradient(graph, found, part))
        else:
            graph.erase_node(part)
    graph.erase_node(found.node)


def _gradient(graph: Graph, found: _Found, part: Node) -> Node:
    """Return the node that replaces a part: the gradient of the input, the weight or the bias."""
    which: Any = part.args[1]
    if which == 2:
        return graph.call_function(_aten.sum.dim_IntList, (found.y, [0, 2, 3]))
    ours = torch.ops.fedcams
    operation = (ours.convolve_gradient_input.default, ours.convolve_gradient_weight.default)[which]
    given = (found.y, found.x, found.weight, found.stride[0], found.padding[0])
    old = part.meta["val"]
    form = torch.channels_last if _has_channels_last(old) else torch.contiguous_format
    gradient = graph.call_function(operation, given)
    return graph.call_function(_aten._to_copy.default, (gradient,), {"dtype": old.dtype, "memory_format": form})


def _has_channels_last(images: Tensor) -> bool:
    return images.is_contiguous(memory_format=torch.channels_last)


def _replace_(graph: Graph, old: Node, new: Node) -> None:
    new.meta = old.meta
    old.replace_all_uses_with(new)
    graph.erase_node(old)


# -- the operations: images `[B, k, h, w]` and filters `[k', k, r, s]` with channels last in memory --------------------


def _geometry(weight: Tensor, stride: int, padding: int) -> Conv:
    _, _, height, width = weight.shape
    return Conv("", None, (height, width), stride, padding, depthwise=False)


def _as_rows(x: Tensor) -> Tensor:
    """Return `[1, B, h, w, k]`, as the kernels take the images or the filters of one client."""
    return x.permute(0, 2, 3, 1).contiguous()[None]


def _as_planes(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)


def _empty(like: Tensor, planes: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return memory for `[B, k, h, w]` with channels last."""
    count, channels, height, width = planes
    return _as_planes(like.new_empty(count, height, width, channels, dtype=dtype or like.dtype))


@torch.library.custom_op("fedcams::convolve", mutates_args=())
def convolve(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Return the convolution of images with filters."""
    from fedcams.engines.graphs import launch

    y, _ = launch.convolve(_geometry(weight, stride, padding), _as_rows(x), _as_rows(weight), None, "bf16")
    return _as_planes(y[0])


@convolve.register_fake
def _(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    size = _geometry(weight, stride, padding).size(*x.shape[2:])
    return _empty(x, (len(x), len(weight), *size))


@torch.library.custom_op("fedcams::convolve_gradient_input", mutates_args=())
def convolve_gradient_input(dy: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Return the gradient of the images."""
    from fedcams.engines.graphs import launch

    conv = _geometry(weight, stride, padding)
    return _as_planes(launch.gradient_input(conv, _as_rows(dy), _as_rows(x), _as_rows(weight), "bf16")[0])


@convolve_gradient_input.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    return _empty(x, x.shape)


@torch.library.custom_op("fedcams::convolve_gradient_weight", mutates_args=())
def convolve_gradient_weight(dy: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Return the gradient of the filters, in float32 as it was summed."""
    from fedcams.engines.graphs import launch

    outputs, inputs, height, width = weight.shape
    gradient = torch.empty(1, outputs, height, width, inputs, device=x.device)
    launch.gradient_weight(_geometry(weight, stride, padding), _as_rows(dy), _as_rows(x), launch.Slot(gradient), "bf16")
    return _as_planes(gradient[0])


@convolve_gradient_weight.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    return _empty(weight, weight.shape, torch.float32)
