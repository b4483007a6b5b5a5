"""A model as a short list of operations on whole cohorts: its layers in order, convolution and batch-norm in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Conv:
    """A convolution, dense or depthwise; `weight` and `bias` name parameters of the model."""

    weight: str
    bias: str | None
    kernel: tuple[int, int]
    stride: int
    padding: int
    depthwise: bool

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the output for images of this size."""
        (r, s), (step, pad) = self.kernel, (self.stride, self.padding)
        return (height + 2 * pad - r) // step + 1, (width + 2 * pad - s) // step + 1


@dataclass(frozen=True)
class Norm:
    """A batch-norm; `name` is that of its module, whose parameters and statistics it uses."""

    name: str
    eps: float
    momentum: float


@dataclass(frozen=True)
class ConvNorm:
    """The operation `post(norm(pre(conv(x))) + residual)`; the residual may be another normalised convolution."""

    source: str
    conv: Conv
    norm: Norm
    pre: str = "none"
    post: str = "none"
    residual: str | ConvNorm | None = None


@dataclass(frozen=True)
class Unfused:
    """A convolution or linear layer on its own; linear layers are 1x1 convolutions of 1x1 images."""

    source: str
    conv: Conv


@dataclass(frozen=True)
class Parameterless:
    """An operation without parameters: a function of earlier values."""

    sources: tuple[str, ...]
    function: Callable[..., Tensor]


Operation = ConvNorm | Unfused | Parameterless


@dataclass
class Program:
    """Operations by the name of their result, in order; images are `[C, B, height, width, channels]`."""

    operations: dict[str, Operation] = field(default_factory=dict)
    entry: str = ""
    result: str = ""

    def orders(self) -> dict[str, tuple[int, ...]]:
        """Return how the axes of each convolution's weight are ordered in memory: channels last."""
        return {conv.weight: (2, 3, 1, 0) if conv.depthwise else (0, 2, 3, 1) for conv in self.convolutions()}

    def convolutions(self) -> Iterator[Conv]:
        """Yield all convolutions, including linear layers."""
        for operation in self.operations.values():
            if isinstance(operation, Unfused):
                yield operation.conv
            elif isinstance(operation, ConvNorm):
                yield operation.conv
                if isinstance(operation.residual, ConvNorm):
                    yield operation.residual.conv
