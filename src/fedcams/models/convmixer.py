"""ConvMixer: patches, then depthwise and pointwise convolutions in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedcams.errors import SpecError
from fedcams.models.base import Model
from fedcams.registry import integer, register

if TYPE_CHECKING:
    from torch import nn


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
        from fedcams.models.networks.convmixer import convmixer

        channels = self.image_channels(shape, smallest=self.patch)
        return convmixer(channels, classes, self.dim, self.depth, self.kernel, self.patch)
