"""ConvMixer: patches, then depthwise and pointwise convolutions in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from fedcams.errors import SpecError
from fedcams.models.base import Model
from fedcams.registry import integer, register


class Residual(nn.Module):
    """Add the input to the output of a module: `f(x) + x`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Map `[n, c, h, w]` to `[n, c, h, w]`."""
        out: Tensor = self.inner(x) + x
        return out


class GlobalAverage(nn.Module):
    """Mean over height and width."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[n, c, h, w]` to `[n, c]`."""
        return x.mean((-2, -1))


def _activated(convolution: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(convolution, nn.GELU(), nn.BatchNorm2d(convolution.out_channels))


@register("convmixer")
@dataclass(frozen=True)
class ConvMixer(Model):
    """Patch embedding, `depth` times (residual depthwise, pointwise), global average, linear.

    Every convolution is followed by GELU and batch-norm; 594,186 parameters for 10 classes of 3-channel images.
    """

    dim: int = integer(256, low=1, doc="channels")
    depth: int = integer(8, low=1, doc="blocks")
    kernel: int = integer(5, low=1, doc="side of the depthwise convolution")
    patch: int = integer(2, low=1, doc="side of a patch")

    reference = "Trockman, Kolter, Patches Are All You Need?, TMLR 2023"
    examples = ("convmixer", "convmixer(dim=8, depth=2, kernel=3, patch=1)")
    refused = (
        ("convmixer(depth=0)", r"allowed: an integer in \[1, inf\)"),
        ("convmixer(kernel=4)", "give an odd number"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:  # torch pads an even kernel by copying every input, and one side more than the other
            raise SpecError(f"convmixer: kernel={self.kernel}: give an odd number, so that it has a centre")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels = self.image_channels(shape, smallest=self.patch)
        patches = nn.Conv2d(channels, self.dim, self.patch, stride=self.patch)
        head = (GlobalAverage(), nn.Linear(self.dim, classes))
        return nn.Sequential(_activated(patches), *self._blocks(), *head)

    def _blocks(self) -> Iterator[nn.Module]:
        for _ in range(self.depth):
            across = nn.Conv2d(self.dim, self.dim, self.kernel, groups=self.dim, padding="same")
            pointwise = nn.Conv2d(self.dim, self.dim, 1)
            yield nn.Sequential(Residual(_activated(across)), _activated(pointwise))
