"""ResNet-18 for small images: a 3x3 stem and no max-pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedcams.models.base import Model
from fedcams.registry import integer, register

if TYPE_CHECKING:
    from torch import nn


@register("resnet18")
@dataclass(frozen=True)
class ResNet18(Model):
    """The CIFAR variant: 3x3 stem, stages of 64, 128, 256, 512 channels; 11,173,962 parameters for 10 classes."""

    width: int = integer(64, low=1, doc="channels of the first stage; each of the next three has twice as many")

    reference = "He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, CVPR 2016"
    examples = ("resnet18", "resnet18(width=4)")
    refused = (("resnet18(width=0)", r"allowed: an integer in \[1, inf\)"),)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        from fedcams.models.networks.resnet import ResNet

        return ResNet(self.image_channels(shape), classes, self.width)
